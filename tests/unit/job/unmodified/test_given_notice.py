"""Which checkpoint answers a notice."""

import pytest

from slurm_elastic.core.report import Orders
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import ScriptCheckpoint
from slurm_elastic.job.unmodified.given_notice import GivenNotice

SAVING = {"phase": "saving", "notice": 7}


def checkpoint(save: int) -> ScriptCheckpoint:
    """Return a complete checkpoint that a certain save wrote."""
    return ScriptCheckpoint("/a/ckpt.pt", 0.0, (), 0.0, save)


@pytest.fixture
def notice() -> GivenNotice:
    """Return notice 7, given after two saves had begun."""
    notice = GivenNotice()
    notice.orders = Orders(action="notice", notice=7)
    notice.saves_before = 2
    return notice


def test_the_next_checkpoint_is_due_if_the_script_takes_no_signal(notice: GivenNotice) -> None:
    assert notice.fields(checkpoint(2), needs_copy=False, is_saving=False) == SAVING
    assert notice.due == checkpoint(2)


def test_a_save_that_began_before_the_signal_does_not_answer(notice: GivenNotice) -> None:
    notice.signalled = 7
    assert notice.fields(checkpoint(2), needs_copy=False, is_saving=False) == SAVING
    assert notice.due is None
    notice.fields(checkpoint(3), needs_copy=False, is_saving=False)
    assert notice.due == checkpoint(3)


@pytest.mark.parametrize(
    ("needs_copy", "is_saving"), [(True, False), (False, True)], ids=["copy", "saving"]
)
def test_a_copy_or_another_save_comes_first(
    notice: GivenNotice, needs_copy: bool, is_saving: bool
) -> None:
    assert notice.fields(checkpoint(3), needs_copy=needs_copy, is_saving=is_saving) == SAVING
    assert notice.due is None


def test_what_is_saved_after_the_answer_is_reported_as_saved(notice: GivenNotice) -> None:
    notice.answered = 7
    fields = notice.fields(checkpoint(3), needs_copy=True, is_saving=True)
    assert fields == {"phase": "saved", "notice": 7}
    assert notice.due is None


def test_another_attempt_is_asked_again(notice: GivenNotice) -> None:
    notice.answered = notice.signalled = 7
    notice.begin_attempt()
    assert not notice.is_answered
    assert not notice.is_signalled
