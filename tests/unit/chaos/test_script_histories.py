"""Rules for unmodified scripts of the fault campaign: each can be broken."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.script_histories import (
    MANNERS,
    SaverHistory,
    lost_steps,
    requeued_after_notice,
    saver_faults,
    without_hindered,
)

SAVER = Path(__file__).parents[2] / "chaos" / "drivers" / "saver.py"
LAST = 40
NOTICE = "esrun: notice 7: idle-gpus; waiting for the next checkpoint"
ANSWER = "esrun: notice 7: ckpt.json is complete"
WITHDRAWN = "esrun: notice 7 is withdrawn: nothing-planned"
GOES_ON = "esrun: notice 7: no requeue within 120 s: the ranks go on"
REFUTED = "esrun: …: it does not resume, and will not be resized; …"
PROVEN = "esrun: resumed: the script has read its newest checkpoint and written a newer one"

Row = dict[str, Any]


def attempt(
    identity: str, start: int, until: int, *, torn: Iterable[int] = (), cut: bool = False
) -> list[Row]:
    """Rows of one start: steps up to `until`, and a save after each tenth; `cut`: not the last."""
    rows: list[Row] = [{"start": start, "torn": [*torn], "world": 1}]
    for step in range(start + 1, until + 1):
        rows.append({"step": step})
        if step % 10 == 0:
            rows += [{"save": step}, {"saved": step}]
    if cut:
        rows.pop()
    if until == LAST and not cut:
        rows.append({"finished": LAST})
    return [{"attempt": identity, "at": 100.0, **row} for row in rows]


def history(*parts: list[Row] | str) -> SaverHistory:
    lines: list[str] = []
    for part in parts:
        lines += [part] if isinstance(part, str) else [json.dumps(row) for row in part]
    return SaverHistory.read(lines)


def broken(*parts: list[Row] | str, manner: str = "rename", ended: bool = True) -> list[str]:
    """Rules that a log breaks."""
    found = saver_faults(history(*parts), manner, last=LAST, ended=ended)
    return [rule for rule, _ in found]


@pytest.mark.parametrize("manner", ["rename", "place", "folder"])
def test_a_change_and_a_fault_between_saves_break_nothing(manner: str) -> None:
    log = (attempt("a", 0, 14), NOTICE, ANSWER, attempt("b", 10, 27), PROVEN, attempt("c", 20, 40))
    assert broken(*log, manner=manner) == []
    assert lost_steps(history(*log)) == ([4], [7])


@pytest.mark.parametrize("manner", ["rename", "place", "folder"])
def test_a_restart_from_an_older_checkpoint_or_from_none(manner: str) -> None:
    for start in (10, 0):
        log = (attempt("a", 0, 25), attempt("b", start, 40))
        assert broken(*log, manner=manner) == ["resume"]


def test_what_esrun_has_put_back_may_be_older() -> None:
    kept = "esrun: rehearsal: ckpt.json is kept in /x (0.1 MB, linked); the job is requeued once"
    back = "esrun: rehearsal: /x/ckpt.json is put back as it was before the restart"
    head = (attempt("a", 0, 14), NOTICE, kept, ANSWER, attempt("b", 10, 24))
    assert broken(*head, back, attempt("c", 10, 40), manner="place") == []
    assert broken(*head, back, attempt("c", 0, 40), manner="place") == ["resume"]
    assert broken(*head, attempt("c", 10, 40), manner="place") == ["resume"]


def test_a_save_that_was_complete_when_its_row_was_not_written_any_more() -> None:
    for manner in ("rename", "place", "folder"):
        log = (attempt("a", 0, 20, cut=True), attempt("b", 20, 40))
        assert broken(*log, manner=manner) == []


def test_a_script_that_ends_too_early() -> None:
    assert broken(attempt("a", 0, 30)) == ["resume"]
    assert broken(attempt("a", 0, 30), ended=False) == []


def test_a_fault_may_tear_what_is_not_renamed_into_place() -> None:
    cut = attempt("a", 0, 20, cut=True)
    assert broken(cut, attempt("b", 10, 40)) == []
    assert broken(cut, attempt("b", 0, 40, torn=[-1]), manner="place") == []
    assert broken(cut, attempt("b", 10, 40, torn=[20]), manner="folder") == []
    # Found again by each start until the same is written anew.
    again = (cut, attempt("b", 10, 15, torn=[20]), attempt("c", 10, 40, torn=[20]))
    assert broken(*again, manner="folder") == []
    healed = (cut, attempt("b", 10, 25, torn=[20]), attempt("c", 10, 40, torn=[20]))
    assert broken(*healed, manner="folder") == ["torn"]


@pytest.mark.parametrize(
    ("manner", "start", "torn"), [("place", 0, -1), ("folder", 10, 20), ("rename", 0, -1)]
)
def test_a_change_tears_nothing(manner: str, start: int, torn: int) -> None:
    cut = attempt("a", 0, 20, cut=True)
    log = (cut, NOTICE, ANSWER, attempt("b", start, 40, torn=[torn]))
    assert broken(*log, manner=manner) == ["torn"]


def test_what_was_never_begun_is_not_torn_by_a_fault() -> None:
    log = (attempt("a", 0, 25), attempt("b", 0, 40, torn=[-1]))
    for manner in ("rename", "place"):
        assert broken(*log, manner=manner) == ["torn"]
    assert broken(attempt("a", 0, 25), attempt("b", 10, 40, torn=[20]), manner="folder") == ["torn"]


def later(*steps: int, at: float = 200.0) -> list[Row]:
    return [{"attempt": "a", "at": at, "step": step} for step in steps]


def test_a_script_that_computes_on_after_its_answer() -> None:
    head, tail = (attempt("a", 0, 12), NOTICE, ANSWER), attempt("b", 10, 40)
    assert broken(*head, later(13, 14, 15), tail) == ["frozen"]
    assert broken(*head, later(13), tail) == [], "Slurm continues it before it ends it"
    for line in (WITHDRAWN, GOES_ON):
        assert broken(*head, line, later(13, 14, 15), tail) == []


def test_a_script_that_is_killed_between_the_first_byte_of_a_save_and_its_row() -> None:
    cut = attempt("a", 0, 20)[:-2]
    torn = attempt("b", 10, 40, torn=[20])
    assert broken(cut, torn, manner="folder") == []
    assert broken(cut[:-1], NOTICE, ANSWER, ENDING, cut[-1:], torn, manner="folder") == []
    assert broken(cut, attempt("b", 0, 40, torn=[-1]), manner="place") == []
    assert broken(cut, attempt("b", 0, 40, torn=[-1]), manner="rename") == ["torn"]
    before = attempt("a", 0, 19)
    assert broken(before, torn, manner="folder") == ["torn"]
    assert [a.cut_at_end for a in history(cut, ANSWER, torn).attempts] == [1, 0]


ENDING = (
    "slurmstepd-g01: error: *** JOB 9 ON g01 CANCELLED AT 2026-11-23T07:32 DUE TO JOB REQUEUE ***"
)


def test_ranks_that_slurm_continues_before_it_ends_them() -> None:
    cut = attempt("a", 0, 20, cut=True)
    head, at_end = (cut[:-4], NOTICE, ANSWER, ENDING), cut[-4:]
    torn = attempt("b", 0, 40, torn=[-1])
    assert broken(*head, at_end, torn, manner="place") == []
    assert [a.cut_at_end for a in history(*head, at_end, torn).attempts] == [1, 0]
    assert broken(*head, at_end, attempt("b", 0, 40), manner="folder") == ["resume"]
    # The same line does not excuse a save that had begun before the answer.
    assert broken(cut, NOTICE, ANSWER, ENDING, torn, manner="place") == ["torn"]
    assert [a.cut_at_end for a in history(cut, NOTICE, ANSWER, ENDING, torn).attempts] == [0, 0]


def test_a_fault_that_keeps_ranks_from_being_stopped() -> None:
    cut = attempt("a", 0, 20, cut=True)
    log = history(
        cut[:-2], NOTICE, ANSWER, later(*[20] * 3), cut[-1:], attempt("b", 0, 40, torn=[-1])
    )
    there = without_hindered(log, lambda at: at == 200.0)
    assert saver_faults(there, "place", last=LAST, ended=True) == []
    elsewhere = without_hindered(log, lambda at: at == 300.0)
    rules = [rule for rule, _ in saver_faults(elsewhere, "place", last=LAST, ended=True)]
    assert rules == ["frozen", "torn"]
    assert lost_steps(there).by_faults
    assert lost_steps(elsewhere).by_changes


def test_a_script_that_starts_anew() -> None:
    log = [attempt("a", 0, 24), NOTICE, ANSWER, attempt("b", 0, 14), REFUTED, attempt("c", 0, 40)]
    assert broken(*log, manner="anew") == []
    assert broken(*log, NOTICE, manner="anew") == ["asked"]
    assert broken(*log, PROVEN, manner="anew") == ["judged"]
    assert broken(*log[:-1], attempt("c", 10, 40), manner="anew") == ["anew"]
    assert broken(*log[:-1], manner="anew") == ["anew"]
    assert broken(*log[:-1], manner="anew", ended=False) == []


def test_a_script_that_resumes_is_not_taken_for_one_that_does_not() -> None:
    assert broken(attempt("a", 0, 25), attempt("b", 20, 30), REFUTED, attempt("c", 30, 40)) == [
        "judged"
    ]


def test_two_starts_at_the_same_time_and_a_row_that_is_cut_off() -> None:
    two = history(attempt("a", 0, 12), attempt("b", 10, 14), later(13))
    assert two.interleaved
    one = history(attempt("a", 0, 12), '{"attempt": "a", "at": 1', attempt("b", 10, 40))
    assert not one.interleaved
    assert saver_faults(one, "place", last=LAST, ended=True) == []


def test_requeues_after_a_notice() -> None:
    log = """\
info: JobId=3 Transition=1 State=NOTIFY Action=grow
info: JobId=4 Transition=2 State=REQUEUE Action=shrink
info: JobId=3 Transition=1 State=REQUEUE Action=grow
info: JobId=5 Transition=3 State=NOTIFY Action=grow
warning: JobId=5 Transition=3 State=UNDONE Action=grow
info: JobId=5 Transition=4 State=NOTIFY Action=grow
info: selasticd 0.1.0 Mode=act
info: JobId=5 Transition=4 State=REQUEUE Action=grow
"""
    assert requeued_after_notice(log) == {"3": {1}}
    assert history(attempt("a", 0, 12), NOTICE, ANSWER).answers == {7}


def run(manner: str, home: Path, steps: int) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(SAVER), manner, str(home), str(steps), "0.05"]
    ranks = {"RANK": "0", "WORLD_SIZE": "1"}
    return subprocess.Popen(words, env={**os.environ, **ranks})


def read(home: Path) -> SaverHistory:
    log = home / "log"
    return SaverHistory.read(log.read_text().splitlines() if log.exists() else [])


@pytest.mark.parametrize("manner", MANNERS)
def test_the_script_resumes_in_its_manner(manner: str, tmp_path: Path) -> None:
    first = run(manner, tmp_path, LAST)
    while not (starts := read(tmp_path).attempts) or 20 not in starts[0].saves:
        assert first.poll() is None
        time.sleep(0.01)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert run(manner, tmp_path, LAST).wait() == 0
    mine = read(tmp_path)
    assert saver_faults(mine, manner, last=LAST, ended=(tmp_path / "done").exists()) == []
    begun = {"rename": {10, 20}, "folder": {10, 20}, "place": {0, 20}, "anew": {0}}
    assert mine.attempts[1].resumed_from in begun[manner]


def test_the_script_saves_at_a_signal(tmp_path: Path) -> None:
    script = run("rename", tmp_path, 10_000)
    while not (starts := read(tmp_path).attempts) or not starts[0].steps:
        time.sleep(0.01)
    script.send_signal(signal.SIGUSR2)
    while not any(step % 10 and done for step, done in read(tmp_path).attempts[0].saves.items()):
        assert script.poll() is None
        time.sleep(0.01)
    script.kill()
    script.wait()
