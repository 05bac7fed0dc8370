"""Philly's nodes in use, ten minutes a bin, replayed under rules that let idle nodes sleep."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.models.demand.used_forecast import DAY, UsedForecast, without_gaps
from slurm_elastic.placement.sleep.awake_rule import AwakeRule, replayed
from slurm_elastic.placement.sleep.published_awake import (
    PUBLISHED,
    lacking,
    means_of_series,
    published_awake,
)
from tests.support import published_data

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SERIES, REFERENCE = "philly_nodes_10min.csv", "ces_reference.csv"
FILES = (SERIES, REFERENCE)
#: Bins by which the longer replay begins before the published forecast does; both end with it.
EARLIER = 17 * DAY
#: Digests of the files to which KNOWN and KNOWN_ERROR belong.
KNOWN_FILES = ("6a5cd4ddd163", "b16c3b390fd3")
#: Nodes in use per node awake in %, and lacking node-bins, of another implementation.
KNOWN = {
    "published, its forecast (sees later bins)": (90.41, 50),
    "published, last value": (94.81, 461),
    "ours": (None, None),
}
#: Mean absolute error, in nodes, of the last value as forecast of the next five hours' mean.
KNOWN_ERROR = 7.26
#: Watts of an idle node and seconds of a boot; assumptions.
IDLE_WATTS, BOOT_S, BIN_S = 500.0, 600.0, 600.0
#: Bins of the forecast: five hours.
_AHEAD = 30


@dataclass(frozen=True, eq=False)
class UsedNodes:
    """Nodes in use in each bin of ten minutes, and the published forecast of the last ones.

    Attributes:
        used: by bin; it ends with the forecast.
        total: nodes of the cluster.
        forecast: of the last bins.
        published: whether another implementation's figures belong to this series.
    """

    used: Ints
    total: int
    forecast: Floats
    published: bool


def read(folder: Path) -> UsedNodes:
    """Return the series of a folder.

    Raises:
        KeyError, ValueError: the files are not as published, or do not fit together.
    """
    with (folder / SERIES).open(encoding="utf-8") as lines:
        records = list(csv.DictReader(lines))
    with (folder / REFERENCE).open(encoding="utf-8") as lines:
        forecasts = list(csv.DictReader(lines))
    times = [r["time"] for r in records]
    if not forecasts or forecasts[0]["time"] not in times:
        raise ValueError(f"{SERIES} has no bin at the first time of {REFERENCE}")
    begin = times.index(forecasts[0]["time"])
    end = begin + len(forecasts)
    if [r["time"] for r in forecasts] != times[begin:end]:
        raise ValueError(f"{REFERENCE} has other bins than {SERIES} from {times[begin]} on")
    return UsedNodes(
        used=np.array([int(r["used"]) for r in records[:end]]),
        total=int(records[0]["total"]),
        forecast=np.array([float(r["prediction"]) for r in forecasts]),
        published=published_data.digests(folder, *FILES) == KNOWN_FILES,
    )


def figures(nodes: UsedNodes) -> dict[str, Any]:
    """Return the rows of the rules, and the errors of forecasts."""
    used, total, forecast, known = nodes.used, nodes.total, nodes.forecast, nodes.published
    series = without_gaps(used)
    begin = len(used) - len(forecast)
    first = max(0, begin - EARLIER)
    settings = PUBLISHED["philly"]
    soon, later = means_of_series(forecast, settings)
    last = used[begin:].astype(np.float64)
    our_soon, our_later = (_forecasts(series, first, ahead) for ahead in (_AHEAD, 2 * _AHEAD))
    ours = replayed(series, total, AwakeRule())
    awake = {
        "published, its forecast (sees later bins)": published_awake(
            used[begin:], soon, later, total, settings
        ),
        "published, last value": published_awake(used[begin:], last, last, total, settings),
        "published, our forecast": published_awake(
            used[begin:], our_soon[begin - first :], our_later[begin - first :], total, settings
        ),
        "ours": ours[begin:],
    }
    rows = [
        _row(name, used[begin:], a, total) | {"known": KNOWN.get(name) if known else None}
        for name, a in awake.items()
    ]
    if first < begin:
        longer_awake = published_awake(used[first:], our_soon, our_later, total, settings)
        rows.append(_row("published, our forecast", used[first:], longer_awake, total))
        rows.append(_row("ours", used[first:], ours[first:], total))
    following = np.array(
        [used[at + 1 : at + 1 + _AHEAD].mean() for at in range(begin, len(used) - 1)]
    )
    errors = {
        "last value": float(np.abs(used[begin:-1] - following).mean()),
        "ours": float(np.abs(our_soon[begin - first : -1] - following).mean()),
    }
    return {"rules": rows, "forecast_error": errors, "known_error": KNOWN_ERROR if known else None}


def _forecasts(series: Floats, begin: int, ahead: int) -> Floats:
    """Return the forecast made in each bin from `begin` on; learned anew each day."""
    forecasts = []
    for day in range(begin, len(series), DAY):
        bins = np.arange(day, min(day + DAY, len(series)))
        forecasts.append(UsedForecast.fit(series[:day], ahead=ahead).at(series, bins))
    return np.concatenate(forecasts)


def _row(name: str, used: Ints, awake: Ints, total: int) -> dict[str, Any]:
    # The published rule wakes nodes in the bin in which they lack.
    follows = name.startswith("published")
    lack = lacking(used, awake) if follows else np.maximum(used - awake, 0)
    lack[:6] = 0
    woken = np.maximum(np.diff(awake), 0)
    changes = int((np.diff(awake) != 0).sum())
    count = len(used) * BIN_S / 86400
    off = float((total - awake).mean())
    return {
        "days": round(count),
        "rule": name,
        "used_per_awake": 100 * float(np.minimum(used / np.maximum(awake, 1), 1.0).mean()),
        "lacking": int(lack.sum()),
        "lacking_bins": int((lack > 0).sum()),
        "nodes_off": off,
        "changes_per_day": changes / count,
        "boots_per_day": float(woken.sum()) / count,
        # A node that lacks in a bin, and did not in the one before, is waited for through a boot.
        "waiting_node_h": float(np.maximum(np.diff(np.r_[0, lack]), 0).sum()) * BOOT_S / 3600,
        "saved_kwh_per_day": off * 24 * IDLE_WATTS / 1000,
        "known": None,
    }


def lines(sleep: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield (
        f"{'DAYS':<4} {'RULE':<42} {'USED/AWAKE%':>11} {'KNOWN':>6} {'LACKING':>8} {'KNOWN':>6}"
        f" {'BINS':>5} {'OFF':>6} {'CHANGES/D':>9} {'BOOTS/D':>8} {'WAIT_H':>7} {'KWH/D':>6}"
    )
    for row in sleep["rules"]:
        ratio, lack = row["known"] or (None, None)
        yield (
            f"{row['days']:<4} {row['rule']:<42} {row['used_per_awake']:>11.2f} {ratio or '':>6}"
            f" {row['lacking']:>8} {lack or '':>6} {row['lacking_bins']:>5}"
            f" {row['nodes_off']:>6.1f} {row['changes_per_day']:>9.2f} {row['boots_per_day']:>8.1f}"
            f" {row['waiting_node_h']:>7.1f} {row['saved_kwh_per_day']:>6.0f}"
        )
    errors = sleep["forecast_error"]
    known = f" (known {sleep['known_error']})" if sleep["known_error"] else ""
    yield (
        "mean of the next five hours, mean absolute error in nodes:"
        f" last value {errors['last value']:.2f}{known}, ours {errors['ours']:.2f}"
    )
