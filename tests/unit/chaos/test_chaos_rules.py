"""Rules of the fault campaign: each can be broken, and nothing that is allowed breaks one."""

from typing import Any

import pytest

from tests.chaos.histories import History, faults
from tests.chaos.invariants import (
    ASLEEP_GRACE_S,
    FAILED_GRACE_S,
    FIRST,
    GRACE_S,
    GUARDED,
    LAUNCH_FAILED,
    Rules,
    overlaps,
)
from tests.chaos.schedule import KINDS, SHARES, Submission, schedule
from tests.chaos.script_histories import MANNERS

GPUS = {"g01": 4, "g02": 4}


def asked(name: str, kind: str = "sleep", least: int = 1, most: int = 4) -> Submission:
    if kind == "rigid":
        most = least
    return Submission(at=0.0, name=name, kind=kind, user="alice", least=least, most=most, work=20)


def job(name: str, **values: Any) -> dict[str, Any]:
    fresh = {
        "id": 7,
        "name": name,
        "state": "RUNNING",
        "flags": [],
        "ended": False,
        "reason": "None",
        "description": "",
        "comment": "",
        "priority": 1000,
        "nice": 0,
        "required": [],
        "excluded": [],
        "reservation": "",
        "restarts": 0,
        "asked": 1,
        "held": {"g01": [0]},
    }
    return fresh | values


def waiting(name: str, **values: Any) -> dict[str, Any]:
    return job(name, state="PENDING", held={}, **values)


def broken(
    *jobs: dict[str, Any],
    kinds: dict[str, str] | None = None,
    reservations: dict[str, float] | None = None,
    seconds: int = 0,
    healthy: bool = True,
) -> list[str]:
    """Rules that are broken when this is seen for so long."""
    known = {
        j["name"]: asked(j["name"], (kinds or {}).get(j["name"], "sleep"))
        for j in jobs
        if not j["name"].endswith("+1")
    }
    rules = Rules(known, GPUS)
    for at in range(seconds + 1):
        named = {name: at + ahead for name, ahead in (reservations or {}).items()}
        sample = {"at": 1000.0 + at, "jobs": list(jobs)}
        sample["reservations"] = {n: e + 1000.0 for n, e in named.items()}
        rules.judge(sample, healthy=healthy)
    return [b.rule for b in rules.breaches]


def companion(run: int = 0, **values: Any) -> dict[str, Any]:
    return job("a+1", id=9, comment=f"selastic:companion:7:{run}:3", held={"g02": [0]}, **values)


def test_companions_count_for_their_job() -> None:
    base = job("a", held={"g01": [0, 1, 2]})
    known = {"a": asked("a", most=3)}
    for other, rules in (((), []), ((companion(),), ["range"]), ((companion(run=1),), [])):
        judge = Rules(known, GPUS)
        judge.judge({"at": 1.0, "jobs": [base, *other], "reservations": {}}, healthy=True)
        assert [b.rule for b in judge.breaches] == rules


def test_a_companion_may_not_outlive_its_job() -> None:
    assert broken(job("a"), companion(), seconds=80) == []
    assert broken(job("a", restarts=1), companion(), seconds=40) == []
    assert broken(job("a", restarts=1), companion(), seconds=80) == ["companion"]
    assert broken(waiting("a"), companion(ended=True), seconds=80) == []
    assert broken(waiting("a"), companion(flags=["COMPLETING"]), seconds=80) == []
    shared = companion() | {"held": {"g01": [0]}}
    assert broken(job("a"), shared) == ["twice"]


@pytest.mark.parametrize(
    ("values", "words", "rules"),
    [
        ({}, ["IDLE", "POWERED_DOWN"], ["asleep"]),
        ({}, ["IDLE", "POWERED_DOWN", "POWERING_UP"], []),
        ({}, ["IDLE", "POWERED_DOWN", "DRAIN"], []),
        ({"asked": 5}, ["IDLE", "POWERED_DOWN"], []),
        ({"reason": "Dependency"}, ["IDLE", "POWERED_DOWN"], []),
        ({"excluded": ["g02"]}, ["IDLE", "POWERED_DOWN"], []),
    ],
)
def test_a_job_waits_for_a_sleeping_node_no_longer_than_a_boot(
    values: dict[str, Any], words: list[str], rules: list[str]
) -> None:
    judge = Rules({"a": asked("a")}, GPUS)
    for at in range(int(ASLEEP_GRACE_S) + 1):
        sample = {"at": 1000.0 + at, "jobs": [waiting("a", **values)], "reservations": {}}
        assert judge.breaches == []
        judge.judge(sample | {"nodes": {"g01": ["ALLOCATED"], "g02": words}}, healthy=True)
    assert [b.rule for b in judge.breaches] == rules


def test_what_is_allowed_breaks_nothing() -> None:
    moving = waiting("a", required=["g02"], reservation="selastic_1", priority=FIRST, asked=4)
    assert broken(moving, job("b"), reservations={"selastic_1": 60, "maintenance": 9e5}) == []
    assert broken(waiting("c"), job("d", held={"g01": [0, 1], "g02": [0, 1]}), seconds=200) == []
    theirs = waiting("e", reason="JobHeldAdmin", description=LAUNCH_FAILED)
    assert broken(theirs, seconds=200) == []
    guarded = waiting("f", reason="JobHeldUser", comment=f"{GUARDED}no progress")
    assert broken(guarded, seconds=200) == []


@pytest.mark.parametrize(
    ("seen", "rule"),
    [
        (job("a", held={"g01": [0, 1, 2, 3], "g02": [0]}), "range"),
        (waiting("a", reason="JobHeldUser"), "held"),
        (waiting("a", required=["g01"]), "pinned"),
        (waiting("a", reservation="selastic_1"), "pinned"),
        (job("a", priority=FIRST), "pinned"),
        (job("a", reservation="selastic_1"), "pinned"),
    ],
)
def test_an_elastic_job(seen: dict[str, Any], rule: str) -> None:
    assert broken(seen, seconds=int(GRACE_S) + 2) == [rule]


def test_a_mark_may_stand_while_there_is_nobody_to_take_it_away() -> None:
    marked = waiting("a", required=["g01"])
    assert broken(marked, seconds=int(GRACE_S) - 10) == []
    assert broken(marked, seconds=500, healthy=False) == []


def test_a_job_that_a_lost_node_still_holds_cannot_be_changed_yet() -> None:
    left = waiting("a", required=["g01"], flags=["COMPLETING", "REQUEUED"])
    assert broken(left, seconds=500) == []


@pytest.mark.parametrize(
    ("seen", "rule"),
    [
        (waiting("r", priority=FIRST), "rigid"),
        (job("r", reservation="selastic_4"), "rigid"),
        (job("r", restarts=1), "restarted"),
        (job("r", held={"g01": [0, 1]}), "range"),
    ],
)
def test_a_rigid_job(seen: dict[str, Any], rule: str) -> None:
    assert broken(seen, kinds={"r": "rigid"}) == [rule]


def failed(*states: str, excused: bool = False) -> list[str]:
    """Rules that are broken by a script that runs and then has these states, one a second."""
    known = {"s": asked("s", "script")}
    rules = Rules(known, GPUS, lambda rule, name: excused and rule == "failed")
    for at, state in enumerate(("RUNNING", *states)):
        seen = job("s", state=state, ended=state == "FAILED", held={})
        rules.judge({"at": at, "jobs": [seen], "reservations": {}}, healthy=True)
    return [b.rule for b in rules.breaches]


def test_an_unmodified_script_fails_only_by_a_fault() -> None:
    for_good = ["FAILED"] * (int(FAILED_GRACE_S) + 2)
    assert failed(*for_good) == ["failed"]
    assert failed(*for_good, excused=True) == []
    assert failed(*["FAILED"] * 5, *["PENDING"] * 30) == []
    assert broken(job("a", state="FAILED", ended=True), kinds={"a": "sleep"}) == []


def test_gpus_are_given_and_promised_once() -> None:
    assert broken(job("a", held={"g01": [0, 1]}), job("b", held={"g01": [1]})) == ["twice"]
    promised = waiting("b", required=["g01"], priority=FIRST, asked=4)
    assert broken(job("a"), promised, seconds=6) == []
    assert broken(job("a"), promised, seconds=14) == ["twice"]


def test_reservations_are_named_and_end() -> None:
    assert broken(reservations={"selastic_1": 60}, seconds=int(GRACE_S) + 2) == ["reservation"]
    assert broken(reservations={"selastic_1": 3600}) == ["reservation"]
    assert broken(reservations={"theirs": 3600}, seconds=300) == []


def test_a_job_does_not_vanish() -> None:
    rules = Rules({"a": asked("a"), "b": asked("b")}, GPUS)
    gone = job("b", ended=True, held={})
    rules.judge({"at": 0, "jobs": [job("a"), gone], "reservations": {}}, healthy=True)
    rules.judge({"at": 1, "jobs": None, "reservations": None}, healthy=False)
    assert rules.breaches == []
    rules.judge({"at": 2, "jobs": [], "reservations": {}}, healthy=True)
    assert [(b.rule, b.who) for b in rules.breaches] == [("vanished", "a")]


def test_two_attempts_at_the_same_time() -> None:
    one, other = [(t, "g01") for t in range(10)], [(t, "g02") for t in range(11, 20)]
    assert overlaps({0: one, 1: other}) == []
    late = [*one, (14.5, "g01")]
    assert overlaps({0: late, 1: other}) == [(0, 1, "g01", 3.5)]


def history(*rows: tuple[int, int, list[int], float]) -> History:
    """Of (step, attempt, samples, loss)."""
    found = History()
    for step, run, samples, loss in rows:
        found.samples[step, (run, 0)].update(samples)
        found.losses[step, (run, 0)] = loss
    return found


REFERENCE = history((1, 0, [1, 2], 3.0), (2, 0, [3, 4], 2.0), (3, 0, [5, 6], 1.0))


def test_an_attempt_whose_number_slurmctld_forgot_is_another_one() -> None:
    rank = ['{"step": 1, "run": 0, "indices": [1, 2]}'] * 2
    loss = ['{"step": 1, "run": 0, "loss": 3.0}'] * 2
    mine = History.read([rank], loss)
    assert faults(mine, REFERENCE, ended=False) == []
    assert mine.lost_steps() == 1


def test_a_training_that_lost_a_step_and_did_it_again() -> None:
    mine = history(
        (1, 0, [2, 1], 3.0), (2, 0, [3, 4], 2.0), (2, 1, [3, 4], 2.0), (3, 1, [5, 6], 1.00001)
    )
    assert faults(mine, REFERENCE, ended=True) == []
    assert mine.lost_steps() == 1
    # On one of two ranks only: the step was not finished, and has no loss.
    mine.samples[3, (0, 0)].update([5])
    assert faults(mine, REFERENCE, ended=True) == []


def test_a_rank_that_was_killed_before_it_wrote_down_its_last_step() -> None:
    """The step was done everywhere; only an attempt's last one can look like that."""
    rows = ((1, 0, [1, 2], 3.0), (2, 0, [3], 2.0), (3, 1, [5, 6], 1.0))
    assert faults(history(*rows), REFERENCE, ended=True) == []
    assert faults(history(*rows, (3, 0, [5, 6], 1.0)), REFERENCE, ended=True)
    assert faults(history(*rows[:2], (3, 1, [5], 1.0)), REFERENCE, ended=True)


@pytest.mark.parametrize(
    "row",
    [
        (2, 1, [3], 2.0),
        (2, 1, [3, 4, 4], 2.0),
        (2, 1, [3, 5], 2.0),
        (2, 1, [3, 4], 2.1),
        (4, 1, [7], 0.5),
    ],
    ids=["missing", "twice", "other", "loss", "beyond"],
)
def test_a_training_that_did_something_else(row: tuple[int, int, list[int], float]) -> None:
    mine = history(
        *((s, r[0], list(c), REFERENCE.losses[s, r]) for (s, r), c in REFERENCE.samples.items()),
        row,
    )
    assert faults(mine, REFERENCE, ended=True)


def test_a_training_with_a_hole() -> None:
    assert faults(history((1, 0, [1, 2], 3.0), (3, 1, [5, 6], 1.0)), REFERENCE, ended=False)
    assert faults(history((1, 0, [1, 2], 3.0)), REFERENCE, ended=True)
    assert faults(history((1, 0, [1, 2], 3.0)), REFERENCE, ended=False) == []


def test_a_seed_is_a_schedule() -> None:
    assert schedule(4, 5) == schedule(4, 5) != schedule(5, 5)
    plan = schedule(1, 12)
    assert {e.kind for e in plan.events} == set(KINDS)
    assert len({s.name for s in plan.submissions}) == len(plan.submissions)
    assert {e.kind for e in schedule(1, 5, only=["drain"]).events} == {"drain"}
    assert {s.kind for s in plan.submissions[:5]} == set(SHARES)
    assert {s.manner for s in plan.submissions if s.kind == "script"} == set(MANNERS)
    with pytest.raises(ValueError, match="--only nonsense: expected one of selasticd-kill, "):
        schedule(1, 5, only=["nonsense"])
