"""Trials of changes: their end, their failure, and the shapes that remain for the job."""

import doctest
import json

import pytest

from slurm_elastic.controller.state.trials import shape_trials
from slurm_elastic.controller.state.trials.shape_trials import ShapeTrials, program_failure
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report

ONE = Allocation.of("a100", {"n1": 1})
FOUR = Allocation.of("a100", {"n1": 4})
CRASH = Reason("program-failed", exit_code=1)


def told(run, saved=None, *, phase="training", **fields):
    return Report(job_id=7, run=run, phase=phase, checkpoint_step=saved, **fields)


def trained(step=40):
    """Return the trials of a job that has trained on one GPU."""
    trials = ShapeTrials()
    trials.follow(0, ONE, now=0.0)
    trials.record(told(0, step // 2), now=60.0)
    trials.record(told(0, step), now=180.0)
    return trials


def changed(held=FOUR, *, run=1, transition=3):
    trials = trained()
    trials.begun(run, transition)
    trials.follow(run, held, now=200.0)
    return trials


def test_examples():
    assert doctest.testmod(shape_trials).failed == 0


HALF = Allocation.of("a100", {"n2": 1}, half=True)


def test_what_fails_on_half_of_a_gpu_says_nothing_about_a_whole_one():
    trials = changed(HALF, run=2)
    trials.shapes.worked, trials.shapes.last = [("a100", 4)], FOUR
    trials.fail(CRASH, now=210.0)
    assert not trials.shapes.excluded
    trials = ShapeTrials.from_body(json.loads(json.dumps(trials.to_body())))
    assert trials.shapes.half.reason == CRASH
    assert trials.outcome(3) == CRASH
    assert not trials.shapes.lapse(1e9), "the program failed: that does not pass"
    trials.withdraw_failure()
    assert trials.shapes.half is None
    trials.fail(CRASH, now=220.0)
    trials.clear()
    assert trials.shapes.half is None


def test_a_job_that_works_on_half_of_a_gpu_goes_back_to_whole_ones():
    trials = changed(HALF)
    trials.record(told(1, 41), now=220.0)
    assert (trials.shapes.last, trials.shapes.last_shape) == (HALF.whole, ("a100", 1))


def test_the_first_attempt_is_no_trial():
    trials = ShapeTrials()
    trials.follow(0, ONE, now=0.0)
    assert not trials.on


def test_a_change_is_done_when_a_newer_checkpoint_exists():
    trials = changed()
    assert trials.on
    assert trials.outcome(3) == "trial"
    for phase in ("starting", "training"):  # what it has loaded is not newer
        assert not trials.record(told(1, 40, phase=phase, resumed_from=40), now=210.0)
    assert trials.on
    assert trials.record(told(1, 41), now=220.0)
    assert not trials.on
    assert trials.outcome(3) == "worked"
    assert trials.shapes.last_shape == ("a100", 4)


def test_a_script_counts_what_it_has_completed_itself():
    """One was completed after the last report that arrived; the attempt's own count shows it."""
    trials = changed()
    trials.record(told(1, 41, phase="starting", kind="script"), now=201.0)
    assert trials.on
    assert trials.record(told(1, 42, kind="script"), now=210.0)


def test_a_program_that_failed_has_completed_nothing_whatever_it_counts():
    """Reports of the attempt before were lost: they do not count for this one."""
    trials = changed()
    report = told(1, 47, phase="ended", kind="script", exit_code=1, failed_start=1)
    assert not trials.record(report, now=210.0)
    assert trials.on


def test_a_script_whose_count_was_lost_begins_again():
    trials = changed()
    trials.record(told(1, None, phase="starting", kind="script"), now=201.0)
    assert trials.record(told(1, 1, kind="script"), now=210.0)


def test_a_failed_shape_is_barred_until_it_works():
    trials = changed()
    trials.fail(CRASH, now=205.0)
    trials.fail(CRASH, now=206.0)  # reported again
    assert (trials.shapes.excluded, trials.failures) == ({("a100", 4)}, 1)
    assert trials.outcome(3) == CRASH
    trials.follow(2, FOUR, now=210.0)  # for any cause of its start there
    trials.record(told(2, 41), now=260.0)
    assert (trials.shapes.barred, trials.failures) == ([], 0)
    assert trials.outcome(3) == CRASH, "that change had failed"


@pytest.mark.parametrize("held", [ONE, Allocation.of("a100", {"n2": 1})])
def test_the_last_shape_that_worked_is_never_barred(held):
    trials = changed(held)
    trials.fail(CRASH, now=205.0)
    assert (trials.shapes.barred, trials.failures) == ([], 1)


def test_after_a_failure_only_shapes_that_worked_are_left():
    directive = Directive.parse("1-8")
    trials = changed()
    assert trials.restricted(directive, ["a100", "v100"]) is directive
    trials.fail(CRASH, now=205.0)
    left = trials.restricted(directive, ["a100", "v100"])
    assert list(left.sizes("a100")) == [1]
    assert list(left.sizes("v100")) == []
    trials.follow(2, ONE, now=210.0)
    trials.record(told(2, 41), now=260.0)
    left = trials.restricted(directive, ["a100", "v100"])
    assert list(left.sizes("a100")) == [1, 2, 3, 5, 6, 7, 8]
    assert list(left.sizes("v100")) == [1, 2, 3, 5, 6, 7, 8], "the type is not the cause"
    assert str(left) == "1-8"


@pytest.mark.parametrize(
    ("reason", "v100"),
    [
        (CRASH, [1, 2, 3]),
        (Reason("program-ended"), [1, 2, 3]),
        (Reason("program-failed", exit_code=137), [1, 2, 3, 4]),  # perhaps a lack of memory
        (Reason("no-newer-checkpoint", waited_s=60.0), [1, 2, 3, 4]),
    ],
)
def test_a_number_of_gpus_that_fails_by_itself_is_not_tried_on_another_type(reason, v100):
    trials = changed()
    trials.fail(reason, now=205.0)
    trials.follow(2, ONE, now=210.0)
    trials.record(told(2, 41), now=260.0)
    left = trials.restricted(Directive.parse("1-4"), ["a100", "v100"])
    assert list(left.sizes("a100")) == [1, 2, 3]
    assert list(left.sizes("v100")) == v100
    assert trials.shapes.left_out == (("" if 4 not in v100 else "a100", 4, reason),)


def test_a_smaller_number_that_fails_may_lack_memory_on_that_type_only():
    trials = changed(ONE)
    trials.shapes.worked = [("a100", 4)]
    trials.shapes.last = FOUR
    trials.fail(CRASH, now=205.0)
    assert trials.shapes.left_out == (("a100", 1, CRASH),)


def test_a_number_that_has_worked_on_another_type_fails_because_of_the_type():
    trials = changed()
    trials.shapes.worked.append(("v100", 4))
    trials.fail(CRASH, now=205.0)
    assert trials.shapes.left_out == (("a100", 4, CRASH),)


def test_a_release_or_a_new_directive_allows_all_again():
    trials = changed()
    trials.fail(CRASH, now=205.0)
    trials.clear()
    directive = Directive.parse("1-8")
    assert trials.restricted(directive, ["a100"]) is directive


def test_no_progress_for_several_intervals_is_a_failure():
    trials = changed(Allocation.of("a100", {"n1": 1, "n2": 1}))
    least_s = 100.0
    limit_s = trials.limit_s(least_s)
    assert limit_s == 4 * 120
    assert not trials.overdue(200 + limit_s, least_s)
    assert trials.overdue(201 + limit_s, least_s)
    assert not trials.overdue(1e6, 0), "0: never"
    trials.record(told(1, None, step=7), now=600.0)
    assert not trials.overdue(600 + limit_s, least_s), "its steps rise"
    trials.record(told(1, None, step=7), now=700.0)
    assert trials.overdue(601 + limit_s, least_s)


def test_fewer_gpus_and_unknown_types_get_more_time():
    trials = ShapeTrials()
    trials.follow(0, FOUR, now=0.0)
    trials.record(told(0, 1), now=100.0)
    trials.follow(1, ONE, now=200.0)
    assert trials.limit_s(0.1) == 4 * 4 * 100
    trials.follow(2, Allocation.of("v100", {"n3": 4}), now=200.0)
    assert trials.limit_s(0.1) == 4 * 4 * 100
    assert ShapeTrials().limit_s(600.0) == 7200.0


def test_checkpoints_whose_reports_were_lost_do_not_lengthen_the_wait():
    trials = trained()
    limit_s = trials.limit_s(1.0)
    trials.record(told(0, 60, kind="script"), now=180.0 + 20 * 60)
    assert trials.limit_s(1.0) == limit_s


def test_a_suspended_job_and_a_clock_set_back_get_their_time_again():
    trials = changed()
    trials.pause(1e6)
    assert not trials.overdue(1e6 + 10, 100.0)
    assert not trials.overdue(500.0, 100.0)
    assert trials.overdue(500.0 + 481, 100.0)


def test_attempts_before_the_ledger_are_learned_from_the_first_report():
    trials = ShapeTrials()
    trials.follow(4, FOUR, now=0.0)
    assert not trials.on
    trials.record(told(4, 40), now=1.0)
    assert (trials.shapes.last, trials.newest) == (None, 40)
    trials.record(told(4, 41), now=2.0)
    assert trials.shapes.last == FOUR


@pytest.mark.parametrize(
    ("held", "code", "start", "reason"),
    [
        (FOUR, 1, 1, CRASH),
        (FOUR, 137, 1, Reason("program-failed", exit_code=137)),
        (FOUR, 0, 1, Reason("program-ended")),
        (ONE, 0, 1, None),
        (ONE, 1, 1, CRASH),
    ],
)
def test_how_a_program_fails(held, code, start, reason):
    trials = changed(held)
    report = told(1, phase="ended", exit_code=code, failed_start=start)
    assert program_failure(report, trials) == reason
    assert program_failure(told(1, phase="ended", exit_code=code), trials) is None, "it is over"


def test_a_rehearsal_that_ends_without_having_read_a_checkpoint_fails():
    trials = changed(ONE)
    report = told(1, phase="ended", exit_code=0, failed_start=1, rehearsal="failed")
    assert program_failure(report, trials) == Reason("program-ended")


def test_a_training_that_is_complete_ends_in_any_shape_that_has_worked():
    """Its GPUs were taken back when nothing was left to do."""
    trials = changed(FOUR, run=1)
    trials.record(told(1, 41), now=210.0)
    trials.begun(2, 4)
    trials.follow(2, ONE, now=220.0)
    report = told(2, phase="ended", exit_code=0, failed_start=1)
    assert trials.shapes.last_shape == ("a100", 4)
    assert program_failure(report, trials) is None


def test_a_job_whose_gpus_are_not_known_ends_with_its_program():
    trials = changed(None)
    report = told(1, phase="ended", exit_code=1, failed_start=1)
    assert program_failure(report, trials) is None


def test_a_job_that_never_had_a_checkpoint_ends_with_its_program():
    trials = ShapeTrials()
    trials.follow(0, ONE, now=0.0)
    trials.follow(1, ONE, now=60.0)  # its batch script has put it back into the queue
    report = Report(job_id=7, run=1, phase="ended", exit_code=3, failed_start=1)
    assert program_failure(report, trials) is None


def test_an_attempt_that_others_began_ends_with_its_program():
    trials = changed(ONE, run=1)
    trials.record(told(1, 41), now=210.0)
    trials.follow(2, ONE, now=300.0)  # after the loss of a node
    report = told(2, phase="ended", exit_code=1, failed_start=1)
    assert program_failure(report, trials) is None
    in_place = told(2, phase="ended", exit_code=1, failed_start=2)
    assert program_failure(in_place, trials) == CRASH


def test_a_job_that_ends_on_trial():
    trials = changed()
    trials.end()
    assert trials.outcome(3) == Reason("job-ended")
    assert not trials.on
    assert trials.failures == 0


def test_it_survives_the_ledger():
    trials = changed()
    trials.fail(CRASH, now=205.0)
    body = json.loads(json.dumps(trials.to_body()))
    assert ShapeTrials.from_body({**body, "of a later release": 1}) == trials
    assert ShapeTrials.from_body(None) == ShapeTrials()
    assert ShapeTrials.from_body({**body, "held": 7}) == ShapeTrials()


def regrouped(trials=None, held=FOUR, *, change=5, step=45):
    """Return the trials of a job that has grown in place after some steps."""
    trials = trials or trained()
    report = told(0, trials.newest, gpus=held.gpus, change=change, step=step)
    trials.regroup(report, held, now=200.0)
    return trials


def failed_in_place(trials, *, start=1, gpus=4, change=5):
    fields = {"failed_start": start, "failed_gpus": gpus, "exit_code": 139, "change": change}
    report = told(0, trials.newest, phase="ended", **fields)
    return trials.fail_in_place(report, ONE, program_failure(report, trials), now=210.0)


def test_a_growth_in_place_is_on_trial_until_a_checkpoint_after_it():
    trials = regrouped()
    assert trials.on
    assert trials.outcome(5) == "trial"
    assert not trials.record(told(0, 45), now=205.0), "that was begun before"
    assert trials.record(told(0, 46), now=206.0)
    assert trials.outcome(5) == "worked"
    assert trials.shapes.last_shape == ("a100", 4)


def test_a_failure_after_a_growth_in_place_bars_the_shape_and_the_attempt_goes_on():
    trials = regrouped()
    assert failed_in_place(trials)
    assert not failed_in_place(trials), "it is reported more than once"
    assert trials.failure is None, "no way back is due"
    assert (trials.on, trials.held, trials.restarts, trials.failures) == (True, ONE, 1, 1)
    assert trials.shapes.excluded == {("a100", 4)}
    assert trials.outcome(5).code == "program-failed"
    copy = ShapeTrials.from_body(json.loads(json.dumps(trials.to_body())))
    assert copy == trials


def test_a_second_failure_before_a_checkpoint_takes_the_ordinary_way_back():
    trials = regrouped()
    failed_in_place(trials)
    report = told(0, 40, phase="ended", exit_code=1, failed_start=2)
    trials.fail(program_failure(report, trials), now=220.0)
    assert trials.failure is not None
    assert trials.failures == 2
    assert trials.shapes.excluded == {("a100", 4)}, "one GPU had worked"


def test_where_the_size_is_not_to_blame_nothing_is_barred():
    trials = regrouped()
    assert failed_in_place(trials, gpus=1)
    assert trials.restarts == 1
    assert not trials.shapes.barred


def test_a_lost_node_withdraws_a_failure_in_place():
    trials = regrouped()
    failed_in_place(trials)
    trials.withdraw_failure()
    assert (trials.shapes.barred, trials.failures, trials.left) == ([], 0, None)


def test_the_next_checkpoint_forgets_a_failure_in_place():
    trials = regrouped()
    failed_in_place(trials)
    assert not trials.record(told(0, 40, resumed_from=40), now=220.0)
    assert trials.record(told(0, 41), now=230.0)
    assert (trials.failures, trials.left) == (0, None)
    assert trials.shapes.excluded == {("a100", 4)}


def test_a_lost_companion_is_no_trial_of_its_own():
    trials = regrouped()
    trials.record(told(0, 46), now=206.0)
    trials.regroup(told(0, 46, gpus=1, change=5, step=50), ONE, now=210.0)
    assert trials.held == ONE
    assert not trials.on


def test_members_that_do_not_train_yet_change_nothing():
    trials = trained()
    trials.regroup(told(0, 40, gpus=1), FOUR, now=200.0)
    assert trials.held == ONE
    assert not trials.on


def test_a_companion_lost_on_trial_fails_its_change_once():
    trials = regrouped()
    trials.regroup(told(0, 40, gpus=1, change=5, step=47), ONE, now=205.0)
    trials.record(told(0, 48), now=206.0)
    assert trials.judge_loss(CRASH)
    assert trials.outcome(5) == CRASH
    assert not trials.judge_loss(CRASH)
    assert not trials.shapes.barred, "the others have trained on"


def test_a_companion_that_others_have_ended_fails_nothing():
    trials = regrouped()
    trials.regroup(told(0, 40, gpus=1, change=5, step=47), ONE, now=205.0)
    assert not trials.judge_loss(None)
    assert not trials.judge_loss(CRASH)
