"""Properties of attempt progress: progress and requeues by others never count against a job."""

import doctest
import json

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.controller.state import attempt_progress
from slurm_elastic.controller.state.attempt_progress import (
    AttemptProgress,
    Verdict,
    begin,
    close,
    record_report,
)
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report

STEPS = st.none() | st.integers(0, 50)
CODES = st.none() | st.integers(0, 255)
#: Of one attempt: step resumed from, checkpoints, exit code reported, Slurm's, excused, s.
ATTEMPTS = st.tuples(
    STEPS, st.lists(st.integers(0, 50), max_size=3), CODES, st.integers(0, 255), st.booleans(),
    st.floats(0, 1000),
)  # fmt: skip


def test_examples():
    assert doctest.testmod(attempt_progress).failed == 0


def play(watch, resumed, saved, ended, code, excused, lasts):
    """Play one attempt from its start to the queue."""
    start = 1000.0 * watch.run
    watch.since = start
    said = {"job_id": 7, "run": watch.run, "resumed_from": resumed}
    for step in saved:
        record_report(watch, Report(phase="training", step=step, checkpoint_step=step, **said))
    if resumed is not None and not saved:
        record_report(watch, Report(phase="training", step=resumed, **said))
    if ended is not None:
        last = max(saved, default=None)
        record_report(watch, Report(phase="ended", exit_code=ended, checkpoint_step=last, **said))
    watch.code, watch.excused = code, excused
    return close(watch, at=start + lasts)


@given(st.lists(ATTEMPTS, max_size=8))
def test_attempts_that_count(attempts):
    watch, newest, in_a_row = AttemptProgress(run=0), 0, 0
    for attempt in attempts:
        resumed, saved, ended, code, excused, _ = attempt
        verdict = play(watch, *attempt)
        reached = max([*saved, *([] if resumed is None else [resumed])], default=None)
        if reached is not None and reached > newest:
            assert verdict is Verdict.PROGRESS
            in_a_row = 0
        elif excused or (not code and ended is None):
            assert verdict is Verdict.EXCUSED
        in_a_row += verdict is Verdict.VAIN
        newest = newest if reached is None else reached
        assert watch.vain == in_a_row
        assert watch.run == attempts.index(attempt) + 1 or attempts.count(attempt) > 1


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 255))
def test_a_job_that_gets_further_each_time_is_never_counted(strides, code):
    watch, step = AttemptProgress(run=0), 0
    for stride in strides:
        step += stride
        assert play(watch, step - stride, [step], code, code, False, 1.0) is Verdict.PROGRESS
        assert watch.vain == 0


@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 255))
def test_a_job_that_ends_at_the_same_step_is_counted_each_time(times, step, code):
    watch = AttemptProgress(run=0)
    play(watch, None, [step], code, code, False, 1.0)
    for number in range(times):
        assert play(watch, step, [], code, code, False, 1.0) is Verdict.VAIN
        assert watch.vain == number + 1


@given(st.integers(1, 255), st.floats(0, 5000), st.booleans())
def test_a_program_that_tells_no_step_counts_only_if_it_failed_soon(code, lasts, fails):
    verdict = play(AttemptProgress(run=0), None, [], code if fails else 0, 0, False, lasts)
    assert (verdict is Verdict.VAIN) == (fails and lasts < attempt_progress.SHORT_S)


@given(ATTEMPTS)
def test_attempts_that_were_not_seen_say_nothing(attempt):
    watch = AttemptProgress(run=0)
    play(watch, *attempt)
    before = watch.vain
    begin(watch, 9)
    assert (watch.run, watch.vain) == (9, before)
    record_report(watch, Report(job_id=7, run=8, phase="ended", exit_code=1))
    assert watch.ended is None


@given(st.lists(ATTEMPTS, max_size=6))
def test_reports_before_an_attempt_is_followed_count(attempts):
    one, other = AttemptProgress(run=5), AttemptProgress(run=5)
    for resumed, saved, ended, code, excused, _ in attempts:
        said = {"job_id": 7, "run": one.run, "resumed_from": resumed}
        last = max(saved, default=None)
        phase = "training" if ended is None else "ended"
        told = Report(phase=phase, exit_code=ended, step=0, checkpoint_step=last, **said)
        record_report(one, told)
        other.run -= 1
        record_report(other, told)
        begin(other, other.run + 1)
        for watch in (one, other):
            watch.code, watch.excused = code, excused
        assert close(one) is close(other)
        assert (one.run, one.vain, one.mark) == (other.run, other.vain, other.mark)


def test_it_survives_the_ledger():
    why = Reason("no-progress", attempts=2)
    watch = AttemptProgress(run=3, mark=7, vain=1, nodes=["n1"], why=why)
    body = json.loads(json.dumps(watch.to_body()))
    assert AttemptProgress.from_body({**body, "of a later version": 1}) == watch
    old = AttemptProgress.from_body({**body, "why": "no progress in 2 attempts in a row"})
    assert old.why == Reason("text", text="no progress in 2 attempts in a row")
    assert AttemptProgress.from_body(None) == AttemptProgress()
