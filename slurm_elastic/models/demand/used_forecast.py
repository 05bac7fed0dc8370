"""Forecast of the nodes in use: their mean over the next hours, from the past only.

The last value is hard to beat. Two things improve on it here (docs/sleep.md): readings that are no
demand (a monitor that fails reads 0) are left out, and a linear model with strong shrinkage adds a
part of the distance of the last value from the means before it, of the changes that followed at
this hour on earlier days, and of the time of day.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Bins of a day and of a week; a bin is ten minutes.
DAY, WEEK = 144, 1008
#: A reading below this part of the median of so many bins before is a gap.
_GAP, _GAP_BINS = 0.4, 36
#: Bins whose mean the last value is compared with; days before of which the same hours count.
_MEANS = (3, 6, 12, 36, DAY, WEEK)
_DAYS = (1, 2, 3, 7)
#: Most of a feature and of a change that is learned from, in nodes; shrinkage of the weights.
_MOST_FEATURE, _MOST_CHANGE, _SHRINKAGE = 60.0, 15.0, 3e4


def without_gaps(used: ArrayLike) -> Floats:
    """Return a series in which sudden gaps have the last value before them.

    A fall to less than two fifths of the median of the last six hours is taken for a monitor that
    failed, until the median has fallen, too. Only earlier readings decide.
    """
    raw = np.asarray(used, dtype=np.float64)
    if len(raw) < 2:
        return raw.copy()
    medians = [np.median(raw[:at]) for at in range(1, min(_GAP_BINS, len(raw)))]
    if len(raw) > _GAP_BINS:
        windows = sliding_window_view(raw[:-1], _GAP_BINS)
        medians = np.r_[medians, np.median(windows, axis=1)]
    is_gap = np.r_[False, raw[1:] < _GAP * np.asarray(medians)]
    last_good = np.maximum.accumulate(np.where(is_gap, 0, np.arange(len(raw))))
    return np.asarray(raw[last_good])


@dataclass(frozen=True, eq=False)
class UsedForecast:
    """A fitted forecast of the mean over the next `ahead` bins."""

    ahead: int
    weights: Floats

    @classmethod
    def fit(cls, series: Floats, *, ahead: int) -> UsedForecast:
        """Fit on a series without gaps; the last value is the forecast where it is too short."""
        end = len(series) - ahead
        features = _features(series, ahead)
        if end <= WEEK + len(features[0]):
            return cls(ahead, np.zeros(features.shape[1]))
        rows = np.arange(WEEK, end)
        change = _following_mean(series, ahead)[rows] - series[rows]
        change = np.clip(change, -_MOST_CHANGE, _MOST_CHANGE)
        inputs = features[rows]
        scale = inputs.std(axis=0) + 1e-9
        scaled = inputs / scale
        gram = scaled.T @ scaled + _SHRINKAGE * np.eye(scaled.shape[1])
        return cls(ahead, np.linalg.solve(gram, scaled.T @ change) / scale)

    def at(self, series: Floats, bins: Sequence[int] | Ints) -> Floats:
        """Return the forecasts made at some bins; nothing after a bin is read for its forecast."""
        rows = np.asarray(bins, dtype=np.int64)
        features = _features(series, self.ahead)[rows]
        return np.asarray(np.maximum(series[rows] + features @ self.weights, 0.0))


def _following_mean(series: Floats, ahead: int) -> Floats:
    """Return the mean of the bins that follow each one, as far as there are any."""
    sums = np.r_[0.0, np.cumsum(series)]
    begin = np.minimum(np.arange(len(series)) + 1, len(series) - 1)
    end = np.minimum(begin + ahead, len(series))
    return np.asarray((sums[end] - sums[begin]) / np.maximum(end - begin, 1))


def _features(series: Floats, ahead: int) -> Floats:
    """Return [N, F] features of each bin, from it and earlier ones."""
    at = np.arange(len(series))
    sums = np.r_[0.0, np.cumsum(series)]
    columns = []
    for bins in _MEANS:
        begin = np.maximum(at - bins + 1, 0)
        columns.append(series - (sums[at + 1] - sums[begin]) / (at + 1 - begin))
    following = _following_mean(series, ahead)
    for days in _DAYS:
        before = np.maximum(at - days * DAY, 0)
        # The bins that followed then are past, as a forecast reaches less far than a day.
        known = (at >= days * DAY) & (ahead < DAY)
        columns.append(np.where(known, following[before] - series[before], 0.0))
    hour = 2 * np.pi * (at % DAY) / DAY
    columns += [np.sin(hour), np.cos(hour), np.sin(2 * hour), np.cos(2 * hour)]
    return np.asarray(np.clip(np.array(columns).T, -_MOST_FEATURE, _MOST_FEATURE))
