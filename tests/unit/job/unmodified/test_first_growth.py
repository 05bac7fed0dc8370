"""A program for one process that was grown: its ranks are ended, and the change has failed."""

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
