"""The published rule: exactly the reference's nodes awake, from the same forecast."""

import csv

import numpy as np

from slurm_elastic.placement.sleep.published_awake import (
    PUBLISHED,
    lacking,
    means_of_series,
    published_awake,
)
from tests.support import published_data

REFERENCE = "ces_reference.csv"


def awake_nodes(used, forecast, total, settings):
    return published_awake(used, *means_of_series(forecast, settings), total, settings)


def test_awake_nodes_of_the_reference():
    folder = published_data.require("helios", REFERENCE)
    with (folder / REFERENCE).open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    used = np.array([int(r["used"]) for r in rows])
    forecast = np.array([float(r["prediction"]) for r in rows])
    awake = awake_nodes(used, forecast, int(rows[0]["total"]), PUBLISHED["philly"])
    assert awake.tolist() == [int(r["awake"]) for r in rows]
    lack = lacking(used, awake)
    assert (lack.sum(), (lack > 0).sum()) == (50, 7)


def test_nothing_is_switched_off_while_more_is_forecast():
    used = np.r_[np.full(10, 100), np.full(30, 60)]
    settings = PUBLISHED["venus"]
    rises = np.r_[np.full(20, 55.0), np.full(20, 90.0)]
    assert awake_nodes(used, rises, 200, settings)[14] == 105
    assert awake_nodes(used, np.full(40, 55.0), 200, settings)[14] == 65


def test_a_lack_wakes_nodes_with_a_buffer_up_to_all():
    used = np.r_[np.full(10, 50), np.full(5, 98)]
    awake = awake_nodes(used, used.astype(float), 100, PUBLISHED["venus"])
    assert (awake[9], awake[10]) == (55, 100)
    assert lacking(used, awake).tolist()[10] == 43
