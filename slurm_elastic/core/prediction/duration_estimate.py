"""Distribution of a job's run time, as quantiles.

>>> estimate = DurationEstimate.of_sample([60.0, 600.0, 600.0, 3600.0])
>>> round(estimate.median), round(estimate.quantile(0.9)) > 3000
(600, True)

A job that runs already has outlived a part of the distribution; what is left is its rest:

>>> estimate.given(1200.0).median > estimate.median
True
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

#: Quantiles that an estimate holds.
LEVELS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
#: Share of jobs above the last level. There the chance to outlive a time is inverse to it, so that
#: a job which has run longer than all that is known is expected to run as long again.
_TAIL = 1.0 - LEVELS[-1]
_LEAST_S = 1.0
#: Estimates end here: a century.
_MOST_S = 3.2e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DurationEstimate:
    """Run time of a job on the GPUs that it asks for.

    Attributes:
        seconds: quantiles at `LEVELS`, ascending, from 1 s on.
        basis: what it follows from, one of `same-name`, `similar-name`, `user`, `shape`, `all`.
        jobs: number of past jobs of that kind.
    """

    seconds: tuple[float, ...]
    basis: str = "all"
    jobs: int = 0

    def __post_init__(self) -> None:
        """Check that the quantiles ascend."""
        ascending = all(a <= b for a, b in zip(self.seconds, self.seconds[1:], strict=False))
        if len(self.seconds) != len(LEVELS) or not ascending or not self.seconds[0] > 0:
            raise ValueError(f"quantiles {self.seconds} are invalid: expected {len(LEVELS)}")

    @classmethod
    def of_sample(
        cls,
        seconds: Sequence[float],
        weights: Sequence[float] | None = None,
        *,
        basis: str = "all",
        jobs: int = 0,
    ) -> DurationEstimate:
        """Return the estimate of a weighted sample, interpolated between its logarithms.

        Raises:
            ValueError: it is empty.
        """
        if not seconds:
            raise ValueError("the sample is empty: expected at least one run time")
        pairs = sorted(zip(seconds, weights or [1.0] * len(seconds), strict=True))
        total = sum(weight for _, weight in pairs)
        positions, logs, passed = [], [], 0.0
        for value, weight in pairs:
            positions.append((passed + weight / 2) / total)
            logs.append(math.log(min(max(value, _LEAST_S), _MOST_S)))
            passed += weight
        values = (math.exp(_interpolated(level, positions, logs)) for level in LEVELS)
        # Rounding of the interpolation may put equal quantiles out of order.
        return cls(seconds=tuple(accumulate(values, max)), basis=basis, jobs=jobs)

    @property
    def median(self) -> float:
        """Run time that half of such jobs exceed."""
        return self.quantile(0.5)

    @property
    def mean(self) -> float:
        """Expected run time, without the longest 5 %, whose length is not known."""
        values = (self.seconds[0], *self.seconds)
        levels = (0.0, *LEVELS)
        area = sum(
            (b - a) * (v + w) / 2
            for a, b, v, w in zip(levels, levels[1:], values, values[1:], strict=False)
        )
        return area / LEVELS[-1]

    def quantile(self, level: float) -> float:
        """Return the run time that a fraction `1 - level` of such jobs exceeds."""
        if level > LEVELS[-1]:
            # S(x) = TAIL x_last / x
            return min(_MOST_S, self.seconds[-1] * _TAIL / max(1.0 - level, 1e-12))
        logs = [math.log(value) for value in self.seconds]
        return math.exp(_interpolated(level, LEVELS, logs))

    def exceeded(self, seconds: float) -> float:
        """Return the fraction of such jobs that run for longer."""
        if seconds >= self.seconds[-1]:
            return _TAIL * self.seconds[-1] / seconds
        if seconds <= self.seconds[0]:
            # Below the first level the fraction falls in proportion to the time.
            return 1.0 - LEVELS[0] * max(0.0, seconds) / self.seconds[0]
        at = bisect_left(self.seconds, seconds)
        low, high = math.log(self.seconds[at - 1]), math.log(self.seconds[at])
        part = 1.0 if high <= low else (math.log(seconds) - low) / (high - low)
        return 1.0 - (LEVELS[at - 1] + part * (LEVELS[at] - LEVELS[at - 1]))

    def given(self, age_s: float) -> DurationEstimate:
        """Return the run time of such jobs that have run for `age_s` already."""
        if age_s <= 0:
            return self
        left = self.exceeded(age_s)
        values = (self.quantile(1.0 - left * (1.0 - level)) for level in LEVELS)
        ascending = tuple(accumulate(values, max, initial=age_s))[1:]
        return DurationEstimate(seconds=ascending, basis=self.basis, jobs=self.jobs)

    def scaled(self, factor: float) -> DurationEstimate:
        """Return the estimate with all run times multiplied."""
        values = (min(max(s * factor, _LEAST_S), _MOST_S) for s in self.seconds)
        return DurationEstimate(seconds=tuple(values), basis=self.basis, jobs=self.jobs)


def _interpolated(level: float, levels: Sequence[float], values: Sequence[float]) -> float:
    """Return the value at a level; outside the known levels the nearest one."""
    at = bisect_left(levels, level)
    if at == 0:
        return values[0]
    if at == len(levels):
        return values[-1]
    part = (level - levels[at - 1]) / (levels[at] - levels[at - 1])
    return values[at - 1] + part * (values[at] - values[at - 1])
