"""Forecast of nodes in use: only the past counts, gaps are no demand."""

import numpy as np
import pytest

from slurm_elastic.models.demand.used_forecast import DAY, UsedForecast, without_gaps


def days(count, *, seed=0):
    """Return a series with a daily rhythm and noise."""
    at = np.arange(count * DAY)
    noise = np.random.default_rng(seed).normal(scale=2.0, size=len(at))
    return np.round(100 + 40 * np.sin(2 * np.pi * at / DAY) + noise)


def test_a_monitor_that_fails_is_no_idle_cluster():
    used = np.r_[np.full(40, 200.0), np.zeros(5), np.full(5, 210.0)]
    assert without_gaps(used).tolist() == [200.0] * 45 + [210.0] * 5
    fallen = without_gaps(np.r_[np.full(40, 200.0), np.full(60, 20.0)])
    assert fallen[-1] == 20.0


def test_a_daily_rhythm_is_better_than_the_last_value():
    series = days(28)
    cut = 21 * DAY
    forecast = UsedForecast.fit(series[:cut], ahead=30)
    bins = np.arange(cut, len(series) - 31)
    truth = np.array([series[b + 1 : b + 31].mean() for b in bins])
    error = np.abs(forecast.at(series, bins) - truth).mean()
    assert error < 0.9 * np.abs(series[bins] - truth).mean()


def test_what_comes_later_changes_no_forecast():
    series = days(14)
    at = 10 * DAY
    forecast = UsedForecast.fit(series[:at], ahead=30)
    other = series.copy()
    other[at + 1 :] = 0.0
    assert forecast.at(series, [at]) == pytest.approx(forecast.at(other, [at]))
    assert forecast.at(series[: at + 1], [at]) == pytest.approx(forecast.at(series, [at]))


def test_with_little_history_the_last_value_is_the_forecast():
    series = days(3)
    assert UsedForecast.fit(series, ahead=30).at(series, [400])[0] == series[400]
