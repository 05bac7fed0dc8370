"""Nodes awake by the published rule of CES (Helios, SC'21), from a given forecast.

Nodes are switched on only when they lack, and off when the number in use has fallen and is
forecast to stay low. Thresholds are those of each cluster of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Bins at the beginning in which the rule only follows.
_FIRST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class CesSettings:
    """Thresholds of one cluster, in nodes and bins of ten minutes.

    Attributes:
        history, future: bins before and after one of which the means are compared with it.
        fallen, falls: least fall against the history, and forecast.
        least: fewest nodes that are switched off at once.
        buffer: nodes awake beyond those in use after each change.
        keep: bins after a lack in which nothing is switched off.
        first_hold: bin before which nothing is switched off.
    """

    history: int
    future: int
    fallen: float
    falls: float
    least: int
    buffer: int
    keep: int
    first_hold: int = 0


PUBLISHED = {
    "venus": CesSettings(history=3, future=18, fallen=0.5, falls=1, least=2, buffer=5, keep=12),
    "earth": CesSettings(
        history=6, future=18, fallen=1, falls=1, least=5, buffer=5, keep=12, first_hold=1
    ),
    "saturn": CesSettings(history=6, future=18, fallen=1, falls=1, least=1, buffer=5, keep=12),
    "uranus": CesSettings(
        history=3, future=18, fallen=1, falls=1, least=1, buffer=7, keep=12, first_hold=1
    ),
    "philly": CesSettings(history=2, future=30, fallen=0.1, falls=0, least=1, buffer=20, keep=10),
}


def means_of_series(forecast: Floats, settings: CesSettings) -> tuple[Floats, Floats]:
    """Return for each bin the mean forecast of the next `future` bins, and of twice as many.

    As published, the forecast is one series, known from the first bin on.
    """
    sums = np.r_[0.0, np.cumsum(forecast)]
    begin = np.arange(len(forecast))
    means = []
    for bins in (settings.future, 2 * settings.future):
        end = np.minimum(begin + bins, len(forecast))
        means.append((sums[end] - sums[begin]) / (end - begin))
    return means[0], means[1]


def published_awake(
    used: Ints, soon: Floats, later: Floats, total: int, settings: CesSettings
) -> Ints:
    """Return the nodes awake in each bin.

    Args:
        used: nodes in use in each bin.
        soon: mean of the forecast that is made in each bin, over the next `future` bins.
        later: the same over twice as many.
        total: nodes of the cluster.
        settings: thresholds.
    """
    s = settings
    awake = np.zeros(len(used), dtype=np.int64)
    hold = s.first_hold
    for at in range(len(used)):
        now = int(used[at])
        if at < _FIRST:
            awake[at] = now + s.buffer
            continue
        count = int(awake[at - 1])
        if count < now:
            count, hold = now + s.buffer, at + s.keep
        count = min(count, total)
        fell = used[at - s.history : at].mean() - now >= s.fallen
        if fell and now - soon[at] >= s.falls and at >= hold:
            hold = at
            if soon[at] >= later[at] and count - (now + s.buffer) >= s.least:
                count = now + s.buffer
        awake[at] = count
    return awake


def lacking(used: Ints, awake: Ints) -> Ints:
    """Return the nodes that lacked in each bin: in use now, and not awake in the bin before."""
    before = np.r_[awake[:1], awake[:-1]]
    return np.asarray(np.maximum(used - before, 0) * (np.arange(len(used)) >= _FIRST))
