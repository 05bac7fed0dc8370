"""Unmodified scripts: reports, notices, rehearsals and resumes at complete checkpoints."""

import os
from pathlib import Path

import pytest

from slurm_elastic.core.report import Orders, Report
from slurm_elastic.job.report_state import ReportState
from slurm_elastic.job.unmodified.checkpoint_scanner import SETTLE_S
from slurm_elastic.job.unmodified.resume_state import ResumeState, ResumeStateFile
from slurm_elastic.job.unmodified.script_watch import ScriptWatch


class Guard:
    """Guard that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def guard(self) -> None:
        self.calls.append("guard")

    def arm(self) -> None:
        self.calls.append("arm")

    def unguard(self) -> None:
        self.calls.append("unguard")


class Job:
    """One run of a job whose script is the test; a later run shares the files."""

    def __init__(self, home: Path, *, run: int = 0, has_signal: bool = False) -> None:
        self.home = home
        self.now = 100.0 + 1000 * run
        self.state = ReportState(
            Report(job_id=7, run=run, phase="starting"), clock=lambda: self.now
        )
        self.memory = ResumeStateFile("r-7", home / "memory")
        self.signals = 0
        self.restarts = 0
        self.guard = Guard()
        self.watch = ScriptWatch(
            pattern=f"{home}/*.pt",
            state=self.state,
            resume_file=self.memory,
            send_signal=self._send_signal if has_signal else None,
            restart=self._restart,
            guard=self.guard,
            clock=lambda: self.now,
        )
        self.state.subscribe(self.watch.apply_orders)
        self.watch.begin_attempt(restarted=run > 0)
        self._seq = 0
        self._saves = 0

    def _send_signal(self) -> None:
        self.signals += 1

    def _restart(self) -> None:
        self.restarts += 1
        self.watch.begin_attempt(restarted=True)

    def order(self, action: str, notice: int | None = None) -> None:
        self._seq += 1
        self.state.receive(Orders(seq=self._seq, action=action, notice=notice), authoritative=True)

    def write(self, name: str = "") -> Path:
        self._saves += 1
        path = self.home / (name or f"s{self._saves}-{self.state.report().run}.pt")
        path.write_text("x" * self._saves)
        os.utime(path, (self.now, self.now))
        return path

    def settle(self) -> Report:
        """Scan twice, with `SETTLE_S` between, and return the report."""
        self.watch.check()
        self.now += SETTLE_S + 0.1
        self.watch.check()
        return self.state.report()

    def save(self, name: str = "") -> Report:
        self.write(name)
        return self.settle()


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def newest(home: Path) -> Path:
    return max(home.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)


def test_steps_are_complete_checkpoints(job: Job) -> None:
    assert job.state.report().kind == "script"
    report = job.save()
    assert (report.step, report.phase, report.proven) == (1, "training", False)
    assert report.checkpoint_age_s == pytest.approx(SETTLE_S + 0.1)
    job.now += 10
    report = job.save()
    assert (report.step, report.steps_measured) == (2, 1)
    assert report.step_time_s == pytest.approx(10 + SETTLE_S + 0.1)


def test_files_written_together_are_one_step(job: Job) -> None:
    job.write("last.pt")
    job.write("best.pt")
    assert job.settle().step == 1


def test_a_notice_waits_for_the_next_checkpoint(job: Job) -> None:
    job.save()
    job.order("notice", 5)
    assert (job.state.report().phase, job.state.report().notice) == ("saving", 5)
    job.now += 100
    job.watch.check()
    assert job.state.report().phase == "saving"
    report = job.save()
    assert (report.phase, report.notice) == ("saved", 5)
    assert job.guard.calls == ["guard", "arm"]
    assert job.watch.has_answered_notice
    job.now += 100
    assert job.save().phase == "saved", "the script goes on until it is killed"
    assert job.guard.calls == ["guard", "arm"]


def rename(job: Job, name: str) -> Report:
    job.write("x.tmp").rename(job.home / name)
    job.watch.check()
    return job.state.report()


def test_a_script_with_one_file_per_save_answers_at_once(job: Job) -> None:
    for name in ("a.pt", "b.pt"):
        rename(job, name)
        job.settle()
        job.now += 10
    job.order("notice", 5)
    assert rename(job, "c.pt").phase == "saved"


def test_a_script_with_several_files_per_save_is_waited_for(job: Job) -> None:
    for names in (("a.pt", "b.pt"), ("c.pt", "d.pt")):
        for name in names:
            rename(job, name)
        job.settle()
        job.now += 10
    job.order("notice", 5)
    assert rename(job, "e.pt").phase == "saving"
    job.now += SETTLE_S * 0.9
    assert rename(job, "f.pt").phase == "saving"
    job.now += SETTLE_S * 0.9
    job.watch.check()
    assert job.state.report().phase == "saving", "f.pt has not settled"
    job.now += SETTLE_S
    job.watch.check()
    assert job.state.report().phase == "saved"


def test_a_withdrawn_notice(job: Job) -> None:
    job.order("notice", 5)
    job.save()
    job.order("resume", 5)
    report = job.state.report()
    assert (report.phase, report.notice) == ("training", None)
    assert job.guard.calls == ["guard", "arm", "unguard"]
    assert not job.watch.has_answered_notice


def test_a_withdrawn_notice_that_was_never_answered(job: Job) -> None:
    job.order("notice", 5)
    job.order("run")
    assert job.guard.calls == ["guard", "unguard"]
    assert job.state.report().phase == "training"


def test_the_signal_is_sent_once_and_not_before_the_first_checkpoint(tmp_path: Path) -> None:
    job = Job(tmp_path, has_signal=True)
    job.order("notice", 1)
    assert job.signals == 0, "the script may not have installed its handler"
    assert job.save().phase == "saved"
    job.order("resume", 1)
    job.now += 10
    job.order("notice", 2)
    assert job.signals == 1
    assert job.save().phase == "saved"
    assert job.signals == 1


def test_what_was_written_before_the_signal_does_not_answer_it(tmp_path: Path) -> None:
    job = Job(tmp_path, has_signal=True)
    job.save()
    job.now += 10
    job.write()
    job.watch.check()
    job.now += 0.1
    job.order("notice", 2)
    assert job.settle().phase == "saving"
    job.now += 1
    assert job.save().phase == "saved"


def test_without_a_signal_what_becomes_complete_answers(job: Job) -> None:
    job.save()
    job.now += 10
    job.write()
    job.watch.check()
    job.now += 0.1
    job.order("notice", 2)
    assert job.settle().phase == "saved"


def test_a_rehearsal_proves_a_script_that_resumes(job: Job) -> None:
    job.order("rehearse")
    job.save()
    assert job.restarts == 1
    newest(job.home).read_text()
    job.now += 5
    report = job.save()
    assert (report.proven, report.resumed_from, report.step) == (True, 1, 2)
    job.now += 5
    job.save()
    assert job.restarts == 1
    assert job.memory.load() == ResumeState(count=3, proven=True)


def test_a_rehearsal_finds_out_a_script_that_does_not(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.order("rehearse")
    job.save()
    job.now += 5
    assert not job.save().proven
    for _ in range(3):
        job.now += 5
        job.save()
    assert job.restarts == 1
    assert capfd.readouterr().err.count("it does not resume") == 1
    assert job.memory.load().refuted


def test_looking_at_an_old_checkpoint_is_not_resuming(job: Job) -> None:
    job.save("old.pt")
    old = job.home / "old.pt"
    os.utime(old, (10, 10))
    job.settle()
    job.now += 5
    job.order("rehearse")
    job.save("new.pt")
    old.read_text()
    job.now += 5
    assert not job.save().proven


def test_one_of_several_files_of_the_last_save_is_enough(job: Job) -> None:
    job.order("rehearse")
    job.write("model.pt")
    job.write("optimizer.pt")
    job.settle()
    (job.home / "model.pt").read_text()
    job.now += 5
    assert job.save().proven


def test_the_proof_survives_a_requeue_and_is_watched_again(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.order("rehearse")
    first.save()
    newest(tmp_path).read_text()
    first.now += 5
    assert first.save().proven
    second = Job(tmp_path, run=1)
    assert second.state.report().proven
    assert second.state.report().step == 2
    newest(tmp_path).read_text()
    assert second.save().resumed_from == 2


def test_a_requeue_is_a_proof_too(tmp_path: Path) -> None:
    Job(tmp_path).save()
    second = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert second.save().proven


def test_checkpoints_of_somebody_else_prove_nothing(tmp_path: Path) -> None:
    (tmp_path / "pretrained.pt").write_text("1")
    job = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert not job.save().proven


def test_the_library_takes_over(job: Job) -> None:
    job.watch.stop()
    job.order("notice", 3)
    assert job.state.report().phase == "starting"


def test_a_state_that_cannot_be_written_is_logged_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    memory = ResumeStateFile("r-7", tmp_path / "file")
    memory.save(ResumeState(count=1))
    memory.save(ResumeState(count=2))
    assert capfd.readouterr().err.count("has to show again") == 1
    assert memory.load() == ResumeState()


@pytest.mark.parametrize("text", ["", "[]", '{"count": "x", "proven": 1, "refuted": 0}', "{}"])
def test_an_invalid_state_file_is_ignored(tmp_path: Path, text: str) -> None:
    memory = ResumeStateFile("r-7", tmp_path)
    memory.path.write_text(text)
    assert memory.load() == ResumeState()
