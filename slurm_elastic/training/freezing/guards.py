"""Safeguards of freezing: when it may begin, and when all layers thaw.

Our choice of rules (docs/training-freezing.md); the first two thresholds are Egeria's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: A rise of the learning rate beyond rounding.
_ROSE = 1 + 1e-9
#: Fraction of the learning rate at the first freeze, at or below which layers thaw.
_FELL = 0.1 * (1 + 1e-9)
#: Layers thaw when the batch changes by this factor.
_BATCH_FACTOR = 2.0
#: Weight of a new validation loss in its average.
_NEW = 0.5


class CriticalPeriod:
    """Critical period at the beginning, in which no layer is checked.

    It ends when the mean training loss of a window of steps differs from that of the window
    before by less than `settled`, relative to it.
    """

    def __init__(self, *, window: int, settled: float) -> None:
        self._window = window
        self._settled = settled
        self.reset()

    def reset(self) -> None:
        """Begin the period again."""
        self.over = False
        self._former_mean: float | None = None
        self._sum = 0.0
        self._count = 0

    def observe(self, loss: float) -> None:
        """Add the mean loss of one step."""
        if self.over:
            return
        self._sum += loss
        self._count += 1
        if self._count < self._window:
            return
        mean = self._sum / self._count
        former_mean, self._former_mean = self._former_mean, mean
        self._sum, self._count = 0.0, 0
        if former_mean is not None:
            self.over = abs(former_mean - mean) < self._settled * abs(former_mean)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "over": self.over,
            "before": self._former_mean,
            "sum": self._sum,
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.over, self._former_mean = state["over"], state["before"]
        self._sum, self._count = state["sum"], state["count"]


class ThawGuard:
    """Reasons to thaw: learning rates of the optimizer's groups, and validation losses."""

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

    def check_rates(self, rates: Sequence[float]) -> str:
        """Return a reason to thaw in the rates of the next step, or ""."""
        former_rates, self._rates = self._rates, list(rates)
        if len(former_rates) == len(rates):
            for old, new in zip(former_rates, rates, strict=True):
                if new > old * _ROSE:
                    return f"the learning rate rose from {old:g} to {new:g}"
        if len(self._at_freeze) == len(rates):
            for old, new in zip(self._at_freeze, rates, strict=True):
                if new <= old * _FELL and old > 0:
                    return f"the learning rate fell from {old:g} to {new:g} since the freeze"
        return ""

    def check_validation(self, loss: float) -> str:
        """Return a reason to thaw in a new validation loss, or ""."""
        old = self._average
        self._average = loss if old is None else old + _NEW * (loss - old)
        if self._best is None or self._average < self._best:
            self._best = self._average
        if self.regressed:
            return f"the validation loss is {self._average:.4g}, it was {self._best:.4g}"
        return ""

    def frozen(self) -> None:
        """Store the rates at which the first layers are frozen."""
        self._at_freeze = list(self._rates)

    def thawed(self) -> None:
        """Discard the rates of the first freeze."""
        self._at_freeze = []

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {
            "rates": self._rates,
            "at_freeze": self._at_freeze,
            "average": self._average,
            "best": self._best,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self._rates, self._at_freeze = list(state["rates"]), list(state["at_freeze"])
        self._average, self._best = state["average"], state["best"]


def batch_changed(old: int, new: int) -> bool:
    """Return whether the global batch changed so much that all layers have to thaw."""
    return max(old, new) >= _BATCH_FACTOR * min(old, new)
