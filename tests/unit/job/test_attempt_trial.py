"""What esrun does when a program fails before the first checkpoint of an attempt."""

import threading

import pytest

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job import attempt_trial
from slurm_elastic.job.attempt_trial import AttemptTrial
from slurm_elastic.job.report_state import ReportState


class Attempt:
    """A run of job 7 with a clock of its own; `answers` maps a time to the controller's orders."""

    def __init__(self, directory, *, run=1, kind="script", has_controller=True):
        self.now = 0.0
        self.state = ReportState(
            Report(job_id=7, run=run, phase="starting", kind=kind), clock=lambda: self.now
        )
        self.trial = AttemptTrial(
            self.state,
            run_id="slurm-7",
            run=run,
            has_controller=has_controller,
            directories=[str(directory)],
            clock=lambda: self.now,
        )
        self.answers = {}
        self.trial._stopped = self
        self.stopped = threading.Event()

    def is_set(self):
        return self.stopped.is_set()

    def set(self):
        self.stopped.set()

    def wait(self, seconds):
        """Stand in for the event: time passes, and the controller answers."""
        self.now += seconds
        for at in [t for t in self.answers if t <= self.now]:
            self.state.receive(self.answers.pop(at), authoritative=True)
        assert self.now < 1e5, "it waits for ever"
        return self.stopped.is_set()

    def ends(self, code, **how):
        unmodified = self.state.report().kind == "script"
        return self.trial.goes_on(code, unmodified=unmodified, **how)

    def says(self, at, **fields):
        self.answers[at] = Orders(seq=int(10 * at), **fields)


@pytest.fixture
def trained(tmp_path):
    """Return a directory in which a first run has completed a checkpoint."""
    first = Attempt(tmp_path, run=0)
    first.trial.begin()
    first.state.update({"checkpoint_step": 1})
    return tmp_path


def begun(directory, **how):
    attempt = Attempt(directory, **how)
    attempt.trial.begin()
    return attempt


def test_it_waits_as_long_as_the_controller_answers(trained, capsys):
    attempt = begun(trained)
    attempt.says(1.0, failed_start=1, on_failure="wait")
    for at in range(10, 600, 10):
        attempt.says(float(at), failed_start=1, on_failure="wait")
    attempt.says(600.0, failed_start=1, on_failure="end")
    assert not attempt.ends(1)
    assert 600 <= attempt.now < 601
    report = attempt.state.report()
    assert (report.phase, report.exit_code, report.failed_start) == ("ended", 1, 1)
    first, last = capsys.readouterr().err.splitlines()
    assert first.endswith("returns the job to its last working size if a change may be the cause")
    assert last.endswith("the controller does nothing: no resize caused this end")


def test_the_requeue_ends_the_wait(trained):
    attempt = begun(trained)
    attempt.says(1.0, failed_start=1, on_failure="wait")
    attempt.stopped.set()
    attempt.trial.stop()
    assert not attempt.ends(1)
    assert attempt.now <= attempt_trial._GRACE_S
    assert attempt.state.report().failed_start is None


def test_without_an_answer_the_program_is_started_again_after_longer_and_longer_pauses(trained):
    attempt, pauses = begun(trained), []
    for _ in range(7):
        before = attempt.now
        assert attempt.ends(1)
        pauses.append(round(attempt.now - before))
        attempt.trial.begin()
    assert pauses == [123, 243, 483, 963, 1803, 1803, 1803]
    assert attempt.state.report().phase == "starting"
    assert attempt.state.report().failed_start is None


def test_answers_to_an_earlier_start_do_not_count(trained):
    attempt = begun(trained)
    assert attempt.ends(1)
    attempt.trial.begin()
    attempt.says(attempt.now + 1, failed_start=1, on_failure="end")
    assert attempt.ends(1)


def test_after_a_checkpoint_of_its_own_it_ends_with_the_program(trained):
    attempt = begun(trained)
    attempt.state.update({"checkpoint_step": 2})
    assert not attempt.ends(1)
    assert attempt.now == 0


def test_what_the_library_has_restored_is_not_of_its_own(trained):
    attempt = begun(trained, kind="library")
    attempt.state.update({"checkpoint_step": 40, "resumed_from": 40})
    assert attempt.trial.on
    attempt.state.update({"checkpoint_step": 41})
    assert not attempt.trial.on


@pytest.mark.parametrize("how", [{"run": 0}, {"has_controller": False}])
def test_a_first_run_and_a_job_without_a_controller_end_with_the_program(trained, how):
    attempt = begun(trained, **how)
    assert not attempt.ends(1)
    assert attempt.now == 0


def test_a_job_that_never_had_a_checkpoint_asks_and_ends(tmp_path):
    attempt = begun(tmp_path)
    assert not attempt.ends(1)
    assert 33 <= attempt.now < 34


def test_where_the_file_is_lost_the_controller_decides(tmp_path):
    attempt = begun(tmp_path)
    attempt.says(10.0, failed_start=1, on_failure="wait")
    attempt.says(100.0, failed_start=1, on_failure="end")
    assert not attempt.ends(1)
    assert 100 <= attempt.now < 101


def test_a_start_in_place_after_a_checkpoint_is_on_trial(tmp_path):
    attempt = begun(tmp_path, run=0)
    attempt.state.update({"checkpoint_step": 3})
    attempt.state.begin_attempt()
    attempt.trial.begin()
    attempt.says(1.0, failed_start=2, on_failure="wait")
    attempt.says(5.0, failed_start=2, on_failure="end")
    assert not attempt.ends(1)
    assert attempt.state.report().failed_start == 2


def test_a_plain_program_that_ends_well_is_not_waited_for(tmp_path):
    attempt = begun(tmp_path)
    assert not attempt.trial.goes_on(0, unmodified=False)
    assert attempt.now == 0


def test_a_script_that_ends_well_without_a_checkpoint_is_asked_about(trained):
    attempt = begun(trained)
    attempt.says(2.0, failed_start=1, on_failure="end")
    assert not attempt.ends(0)
    assert attempt.now >= 2
    silent = begun(trained)
    assert not silent.ends(0), "it is not started again"
    assert 903 <= silent.now < 904


def test_the_library_says_itself_that_training_is_complete(trained):
    attempt = begun(trained, kind="library")
    assert not attempt.ends(0)
    assert attempt.now == 0


def test_a_controller_that_does_nothing_is_not_waited_for_for_ever(trained):
    attempt = begun(trained)
    for at in range(1, 4000, 10):
        attempt.says(float(at), failed_start=1, on_failure="wait")
    assert attempt.ends(1)
    assert attempt.now == pytest.approx(attempt_trial._PATIENCE_S + 3, abs=1)


def test_a_controller_that_does_not_know_the_question_is_as_good_as_none(trained):
    attempt = begun(trained)
    for at in range(1, 200, 10):
        attempt.says(float(at))
    assert attempt.ends(1)
    assert attempt.now == pytest.approx(123, abs=1)


def test_a_directory_that_cannot_be_written_costs_nothing(tmp_path):
    (tmp_path / "file").touch()
    attempt = begun(tmp_path / "file" / "below", run=0)
    attempt.state.update({"checkpoint_step": 1})


def regrouped(directory, *, step=50, gpus=4, **how):
    """Return a first attempt of a training whose members have changed."""
    attempt = begun(directory, run=0, kind="library", **how)
    attempt.trial.change_members(gpus, step=step)
    return attempt


def test_after_a_change_of_members_the_controller_hears_which_size_failed(tmp_path, capsys):
    attempt = regrouped(tmp_path)
    attempt.says(8.0, failed_start=1, on_failure="restart")
    assert attempt.trial.goes_on(139, unmodified=False)
    assert attempt.now == pytest.approx(8.0, abs=0.3)
    assert "exit code 139 on 4 GPUs" in capsys.readouterr().err
    assert attempt.state.report().failed_gpus is None, "the next start has not failed"


def test_without_a_controller_it_is_started_again_soon_after_a_change_of_members(tmp_path):
    attempt = regrouped(tmp_path)
    assert attempt.ends(1)
    assert attempt.now == pytest.approx(3 + attempt_trial._ASK_S, abs=1)
    attempt.trial.begin()
    assert not attempt.ends(1), "on its own GPUs, without a checkpoint, its end is the job's"


def test_the_report_of_a_failure_names_the_size(tmp_path):
    attempt = regrouped(tmp_path)
    attempt.state.update({"checkpoint_step": 50})
    attempt.says(4.0, failed_start=1, on_failure="wait")
    attempt.says(100.0, failed_start=1, on_failure="end")
    assert not attempt.ends(1)
    report = attempt.state.report()
    assert (report.phase, report.failed_start, report.failed_gpus) == ("ended", 1, 4)


def test_a_checkpoint_after_the_change_of_members_ends_their_trial(tmp_path):
    attempt = regrouped(tmp_path)
    attempt.state.update({"checkpoint_step": 51})
    assert not attempt.ends(1)
    assert attempt.now == 0


def test_members_that_are_about_to_join_count_from_the_newest_step(tmp_path):
    attempt = begun(tmp_path, run=0, kind="library")
    attempt.state.update({"checkpoint_step": 40, "step": 47})
    attempt.trial.change_members(2)
    assert attempt.trial.failed_gpus == 2
    attempt.state.update({"checkpoint_step": 47})
    assert attempt.trial.failed_gpus == 2
    attempt.state.update({"checkpoint_step": 48})
    assert attempt.trial.failed_gpus is None


def test_a_first_start_that_lacks_memory_is_reported_and_may_be_repeated(tmp_path, capsys):
    attempt = begun(tmp_path, run=0, kind="library")
    attempt.state.update({"weight_bytes": 4096, "supported_options": "tensor"})
    attempt.says(4.0, failed_start=1, on_failure="restart")
    assert attempt.ends(1, out_of_memory=True)
    assert attempt.now < 5
    asks, repeats = capsys.readouterr().err.splitlines()
    assert asks.endswith("ran out of memory: asking the controller for another plan")
    assert repeats.endswith("the program is started again")
    report = attempt.state.report()  # of the next start, which has not reported yet
    assert (report.out_of_memory, report.phase) == (False, "starting")
    assert (report.weight_bytes, report.supported_options) == (4096, "tensor")
    attempt.trial.begin()
    attempt.says(9.0, failed_start=2, on_failure="end")
    assert not attempt.ends(1, out_of_memory=True)
    assert attempt.state.report().out_of_memory


@pytest.mark.parametrize(("weight_bytes", "code"), [(None, 1), (4096, 0)])
def test_a_program_without_the_library_or_that_ends_well_lacks_no_memory(
    tmp_path, weight_bytes, code
):
    attempt = begun(tmp_path, run=0, kind="library")
    attempt.state.update({"weight_bytes": weight_bytes})
    assert not attempt.ends(code, out_of_memory=True)
    assert attempt.now == 0.0
    assert not attempt.state.report().out_of_memory


def test_the_program_cannot_say_itself_that_memory_lacked(tmp_path):
    attempt = begun(tmp_path, run=0, kind="library")
    attempt.state.update({"out_of_memory": True})
    assert not attempt.state.report().out_of_memory
