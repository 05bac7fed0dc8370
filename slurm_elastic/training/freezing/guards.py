"""What keeps freezing from doing harm: when it may begin, and when all layers thaw.

Our choice of rules (docs/training.md, "Freezing"); the first two thresholds are Egeria's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: A rise of the learning rate beyond rounding.
_ROSE = 1 + 1e-9
#: Learning rate by that of the first freeze, at or below which layers thaw.
_FELL = 0.1 * (1 + 1e-9)
#: A batch that changed by this factor is another training.
_BATCH_FACTOR = 2.0
#: Weight of a new validation loss in its average.
_NEW = 0.5


class CriticalPeriod:
    """The critical period at the beginning, in which nothing is judged.

    It ends when the mean training loss of a window of steps differs from that of the window
    before by less than `settled`, relative to it.
    """

    def __init__(self, *, window: int, settled: float) -> None:
        self._window = window
        self._settled = settled
        self.reset()

    def reset(self) -> None:
        """It begins again."""
        self.over = False
        self._before: float | None = None
        self._sum = 0.0
        self._count = 0

    def see(self, loss: float) -> None:
        """The mean loss of one step."""
        if self.over:
            return
        self._sum += loss
        self._count += 1
        if self._count < self._window:
            return
        mean = self._sum / self._count
        before, self._before = self._before, mean
        self._sum, self._count = 0.0, 0
        if before is not None:
            self.over = abs(before - mean) < self._settled * abs(before)

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "over": self.over,
            "before": self._before,
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self.over, self._before = state["over"], state["before"]
        self._sum, self._count = state["sum"], state["count"]


class ThawGuard:
    """Finds reasons to thaw. Rates are those of the optimizer's groups, in their order."""

    def __init__(self, *, worse: float) -> None:
        self._worse = worse
        self._rates: list[float] = []
        self._at_freeze: list[float] = []
        self._average: float | None = None
        self._best: float | None = None

    @property
    def regressed(self) -> bool:
        """Whether the validation loss is worse than its best."""
        if self._average is None or self._best is None:
            return False
        return self._average > self._best + self._worse * abs(self._best)

    def rates(self, rates: Sequence[float]) -> str:
        """The rates of the next step; says why they call for a thaw, or nothing."""
        before, self._rates = self._rates, list(rates)
        if len(before) == len(rates):
            for old, new in zip(before, rates, strict=True):
                if new > old * _ROSE:
                    return f"the learning rate rose from {old:g} to {new:g}"
        if len(self._at_freeze) == len(rates):
            for old, new in zip(self._at_freeze, rates, strict=True):
                if new <= old * _FELL and old > 0:
                    return f"the learning rate fell from {old:g} to {new:g} since the freeze"
        return ""

    def validated(self, loss: float) -> str:
        """A new validation loss; says why it calls for a thaw, or nothing."""
        old = self._average
        self._average = loss if old is None else old + _NEW * (loss - old)
        if self._best is None or self._average < self._best:
            self._best = self._average
        if self.regressed:
            return f"the validation loss is {self._average:.4g}, it was {self._best:.4g}"
        return ""

    def frozen(self) -> None:
        """The first layers have just been frozen."""
        self._at_freeze = list(self._rates)

    def thawed(self) -> None:
        """Nothing is frozen any more."""
        self._at_freeze = []

    def state_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rates": self._rates,
            "at_freeze": self._at_freeze,
            "average": self._average,
            "best": self._best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave."""
        self._rates, self._at_freeze = list(state["rates"]), list(state["at_freeze"])
        self._average, self._best = state["average"], state["best"]


def batch_changed(before: int, now: int) -> bool:
    """Whether the global batch changed so much that what was learned of layers is void."""
    return max(before, now) >= _BATCH_FACTOR * min(before, now)
