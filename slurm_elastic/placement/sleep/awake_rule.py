"""Nodes that shall be awake: those in use lately, and as many more as rises need (a newsvendor).

    awake = most nodes in use in the last `window` bins + r + q
    r     = the nodes by which the last two bins exceed the rest of the window, if more than q
    q     = quantile `served` of  max(0, used in a bin - most in use in the window before it)

q is learned over the last weeks. A node more costs its idle power, one less lets a job wait for a
boot; where waiting is dearer by a factor c, the best quantile is c / (1 + c). r expects a rise that
exceeds what was planned for to go on: jobs that are submitted together start within minutes. Only
the past is read, and nodes that pending jobs are known to need are added to what is in use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Bins of history below which nothing sleeps: a day of ten minutes.
LEAST_HISTORY = 144
#: Bins for which a rise is expected to go on.
_RISING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class AwakeRule:
    """The rule.

    Attributes:
        window: bins in which a node that was in use stays awake.
        served: part of the bins in which no job shall wait for a boot.
        history: latest bins that are learned from.
    """

    window: int = 12
    served: float = 0.998
    history: int = 30 * 144

    def margin(self, used: Floats) -> float:
        """Return q, from a series without gaps."""
        recent = used[-self.history :]
        if len(recent) <= self.window:
            return math.inf
        before = sliding_window_view(recent[:-1], self.window).max(axis=1)
        return float(np.quantile(np.maximum(recent[self.window :] - before, 0.0), self.served))

    def awake(
        self, used: Floats, total: int, *, needed: int = 0, margin: float | None = None
    ) -> int:
        """Return the nodes that shall be awake in the next bin.

        Args:
            used: nodes in use in each bin up to now, without gaps; too few bins: all are awake.
            total: nodes that could be.
            needed: nodes beyond those in use that pending jobs can start on at once.
            margin: q, if it is known already.
        """
        if len(used) < LEAST_HISTORY:
            return total
        margin = max(1.0, self.margin(used) if margin is None else margin)
        recent = used[-self.window :]
        rise = _rise(recent)
        expected = float(recent.max()) + (rise if rise > margin else 0.0)
        return math.ceil(min(float(total), max(expected, float(used[-1]) + needed) + margin))


def _rise(recent: Floats) -> float:
    """Return by how many nodes the latest bins exceed all bins before them."""
    before = recent[:-_RISING]
    return max(0.0, float(recent.max() - before.max())) if before.size else 0.0


def replayed(used: Floats, total: int, rule: AwakeRule, *, relearn: int = 36) -> Ints:
    """Return the nodes awake in each bin of a series; each from the bins before it.

    The margin is learned anew every `relearn` bins.
    """
    awake = np.full(len(used), total, dtype=np.int64)
    margin = math.inf
    for at in range(LEAST_HISTORY, len(used)):
        if at % relearn == 0 or math.isinf(margin):
            margin = rule.margin(used[:at])
        awake[at] = rule.awake(used[:at], total, margin=margin)
    return awake
