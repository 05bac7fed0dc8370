"""Nodes that could have slept in simulations."""

import pytest

from slurm_elastic.config.schema import SleepSettings
from slurm_elastic.simulator.results import Result, RoundResult
from slurm_elastic.simulator.sleep_figures import sleep_figures

SETTINGS = SleepSettings(window_s=7200.0, spare=1, idle_watts=500.0)
DAY_S, HOUR_S = 86_400.0, 3600.0


def result(nodes_by_hour, *, nodes=10):
    """Return the result of a cluster with so many nodes in use in each hour."""
    rounds = tuple(
        RoundResult(HOUR_S * hour + 60.0 * minute, 1, (), used)
        for hour, used in enumerate(nodes_by_hour)
        for minute in range(0, 60, 5)
    )
    return Result(
        workload="w", policy="fair", cluster="c", gpus=(("a100", 8 * nodes),), nodes=nodes,
        jobs=(), rounds=rounds, segments=(), policy_s=(), cpu_s=0.0,
    )  # fmt: skip


def test_nothing_sleeps_in_the_first_day():
    figures = sleep_figures([result([2] * 24)], SETTINGS)
    assert figures == {"asleep_node_h": 0.0, "saved_kwh": 0.0, "late_nodes": 0.0}


def test_nodes_that_nobody_uses_sleep_afterwards():
    figures = sleep_figures([result([2] * 72)], SETTINGS)
    # Of ten nodes two are in use, one is awake for rises, one is spare: six sleep for two days.
    assert figures["asleep_node_h"] == pytest.approx(6 * 48, rel=0.02)
    assert figures["saved_kwh"] == pytest.approx(0.5 * figures["asleep_node_h"])
    assert figures["late_nodes"] == 0


def test_a_sudden_rise_finds_nodes_asleep():
    figures = sleep_figures([result([2] * 48 + [8] * 24)], SETTINGS)
    assert figures["late_nodes"] == 4  # in one bin: then they are awake
    assert sleep_figures([result([10] * 72)], SETTINGS)["asleep_node_h"] == 0


def test_what_stands_between_two_rounds_is_in_use():
    rounds = (RoundResult(0.0, 1, (), 8), RoundResult(3 * DAY_S, 1, (), 0))
    rare = result([2])
    figures = sleep_figures(
        [Result(**{**{f: getattr(rare, f) for f in rare.__dataclass_fields__}, "rounds": rounds})],
        SETTINGS,
    )
    assert figures["asleep_node_h"] == 0


def test_workloads_add_up():
    one = sleep_figures([result([2] * 72)], SETTINGS)
    two = sleep_figures([result([2] * 72)] * 2, SETTINGS)
    assert two["asleep_node_h"] == pytest.approx(2 * one["asleep_node_h"])
    assert sleep_figures([result([])], SETTINGS)["late_nodes"] == 0
