"""Restarts of all ranks on the base and its companions: when one is due, and what is reported.

A restart is due when the controller states that the ranks have saved (`member_orders.RESTARTS`), or
when a companion is lost in which ranks of a program run that cannot go on without them. The ranks
are ended then, and the supervisor starts the program again in the same run of the job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from slurm_elastic.job.launch import log_line

#: Seconds that companions have to connect after the ranks have saved, which wait meanwhile.
CONNECT_S = 15.0


class RankRestart:
    """Restart that is due; called by any thread.

    Args:
        end_ranks: kills the ranks that run; called in a thread of its own.
    """

    def __init__(self, end_ranks: Callable[[], object]) -> None:
        self._end_ranks = end_ranks
        self._due = threading.Event()

    @property
    def is_due(self) -> bool:
        """Whether the program is to be started again as soon as its ranks have ended."""
        return self._due.is_set()

    def demand(self, reason: str) -> None:
        """Make a restart due, and end the ranks."""
        if self._due.is_set():
            return
        self._due.set()
        log_line(f"the program is started again: {reason}")
        threading.Thread(target=self._end_ranks, name="end of ranks", daemon=True).start()

    def done(self) -> None:
        """Record that the program is started again."""
        self._due.clear()

    def wait(self, seconds: float) -> bool:
        """Wait at most this long until one is due; return whether it is."""
        return self._due.wait(seconds)


class ConnectDeadline:
    """Time until which companions of a restart are waited for.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._change: int | None = None
        self._at = 0.0

    def is_over(self, change: int) -> bool:
        """Return whether the time of a change is over; it begins with the first call."""
        if self._change != change:
            self._change, self._at = change, self._clock() + CONNECT_S
        return self._clock() >= self._at
