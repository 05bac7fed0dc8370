"""What one controller's ledger takes from another's, and what it does not believe."""

import pytest

from slurm_elastic.config.schema import ControllerSettings
from slurm_elastic.controller.leader import standby_sync
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from tests.support.controller.job_records import SEGMENT, Log

RECORD = {"held": True, "override": "1-2", "pin": ["n1"], "pins": [["n1"]], "leased": True}


@pytest.fixture
def active():
    ledger = Ledger(":memory:")
    ledger.add_transition(7, "7@1", {"reason": "grow"})
    ledger.put_job("7@1", 7, RECORD)
    ledger.put("policy_state", {"a": 1})
    ledger.put("sleeping_nodes", {"nodes": {"g01": [1.0, None]}, "cycles": {}})
    ledger.put_application("alice", "gpt", "", {"fit": 1})
    ledger.begin_segment(SEGMENT)
    return ledger


def copy(active, other, since=None):
    answer = standby_sync.new_rows(active, since or {})
    standby_sync.apply(other, answer)
    return answer["since"]


def test_orders_history_and_segments_are_copied_and_then_only_news(active):
    other = Ledger(":memory:")
    since = copy(active, other)
    assert other.get_job("7@1") == RECORD
    assert other.get("policy_state") == {"a": 1}
    assert other.get("sleeping_nodes")["nodes"] == {"g01": [1.0, None]}
    assert list(other.open_segments()) == ["7@1"]
    assert other.applications("alice", "gpt") == {"": {"fit": 1}}
    assert other.since() == pytest.approx(active.since())
    assert not any(standby_sync.new_rows(active, since)["rows"].values())
    active.put_job("8@1", 8, {"held": False})
    active.end_segment("7@1", 4e9)
    rows = standby_sync.new_rows(active, since)["rows"]
    assert [r["key"] for r in rows["jobs"]] == ["8@1"]
    copy(active, other, since)
    assert other.open_segments() == {}
    assert len(other.segments()) == 1


def test_what_does_not_fit_into_an_answer_comes_with_the_next(active, monkeypatch):
    monkeypatch.setattr(standby_sync, "_MOST", 200)
    for number in range(20):
        active.put_job(f"{number}@2", number, {"note": "x" * 50})
    other, since, answers = Ledger(":memory:"), {}, 0
    more = True
    while more:
        answer = standby_sync.new_rows(active, since)
        standby_sync.apply(other, answer)
        since, more, answers = answer["since"], answer["more"], answers + 1
    assert answers > 3
    assert other.get_job("19@2")


def test_a_successor_does_not_believe_how_things_stood_in_slurm(active):
    other = Ledger(":memory:")
    copy(active, other)
    standby_sync.take_over(other, 2, Log())
    assert other.live_transitions() == []
    (history,) = other.transitions(7)
    assert history["state"] == "ENDED"
    assert history["problem"]["code"] == "controller-lost"
    record = other.get_job("7@1")
    assert (record["held"], record["override"]) == (True, "1-2")
    assert (record["pin"], record["leased"]) == (None, False)
    assert other.add_transition(9, "9@1", {}) == 200_001


def test_who_was_active_just_before_believes_all_of_it(active):
    standby_sync.take_over(active, 1, Log())
    standby_sync.take_over(active, 2, Log())
    assert len(active.live_transitions()) == 1
    assert active.get_job("7@1") == RECORD
    standby_sync.take_over(active, 4, Log())
    assert active.live_transitions() == []


def test_another_version_is_refused(active):
    answer = {**standby_sync.new_rows(active, {}), "version": 99}
    with pytest.raises(LedgerError, match="same release"):
        standby_sync.apply(Ledger(":memory:"), answer)


@pytest.mark.parametrize("rows", [{"jobs": [{"key": "x"}]}, {"jobs": [{"key": []}]}])
def test_rows_that_make_no_sense_change_nothing(active, rows):
    other = Ledger(":memory:")
    copy(active, other)
    with pytest.raises(LedgerError):
        standby_sync.apply(other, {**standby_sync.new_rows(active, {}), "rows": rows})
    assert other.get_job("7@1") == RECORD
    other.put_job("8@1", 8, {})  # no transaction is left open


def test_the_copy_forgets_like_its_original(active):
    other = Ledger(":memory:")
    copy(active, other)
    other.end_segment("7@1", 200.0)
    copying = standby_sync.StandbySync(other, Log())
    copying.forget(ControllerSettings(keep_days=1.0))
    assert other.segments() == []
