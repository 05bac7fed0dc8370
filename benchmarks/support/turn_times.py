"""Times of arms that several ranks measured in turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Seconds of each arm in each turn.
TurnTimes = dict[str, list[float]]


def of_slowest_rank(results: Sequence[dict[str, Any]]) -> TurnTimes:
    """Return the times of each arm, in each turn of the rank that took longest.

    Args:
        results: of the ranks, each with its `times`.

    >>> of_slowest_rank([{"times": {"flat": [1.0, 2.0]}}, {"times": {"flat": [3.0, 1.0]}}])
    {'flat': [3.0, 2.0]}
    """
    return {
        arm: [max(turn) for turn in zip(*(r["times"][arm] for r in results), strict=True)]
        for arm in results[0]["times"]
    }
