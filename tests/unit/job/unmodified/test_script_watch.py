"""Unmodified scripts: reports, notices and resumes at complete checkpoints."""

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.core.report import Report
from slurm_elastic.job.unmodified.checkpoints.settle_time import FIRST_S, LEAST_S
from slurm_elastic.job.unmodified.resume_state import ResumeState, ResumeStateFile
from tests.support.job.script_job import ScriptJob as Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def newest(home: Path) -> Path:
    return max(home.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns)


def test_steps_are_complete_checkpoints(job: Job) -> None:
    assert job.state.report().kind == "script"
    report = job.save()
    assert (report.step, report.phase, report.proven) == (1, "training", False)
    assert report.checkpoint_age_s == pytest.approx(FIRST_S + 0.1)
    job.now += 10
    report = job.save()
    assert (report.step, report.steps_measured) == (2, 1)
    assert report.step_time_s == pytest.approx(10 + FIRST_S + 0.1)


def test_a_checkpoint_with_an_earlier_time_gives_no_step_time(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.save()
    job.now += 10
    os.utime(job.write("other.pt"), (50, 50))
    report = job.settle()
    assert (report.step, report.step_time_s) == (2, None)
    assert "ignored" not in capsys.readouterr().err


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
    job.now += 10
    assert job.save().phase == "saved", "a script that cannot be frozen goes on"
    assert job.guard.calls == ["guard", "arm"]


def test_ranks_that_are_started_again_under_a_notice_answer_it_themselves(job: Job) -> None:
    """As after the loss of a companion: what they train on is not in the save of before."""
    job.save()
    job.order("notice", 5)
    assert job.save().phase == "saved"
    job.state.begin_attempt()
    job.watch.begin_attempt(restarted=True)
    assert not job.watch.has_answered_notice
    assert (job.state.report().phase, job.state.report().notice) == ("starting", None)
    job.now += 10
    report = job.save()
    assert (report.phase, report.notice) == ("saved", 5)
    assert job.guard.calls == ["guard", "arm", "unguard", "guard", "arm"]


def rename(job: Job, name: str) -> Report:
    job.write("x.tmp").rename(job.home / name)
    job.watch.check()
    return job.state.report()


def test_a_script_with_one_file_per_save_answers_at_once(job: Job) -> None:
    for name in ("a1.pt", "a2.pt"):
        rename(job, name)
        job.settle()
        job.now += 10
    job.order("notice", 5)
    assert rename(job, "a3.pt").phase == "saved"


def test_a_script_with_several_files_per_save_is_waited_for(job: Job) -> None:
    for number in (1, 2):
        rename(job, f"model{number}.pt")
        rename(job, f"optimizer{number}.pt")
        assert job.settle().step == number
        job.now += 10
    job.order("notice", 5)
    assert rename(job, "model3.pt").phase == "saving"
    job.now += 100
    job.watch.check()
    assert job.state.report().phase == "saving"
    assert rename(job, "optimizer3.pt").phase == "saved"


def test_nothing_is_answered_while_the_next_save_is_under_way(job: Job) -> None:
    job.save()
    job.order("notice", 5)
    job.write("s8.pt")
    job.watch.check()
    job.now += LEAST_S - 1
    job.watch.check()
    job.write("model.pt")
    job.now += 2
    job.watch.check()
    assert job.state.report().phase == "saving", "model.pt is still being written"
    job.now += FIRST_S
    job.watch.check()
    assert job.state.report().phase == "saved"


def test_a_save_that_was_under_way_at_the_signal_does_not_answer(tmp_path: Path) -> None:
    job = Job(tmp_path, has_signal=True)
    job.save()
    job.now += 10
    job.write("s8.pt")
    job.now += 0.1
    job.order("notice", 2)
    job.now += 1
    (tmp_path / "s8.pt").write_text("its last part is written after the signal")
    assert job.settle().phase == "saving"
    job.now += 1
    assert job.save().phase == "saved"


def test_what_esrun_itself_reads_is_no_resume(tmp_path: Path) -> None:
    """A script that starts anew overwrites its checkpoint in place, and esrun looks at its end."""
    first = Job(tmp_path)
    first.write("ckpt.pt").write_bytes(b"PK\x03\x04 and so on")
    first.watch.check()
    first.write("ckpt.pt")
    first.settle()
    second = Job(tmp_path, run=1)
    with (tmp_path / "ckpt.pt").open("r+b") as file:
        file.write(b"PK\x03\x04 and so on")
        file.flush()
        second.watch.check()
    second.write("ckpt.pt")
    assert not second.settle().proven
    assert second.memory.load().refuted


def test_a_withdrawn_notice(job: Job) -> None:
    job.order("notice", 5)
    job.save()
    job.order("resume", 5)
    report = job.state.report()
    assert (report.phase, report.notice) == ("training", None)
    assert job.guard.calls == ["guard", "arm", "unguard"]
    assert not job.watch.has_answered_notice


def test_the_ranks_stand_from_the_answer_until_the_notice_is_withdrawn(job: Job) -> None:
    job.save()
    job.order("notice", 5)
    assert not job.guard.is_frozen
    assert job.save().phase == "saved"
    assert job.guard.is_frozen
    job.order("resume", 5)
    assert not job.guard.is_frozen
    job.now += 500
    job.watch.check()
    assert job.guard.calls == ["guard", "arm", "unguard"]


def test_a_save_that_begins_before_the_ranks_stand_is_waited_for(job: Job) -> None:
    job.save("ckpt.pt")
    job.order("notice", 5)
    job.guard.on_freeze = lambda: job.write("ckpt.pt")
    assert job.save("ckpt.pt").phase == "saving"
    assert not job.guard.is_frozen
    assert "arm" not in job.guard.calls
    job.guard.on_freeze = lambda: None
    assert job.settle().phase == "saved"
    assert job.guard.is_frozen


def test_ranks_that_cannot_be_frozen_do_not_prevent_the_answer(job: Job) -> None:
    job.guard.can_freeze = False
    job.order("notice", 5)
    assert job.save().phase == "saved"


def test_an_answer_that_the_controller_does_not_use_is_taken_back(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.order("notice", 5)
    assert job.save().phase == "saved"
    job.now += 119
    job.watch.check()
    assert job.guard.is_frozen
    job.now += 1
    job.order("notice", 5)  # the controller still answers
    job.watch.check()
    assert not job.guard.is_frozen
    assert job.state.report().phase == "saving"
    assert capfd.readouterr().err.count("no requeue within 120 s") == 1
    assert job.save().phase == "saved", "the next checkpoint answers again"
    assert job.guard.is_frozen


def test_an_answer_that_a_silent_controller_does_not_use_ends_the_notice(job: Job) -> None:
    """Else the script would stand still after each of its saves."""
    job.order("notice", 5)
    assert job.save().phase == "saved"
    job.now += 120
    job.watch.check()
    assert job.state.orders().action == "resume"
    assert job.save().phase == "training"
    assert not job.guard.is_frozen


def test_a_script_whose_saves_have_no_visible_end_gets_the_remedy(
    job: Job, capfd: pytest.CaptureFixture[str]
) -> None:
    job.order("notice", 5)
    for _ in range(10):
        job.write("ckpt.pt")
        job.watch.check()
        job.now += 5
    job.order("resume", 5)
    assert capfd.readouterr().err.count("esrun --complete") == 1


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


def test_the_signal_is_sent_while_the_first_save_settles(tmp_path: Path) -> None:
    job = Job(tmp_path, has_signal=True)
    job.write("s1.pt")
    job.watch.check()
    job.now += 1
    job.order("notice", 1)
    assert job.signals == 1
    assert job.settle().phase == "saving", "the first save has an older state"
    assert job.save().phase == "saved"


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


def test_an_order_of_an_older_controller_to_rehearse_restarts_nothing(job: Job) -> None:
    job.order("rehearse")
    report = job.save()
    assert (report.phase, report.proven) == ("training", False)
    assert not job.watch.has_answered_notice


def test_looking_at_an_old_checkpoint_is_not_resuming(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.save("old.pt")
    old = tmp_path / "old.pt"
    os.utime(old, (10, 10))
    first.settle()
    first.now += 5
    first.save("new.pt")
    second = Job(tmp_path, run=1)
    old.read_text()
    assert not second.save().proven


def test_one_of_several_files_of_the_last_save_is_enough(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.write("model.pt")
    first.write("optimizer.pt")
    first.settle()
    second = Job(tmp_path, run=1)
    (tmp_path / "model.pt").read_text()
    assert second.save().proven


def test_the_proof_survives_a_requeue_and_is_watched_again(tmp_path: Path) -> None:
    Job(tmp_path).save()
    first = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert first.save().proven
    second = Job(tmp_path, run=2)
    assert second.state.report().proven
    assert second.state.report().step == 2
    newest(tmp_path).read_text()
    assert second.save().resumed_from == 2


def test_a_requeue_is_a_proof_too(tmp_path: Path) -> None:
    Job(tmp_path).save()
    second = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert second.save().proven


def test_each_script_of_a_batch_script_is_proven_by_itself(tmp_path: Path) -> None:
    """`esrun … pretrain.py`, then `esrun … finetune.py`, which may not resume."""
    Job(tmp_path, pattern="pre-*.pt").save("pre-step_000500.pt")
    first = Job(tmp_path, run=1, pattern="pre-*.pt")
    newest(tmp_path).read_text()
    assert first.save("pre-step_000600.pt").proven
    second = Job(tmp_path, run=1, pattern="fine-*.pt")
    assert not second.state.report().proven
    report = second.save("fine-step_000010.pt")  # its steps begin anew: no jump
    assert (report.proven, report.jump, report.step) == (False, "", 3)
    assert report.rehearsal == "able"
    again = Job(tmp_path, run=2, pattern="pre-*.pt")
    assert again.state.report().proven, "what is known of the first one is kept"
    anew = Job(tmp_path, run=2, pattern="fine-*.pt")
    assert anew.save("fine-step_000020.pt").rehearsal == "refuted"
    assert Job(tmp_path, run=3, pattern="pre-*.pt").state.report().proven


def test_a_script_that_had_ended_may_have_nothing_left_to_do(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.save("s1.pt")
    first.watch.record_end()
    second = Job(tmp_path, run=1)
    assert not second.watch.has_nothing_left, "it has not read its checkpoint"
    newest(tmp_path).read_text()
    assert second.watch.has_nothing_left
    third = Job(tmp_path, run=2)
    newest(tmp_path).read_text()
    third.save("s2.pt")
    assert not third.watch.has_nothing_left, "it trains on"
    newer = Job(tmp_path, run=3, pattern="*.ckpt")
    assert not newer.watch.has_nothing_left


def test_a_batch_script_that_loops_over_many_seeds(tmp_path: Path) -> None:
    """At a restart each one that has ended has nothing left to do, the first one, too."""
    for seed in range(60):
        one = Job(tmp_path, pattern=f"{seed}-*.pt")
        one.save(f"{seed}-last.pt")
        one.watch.record_end()
        Job.close_all()
    for seed in (0, 59):
        again = Job(tmp_path, run=1, pattern=f"{seed}-*.pt")
        (tmp_path / f"{seed}-last.pt").read_text()
        assert again.watch.has_nothing_left


def test_a_script_that_resumes_is_not_started_without_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "g02")
    Job(tmp_path).save("s1.pt")
    second = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert second.save("s2.pt").proven
    for path in tmp_path.glob("*.pt"):
        path.rename(path.with_suffix(".away"))
    lost = Job(tmp_path, run=2)
    assert lost.watch.has_lost_checkpoints
    assert "g02" not in lost.watch.refusal_line(), "it is this node"
    monkeypatch.setenv("SLURMD_NODENAME", "g03")
    line = lost.watch.refusal_line()
    assert "this node, though the job has completed 2 checkpoints, the last one on g02;" in line
    assert f"delete {tmp_path}/memory/r-7.json" in line
    other = Job(tmp_path, run=2, pattern="fine-*.pt")
    assert not other.watch.has_lost_checkpoints, "another script, which has none yet"
    for path in tmp_path.glob("*.away"):
        path.rename(path.with_suffix(".pt"))
    assert not Job(tmp_path, run=3).watch.has_lost_checkpoints


def test_a_script_that_has_ended_may_delete_its_checkpoints(tmp_path: Path) -> None:
    Job(tmp_path).save("s1.pt")
    second = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert second.save("s2.pt").proven
    second.watch.record_end()
    for path in tmp_path.glob("*.pt"):
        path.unlink()
    assert not Job(tmp_path, run=2).watch.has_lost_checkpoints


def test_a_script_that_never_ended_has_something_left(tmp_path: Path) -> None:
    Job(tmp_path).save("s1.pt")
    second = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert not second.watch.has_nothing_left


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
    memory = ResumeStateFile("r-7", [str(tmp_path / "file" / "state")])
    memory.save(ResumeState(count=1))
    memory.save(ResumeState(count=2))
    assert capfd.readouterr().err.count("no place for the state") == 1
    assert memory.load() == ResumeState()


def test_the_longest_pause_is_kept_over_a_requeue(tmp_path: Path) -> None:
    first = Job(tmp_path)
    first.write("s1.pt")
    first.watch.check()
    first.now += 7
    first.write("s1-optimizer.pt")
    first.settle()
    (learned,) = first.memory.load().learned
    assert learned.pause_s == pytest.approx(7)
    second = Job(tmp_path, run=1)
    second.write("s2.pt")
    second.write("s2-optimizer.pt")
    second.watch.check()
    second.now += 3 * 7 - 1
    second.watch.check()
    assert second.state.report().step == 1
    second.now += 1.1
    second.watch.check()
    assert second.state.report().step == 2


@pytest.mark.parametrize("text", ["", "[]", '{"count": "x", "proven": 1, "refuted": 0}', "{}"])
def test_an_invalid_state_file_is_ignored(tmp_path: Path, text: str) -> None:
    memory = ResumeStateFile("r-7", [str(tmp_path)])
    (tmp_path / "r-7.json").write_text(text)
    assert memory.load() == ResumeState()


def test_the_start_world_is_that_of_the_first_checkpoint(tmp_path: Path) -> None:
    Job(tmp_path, world=4)
    Job(tmp_path, run=1, world=2).save()
    assert Job(tmp_path, run=2, world=8).save().step == 2
    text = (tmp_path / "memory" / "r-7.json").read_text()
    assert ResumeStateFile("r-7", [str(tmp_path / "memory")]).load().start_world == 2
    assert '"start_world": 2' in text  # as `world_variables.read_start_world` reads it


def test_a_state_of_the_release_before_is_read(tmp_path: Path) -> None:
    memory = ResumeStateFile("r-7", [str(tmp_path)])
    (tmp_path / "r-7.json").write_text('{"count": 4, "proven": true, "refuted": false}')
    assert memory.load() == ResumeState(count=4, proven=True)
    (tmp_path / "r-7.json").write_text('{"count": 4, "proven": true, "jump": 5}')
    assert memory.load() == ResumeState()
    (tmp_path / "r-7.json").write_text('{"count": 4, "others": {"a": {"jump": 5}}}')
    assert memory.load() == ResumeState()


def test_a_jump_is_reported_by_all_later_attempts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Job(tmp_path).save("step_000500.pt").jump == ""
    later = Job(tmp_path, run=1, world=4)
    newest(tmp_path).read_text()
    assert later.save("step_000010.pt").jump == "1 → 4 ranks: step 500 is followed by step 10"
    assert "steps, epoch or learning rate do not continue, 1 → 4 ranks" in capfd.readouterr().err
    assert Job(tmp_path, run=2, world=1).state.report().jump.startswith("1 → 4 ranks")


def test_steps_of_the_program_replace_the_count_of_checkpoints(job: Job) -> None:
    fields = {"kind": "script", "step": 130, "checkpoint_step": 120}
    job.watch.record_program_step(fields)
    assert "checkpoint_step" not in fields  # not before it is complete
    job.state.update(fields)
    report = job.save()
    assert (report.step, report.checkpoint_step, report.steps_measured) == (130, 120, 0)
    later = Job(job.home, run=1)
    assert later.state.report().checkpoint_step == 120


def test_until_the_first_checkpoint_it_looks_often(job: Job) -> None:
    """Two saves that are found at once would be taken for one."""
    assert job.watch._interval_s() <= 1.0
    job.save()
    assert job.watch._interval_s() == 10.0


def learned(home: Path, **how: Any) -> Path:
    """Return a directory whose first attempt has shown that each save is of one file."""
    first = Job(home, **how)
    for name in ("a1.pt", "a2.pt"):
        rename(first, name)
        first.settle()
        first.now += 10
    assert rename(first, "a3.pt").step == 3, "at its last byte"
    return home


def test_the_first_save_of_a_later_attempt_counts_at_its_last_byte(tmp_path: Path) -> None:
    second = Job(learned(tmp_path), run=1)
    assert rename(second, "a4.pt").step == 4
    second.now += 5
    assert rename(second, "a5.pt").step == 5


@pytest.mark.parametrize(
    "how", [{"world": 4}, {"hosts": 2}, {"pattern": "a*.pt"}, {"complete": "{}.done"}]
)
def test_what_was_learned_elsewhere_does_not_count(tmp_path: Path, how: dict[str, Any]) -> None:
    """More ranks or hosts may write more files, and another pattern is of other files."""
    learned(tmp_path)
    assert rename(Job(tmp_path, run=1, **how), "a4.pt").step == 3
    assert rename(Job(tmp_path, run=2), "a5.pt").step == 4, "it is not forgotten either"


@pytest.mark.parametrize("damage", ["{", '"learned": 5', '"files": {"1x1": []}'])
def test_what_was_learned_and_cannot_be_read_does_not_count(tmp_path: Path, damage: str) -> None:
    learned(tmp_path)
    file = tmp_path / "memory" / "r-7.json"
    body = json.loads(file.read_text())
    if damage == "{":
        file.write_text(damage)
    elif "learned" in damage:
        file.write_text(json.dumps({**body, "learned": 5}))
    else:
        body["learned"][0]["files"] = {"1x1": []}
        file.write_text(json.dumps(body))
    second = Job(tmp_path, run=1)
    step = second.state.report().step or 0
    assert rename(second, "a4.pt").step == step
    second.now += LEAST_S + 1
    second.watch.check()
    assert second.state.report().step == step, "the settle time is not known either"


def test_a_notice_is_not_answered_by_what_earlier_attempts_have_shown(tmp_path: Path) -> None:
    second = Job(learned(tmp_path), run=1)
    second.order("notice", 5)
    assert (rename(second, "a4.pt").step, second.state.report().phase) == (4, "saving")
    second.now += 3
    rename(second, "a4-optimizer.pt")
    second.now += LEAST_S - 1
    second.watch.check()
    assert second.state.report().phase == "saving", "this attempt saves two files"
    second.settle()
    assert second.state.report().phase == "saved"


@pytest.mark.parametrize("follows", ["another save", "nothing"])
def test_a_notice_is_answered_once_the_first_save_is_confirmed(
    tmp_path: Path, follows: str
) -> None:
    second = Job(learned(tmp_path), run=1)
    second.order("notice", 5)
    rename(second, "a4.pt")
    second.now += 2
    if follows == "another save":
        assert rename(second, "a5.pt").phase == "saved"
        return
    second.watch.check()
    assert second.state.report().phase == "saving"
    second.now += LEAST_S
    second.watch.check()
    assert second.state.report().phase == "saved"


def test_an_attempt_with_other_files_ends_what_was_learned(tmp_path: Path) -> None:
    second = Job(learned(tmp_path), run=1)
    rename(second, "model.pt")
    rename(second, "optimizer.pt")
    second.settle()
    third = Job(tmp_path, run=2)
    count = third.state.report().step
    assert rename(third, "a9.pt").step == count
    assert third.settle().step == (count or 0) + 1


def test_the_files_of_a_directory_are_learned(tmp_path: Path) -> None:
    def save(job: Job, number: int, names: tuple[str, ...]) -> Report:
        folder = tmp_path / f"step_{number}.pt"
        folder.mkdir()
        for name in names:
            with zipfile.ZipFile(folder / name, "w") as file:
                file.writestr("x", "x")
            job.now += 1
            job.watch.check()
        return job.state.report()

    first = Job(tmp_path)
    for number in (1, 2):
        save(first, number, ("a.zip", "b.zip"))
        first.settle()
    second = Job(tmp_path, run=1)
    assert save(second, 3, ("a.zip",)).step == 2, "b.zip is missing"
    second.now += 100
    second.watch.check()
    assert second.state.report().step == 2
    third = Job(tmp_path, run=2)
    assert save(third, 4, ("a.zip", "b.zip")).step == 3


def test_tasks_of_an_array_with_one_pattern_answer_no_notice_while_both_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")
    Job(tmp_path).save("1.pt")
    first = Job(tmp_path, run=1)
    newest(tmp_path).read_text()
    assert first.save("2.pt").proven
    second = Job(tmp_path, job_id=8)
    assert (second.state.report().rehearsal, second.save("3.pt").proven) == ("shared", False)
    first.order("notice", 5)
    report = first.settle()
    assert (report.phase, report.proven, report.rehearsal) == ("saving", False, "shared")
    assert "job 8, another task of this array, writes checkpoints of the same" in (
        capsys.readouterr().err
    )
    second.watch.end_attempt(0)
    second.order("notice", 1)
    second.now += 60
    second.watch.check()
    assert len(list((tmp_path / "memory").glob("*.array-6-*"))) == 1, "it has left no mark"
    first.order("run")
    first.now += 60
    assert first.settle().proven
    first.order("notice", 6)
    assert first.save("4.pt").phase == "saved"


@pytest.mark.parametrize("array", ["", "9"])
def test_other_arrays_and_other_patterns_are_no_siblings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: str
) -> None:
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")
    Job(tmp_path)
    other = Job(tmp_path, job_id=8, pattern="8-*.pt")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", array)
    for job in (other, Job(tmp_path, job_id=9)):
        assert job.state.report().rehearsal == ""


def test_a_task_that_was_killed_leaves_a_mark_that_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--array=0-9%1`: each goes on with the checkpoints of the last one."""
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "6")
    Job(tmp_path)
    (mark,) = (tmp_path / "memory").glob("r-7.array-6-*")
    second = Job(tmp_path, job_id=8)
    assert second.save("1.pt").rehearsal == "shared"
    long_ago = mark.stat().st_mtime - 200
    os.utime(mark, (long_ago, long_ago))
    second.now += 60
    assert second.save("2.pt").rehearsal == "able"
