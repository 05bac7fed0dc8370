"""Advice on a time limit, from the predicted run time."""

from __future__ import annotations

import math

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate

#: The advised limit: this quantile, times a margin, in steps of so many seconds; our choice.
_LEVEL, _MARGIN, _STEP_S = 0.95, 1.2, 300.0
#: Fewest past jobs of the same or a similar name.
_LEAST_JOBS = 5


def advised_limit_s(estimate: DurationEstimate) -> float | None:
    """Return a time limit that such jobs rarely exceed; None: too little is known.

    >>> estimate = DurationEstimate.of_sample([3600.0] * 8, basis="same-name", jobs=8)
    >>> advised_limit_s(estimate)
    4500.0
    """
    if estimate.basis not in ("same-name", "similar-name") or estimate.jobs < _LEAST_JOBS:
        return None
    return _STEP_S * math.ceil(estimate.quantile(_LEVEL) * _MARGIN / _STEP_S - 1e-9)
