"""Interval between checks whose cost must stay below a fraction of the training time.

>>> budget = OverheadBudget(10, most=4)
>>> [step for step in range(1, 50) if budget.due(step)]
[10, 20, 30, 40]
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Fraction of the time that checks may take.
SHARE = 0.01
#: Checks that are not counted: they import and allocate.
_WARM_UP = 2
#: Weight of a new check in the average of their cost.
_NEW = 0.3


class OverheadBudget:
    """Interval between checks, longer by a power of 2 where they take more than `SHARE`.

    A check may take parts of several steps: each part runs within `timed`; `finish_check` ends it.

    Args:
        every: steps between two checks, if they are cheap.
        most: largest factor of the interval.
    """

    def __init__(self, every: int, *, most: int) -> None:
        self._every = every
        self._most = most
        self._factor = 1
        self._cost_s = 0.0
        self._share: float | None = None
        self._last: tuple[int, float] | None = None
        self._checks = 0

    @property
    def every(self) -> int:
        """Present number of steps between two checks."""
        return self._every * self._factor

    def due(self, step: int) -> bool:
        """Return whether a check is due in this step, counted from 1."""
        return step % self.every == 0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time within the block as cost of the next check."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._cost_s += time.monotonic() - begun

    def finish_check(self, step: int) -> None:
        """Set the interval to the next check, after a step with one."""
        now = time.monotonic()
        cost_s, self._cost_s = self._cost_s, 0.0
        last, self._last = self._last, (step, now)
        self._checks += 1
        if last is None or self._checks <= _WARM_UP:
            return
        # The steps in between took at least this long without checks.
        step_s = max(0.0, now - last[1] - cost_s) / max(1, step - last[0])
        share = cost_s / max(1e-9, step_s * self._every)
        self._share = share if self._share is None else self._share + _NEW * (share - self._share)
        self._factor = 1
        while 2 * self._factor <= self._most and self._share > SHARE * self._factor:
            self._factor *= 2
