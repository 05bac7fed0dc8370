"""A program for one process that was grown: its ranks are ended, and the change has failed."""

import os
from pathlib import Path

import pytest

from tests.support.job.script_job import ScriptJob as Job

JUMP = "1 → 4 ranks: each trains alone and writes the same checkpoints"


def test_ranks_that_train_alone_are_ended_and_the_job_is_not_resized_any_more(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert Job(tmp_path).save().checkpoint_step == 1
    sizes: list[int] = []
    grown = Job(tmp_path, run=1, world=4, are_alone=lambda size: not sizes.append(size))
    grown.write().write_text("12345")
    report = grown.settle()
    assert sizes == [5]
    # The checkpoint does not end the trial of the attempt.
    assert (report.checkpoint_step, report.jump) == (1, JUMP)
    assert (grown.ended, grown.guard.is_frozen) == (1, True)
    assert grown.save().checkpoint_step == 1
    assert grown.ended == 1
    assert f"{JUMP}, so they are ended" in capfd.readouterr().err
    back = Job(tmp_path, run=2, world=1, are_alone=lambda size: True)
    assert back.save().checkpoint_step == 2
    assert (back.state.report().jump, back.ended) == (JUMP, 0)


def test_a_save_under_way_is_waited_for(tmp_path: Path) -> None:
    Job(tmp_path).save()
    grown = Job(tmp_path, run=1, world=4, are_alone=lambda size: True)
    grown.guard.on_freeze = lambda: grown.write("next.pt")
    grown.save()
    assert (grown.ended, grown.guard.is_frozen) == (0, False)
    grown.guard.on_freeze = lambda: None
    grown.settle()
    assert grown.ended == 1


@pytest.mark.parametrize("first", [1, 2])
def test_only_the_first_checkpoint_after_a_growth_from_one_rank_counts(
    tmp_path: Path, first: int
) -> None:
    """Of a job that began on several ranks nothing can be said: they may be meant to be alone."""
    asked: list[int] = []
    Job(tmp_path, world=first, are_alone=lambda size: bool(asked.append(size))).save()
    grown = Job(tmp_path, run=1, world=4, are_alone=lambda size: bool(asked.append(size)))
    grown.save()
    grown.save()
    assert len(asked) == (1 if first == 1 else 0)
    assert (grown.state.report().jump, grown.ended) == ("", 0)


def test_ranks_that_write_one_after_the_other_are_looked_at_again(tmp_path: Path) -> None:
    Job(tmp_path).save()
    answers: list[bool | None] = [None, True]
    grown = Job(tmp_path, run=1, world=2, are_alone=lambda size: answers.pop(0))
    report = grown.save()
    assert (report.checkpoint_step, report.jump) == (1, ""), "it may have been written by all"
    report = grown.save()
    assert (report.checkpoint_step, report.jump, grown.ended) == (1, JUMP.replace("4", "2"), 1)


def test_what_stays_open_is_no_failure(tmp_path: Path) -> None:
    Job(tmp_path).save()
    grown = Job(tmp_path, run=1, world=2, are_alone=lambda size: None)
    assert [grown.save().checkpoint_step for _ in range(4)] == [1, 1, 2, 3]
    assert (grown.state.report().jump, grown.ended) == ("", 0)


def test_a_small_file_that_is_complete_first_does_not_hide_a_large_one(tmp_path: Path) -> None:
    """`BackupAndRestore` of Keras writes weights and a small description, each time anew."""
    sizes: list[int] = []

    def are_alone(size: int) -> bool:
        sizes.append(size)
        return False

    first = Job(tmp_path, pattern="backup/*")
    (tmp_path / "backup").mkdir()
    first.write("backup/latest.weights.h5").write_bytes(b"x" * 1000)
    first.save("backup/training_metadata")
    grown = Job(tmp_path, pattern="backup/*", run=1, world=2, are_alone=are_alone)
    grown.save("backup/training_metadata")
    assert sizes == [1000]


def test_ranks_whose_saves_never_end_are_ended_between_two_changes(tmp_path: Path) -> None:
    Job(tmp_path).save()
    grown = Job(tmp_path, run=1, world=2, are_alone=lambda size: True)
    ended = []
    for _ in range(14):  # in a save of two files, each overwritten by both ranks
        for name, pause_s in (("weights.pt", 0.5), ("description.pt", 5)):
            (tmp_path / name).write_text("x" * 100)
            os.utime(tmp_path / name, (grown.now, grown.now))
            grown.watch.check()
            grown.now += pause_s
            grown.watch.check()
            ended.append(grown.ended)
    assert grown.state.report().jump == JUMP.replace("4", "2")
    assert ended == [0] * 23 + [1] * 5, "60 s after the first checkpoint"
    assert grown.guard.is_frozen
    assert not grown.watch.is_saving(), "else its end would be waited for"
