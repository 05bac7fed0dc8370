"""Ranks that are frozen between the answer to a notice and the requeue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

#: Longest time for which ranks are frozen (our choice: the controller requeues the job within
#: seconds; NCCL's watchdog ends ranks after 8 or 10 minutes).
FROZEN_S = 120.0


class TerminationHandler(Protocol):
    """Interface of `rank_signals.RankSignals`: kills ranks that ignore Slurm's SIGTERM."""

    def guard(self) -> None:
        """Prepare, after a notice."""

    def freeze(self) -> bool:
        """Stop the ranks until `unguard`; return whether they stand."""

    def arm(self) -> None:
        """Kill the ranks from now on: the notice is answered and all is saved."""

    def unguard(self) -> None:
        """Undo `guard`, `freeze` and `arm`: the notice is withdrawn."""


class RankFreeze:
    """Freeze of the ranks of one attempt.

    Args:
        handler: of the ranks' signals.
        clock: monotonic seconds.
    """

    def __init__(self, handler: TerminationHandler, clock: Callable[[], float]) -> None:
        self._handler = handler
        self._clock = clock
        self._frozen_at: float | None = None

    @property
    def is_frozen(self) -> bool:
        """Whether the ranks are frozen."""
        return self._frozen_at is not None

    @property
    def is_late(self) -> bool:
        """Whether they have been frozen for longer than a requeue takes."""
        return self._frozen_at is not None and self._clock() - self._frozen_at >= FROZEN_S

    def begin(self) -> None:
        """Freeze the ranks; where they cannot be frozen they go on."""
        self._handler.guard()  # has begun with the notice, unless the program started after it
        if self._handler.freeze():
            self._frozen_at = self._clock()

    def end(self) -> None:
        """Let the ranks go on; the guards begin anew."""
        self.forget()
        self._handler.unguard()
        self._handler.guard()

    def forget(self) -> None:
        """Forget the freeze: the ranks have ended, or a withdrawn notice let them go on."""
        self._frozen_at = None
