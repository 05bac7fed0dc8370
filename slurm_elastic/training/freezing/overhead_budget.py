"""How often something may be done that only watches: as often as wished, if it costs little enough.

>>> budget = OverheadBudget(10, most=4)
>>> [step for step in range(1, 50) if budget.due(step)]
[10, 20, 30, 40]
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

#: Of the time, what watching may take.
SHARE = 0.01
#: Looks that are not counted: they import and allocate.
_WARM_UP = 2
#: Weight of a new look in the average of what looks cost.
_NEW = 0.3


class OverheadBudget:
    """The interval between looks: some powers of 2 longer where they take more than a share.

    A look may take parts of several steps: each is done within `paying`. `looked` ends it.

    Args:
        every: steps between two looks, if they are cheap.
        most: the interval grows by this factor at most: what is watched must still be seen often
            enough.
    """

    def __init__(self, every: int, *, most: int) -> None:
        self._every = every
        self._most = most
        self._factor = 1
        self._cost_s = 0.0
        self._share: float | None = None
        self._last: tuple[int, float] | None = None
        self._looks = 0

    @property
    def every(self) -> int:
        """Steps between two looks, as of now."""
        return self._every * self._factor

    def due(self, step: int) -> bool:
        """Whether this step, counted from 1, is one to look into."""
        return step % self.every == 0

    @contextlib.contextmanager
    def paying(self) -> Iterator[None]:
        """What is done here is a part of a look, or might be."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._cost_s += time.monotonic() - begun

    def looked(self, step: int) -> None:
        """A step with a look is over; sets the interval to the next one."""
        now = time.monotonic()
        cost_s, self._cost_s = self._cost_s, 0.0
        last, self._last = self._last, (step, now)
        self._looks += 1
        if last is None or self._looks <= _WARM_UP:
            return
        # The steps in between took at least this long without looks.
        step_s = max(0.0, now - last[1] - cost_s) / max(1, step - last[0])
        share = cost_s / max(1e-9, step_s * self._every)
        self._share = share if self._share is None else self._share + _NEW * (share - self._share)
        self._factor = 1
        while 2 * self._factor <= self._most and self._share > SHARE * self._factor:
            self._factor *= 2
