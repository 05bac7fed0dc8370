"""Notice of a change that a script has been given, until a checkpoint answers it."""

from __future__ import annotations

from typing import Any

from slurm_elastic.core.report import Orders
from slurm_elastic.job.unmodified.checkpoints.checkpoint_scanner import ScriptCheckpoint


class GivenNotice:
    """Present orders, and what an attempt has done about the notice in them.

    Attributes:
        orders: the present ones.
        given_at: when the newest notice was given (monotonic s).
        saves_before: saves that had begun before it; counted only for scripts that take a signal.
        signalled: notice for which the signal was sent last; None: none.
        answered: notice that was answered last; None: none.
        due: complete checkpoint that answers the notice unless another save begins at once.
    """

    def __init__(self) -> None:
        self.orders = Orders()
        self.given_at = 0.0
        self.saves_before = 0
        self.signalled: int | None = None
        self.answered: int | None = None
        self.due: ScriptCheckpoint | None = None

    @property
    def is_given(self) -> bool:
        """Whether the present orders are a notice."""
        return self.orders.action == "notice"

    @property
    def is_signalled(self) -> bool:
        """Whether the signal was sent for the present notice."""
        return self.signalled == self.orders.notice

    @property
    def is_answered(self) -> bool:
        """Whether the present notice has been answered."""
        return self.answered == self.orders.notice

    def begin_attempt(self) -> None:
        """Forget what the last attempt did: only this one can save its own steps."""
        self.due = None
        if self.is_given:
            self.answered = self.signalled = None

    def withdraw(self) -> None:
        """Forget the answer, as the orders are no notice any more."""
        self.answered = self.due = None

    def fields(
        self, checkpoint: ScriptCheckpoint, *, needs_copy: bool, is_saving: bool
    ) -> dict[str, Any]:
        """Return the fields of a report that a complete checkpoint changes; it may be due then.

        Args:
            checkpoint: the one that has just become complete.
            needs_copy: whether a rehearsal keeps it before the notice is answered.
            is_saving: whether another save is under way.
        """
        saving = {"phase": "saving", "notice": self.orders.notice}
        if needs_copy and not self.is_answered:
            return saving
        # A save that was under way when the signal was sent has an older state.
        is_too_early = self.is_signalled and checkpoint.save <= self.saves_before
        if is_too_early or (is_saving and self.answered is None):
            return saving
        if self.is_answered:
            return {"phase": "saved", "notice": self.orders.notice}
        self.due = checkpoint
        return saving
