"""Stalls from step times: simulated ones are found, noise is not."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.profiler.profiling_plan import ONE, MissingTime, ProfiledShape
from slurm_elastic.profiler.stalls import NotMeasuredError, configurations, difference

PARTS = ("interconnect", "network", "prep", "fetch")
seconds = st.floats(0.05, 10.0)


def planted(compute, *, shapes, noise=0.0, repeats=3, seed=0):
    """Return step times of shapes: {shape: {part: seconds}}."""
    draw = random.Random(seed)
    steps = {}
    for shape, parts in {ONE: {}, **shapes}.items():
        together = compute + parts.get("interconnect", 0.0) + parts.get("network", 0.0)
        warm = together + parts.get("prep", 0.0)
        times = {"synthetic": together, "warm": warm, "cold": warm + parts.get("fetch", 0.0)}
        for block, value in times.items():
            for r in range(1, repeats + 1):
                steps[MissingTime(shape, r, block)] = value * (1 + draw.uniform(-noise, noise))
    return steps


def measured_parts(steps):
    return {(c.gpus, c.nodes): c for c in configurations(steps, gpu_type="a100", batch=8)}


@given(seconds, st.tuples(seconds, seconds, seconds, seconds))
def test_simulated_stalls_are_measured_and_add_up_to_the_step(compute, parts):
    inter, net, prep, fetch = (p if p > 0.05 * (compute + sum(parts)) else 0.0 for p in parts)
    shapes = {
        ProfiledShape(1, 4): {"interconnect": inter, "prep": prep},
        ProfiledShape(2, 4): {"interconnect": inter, "network": net, "prep": prep, "fetch": fetch},
    }
    steps = planted(compute, shapes=shapes)
    two = measured_parts(steps)[4, 2]
    assert two.compute.seconds == pytest.approx(compute)
    for part, value in zip(PARTS, (inter, net, prep, fetch), strict=True):
        assert getattr(two, part).seconds == pytest.approx(value, abs=1e-9), part
    step_s = sum(getattr(two, p).seconds for p in ("compute", *PARTS))
    assert step_s == pytest.approx(steps[MissingTime(ProfiledShape(2, 4), 1, "cold")])
    assert two.s == pytest.approx(compute / (compute + inter + net))


@given(st.integers(0, 1000), seconds)
def test_noise_alone_is_no_stall(seed, compute):
    """Three repeats with 1 % noise give differences below the floor of 2 %."""
    alone = measured_parts(
        planted(compute, shapes={ProfiledShape(1, 4): {}}, noise=0.0049, seed=seed)
    )
    for c in alone.values():
        assert [getattr(c, p).seconds for p in PARTS] == [0.0] * 4
        assert c.s == 1.0


def test_one_slow_repeat_does_not_count():
    steps = planted(1.0, shapes={ProfiledShape(1, 2): {"interconnect": 0.5}}, repeats=5)
    steps[MissingTime(ProfiledShape(1, 2), 2, "synthetic")] += 3.0  # somebody else's work
    stall = measured_parts(steps)[2, 1].interconnect
    assert stall.spread > 0.5
    assert stall.seconds in (0.0, pytest.approx(0.5))
    del steps[MissingTime(ProfiledShape(1, 2), 2, "synthetic")]
    assert measured_parts(steps)[2, 1].interconnect.seconds == pytest.approx(0.5)


def test_a_difference_within_its_error_is_none_and_one_repeat_has_an_unknown_error():
    noisy = difference({1: 1.1, 2: 1.9, 3: 1.0}, {1: 1.0, 2: 1.0, 3: 1.2})
    assert noisy.seconds == 0.0
    assert noisy.spread > 0
    single = difference({1: 1.06}, {1: 1.0})
    assert single.seconds == pytest.approx(0.06)
    assert math.isnan(single.spread)
    assert difference({1: 1.04}, {1: 1.0}).seconds == 0.0
    assert difference({1: 1.0}, {2: 1.0}) is None


def test_the_network_is_compared_with_the_same_gpus_or_part_of_one_node_of_them():
    shapes = {
        ProfiledShape(1, 2): {"interconnect": 0.2},
        ProfiledShape(1, 4): {"interconnect": 0.3},
        ProfiledShape(2, 4): {"network": 1.0},
        ProfiledShape(2, 8): {"network": 2.0},
    }
    at = measured_parts(planted(1.0, shapes=shapes))
    assert at[4, 2].network.seconds == pytest.approx(0.7)  # against 4 on one node
    assert at[8, 2].network.seconds == pytest.approx(1.7)  # against 4 on one node
    del shapes[ProfiledShape(1, 4)]
    assert measured_parts(planted(1.0, shapes=shapes))[4, 2].network.seconds == pytest.approx(0.8)
    alone = measured_parts(planted(1.0, shapes={ProfiledShape(2, 4): {"network": 1.0}}))[4, 2]
    assert alone.interconnect is None
    assert alone.network.seconds == pytest.approx(1.0)
    assert alone.s == pytest.approx(0.5)


def test_stalls_without_a_run_are_unknown():
    steps = planted(1.0, shapes={ProfiledShape(1, 2): {"prep": 0.5}})
    for key in [k for k in steps if k.block == "cold"]:
        del steps[key]
    assert measured_parts(steps)[2, 1].fetch is None
    for key in [k for k in steps if k.block == "synthetic"]:
        del steps[key]
    configuration = measured_parts(steps)[
        2, 1
    ]  # whole runs: what data cost cannot be told from computing
    assert configuration.prep is None
    assert configuration.interconnect.seconds == pytest.approx(0.5)


def test_a_run_on_one_gpu_is_required():
    steps = {MissingTime(ProfiledShape(1, 2), 1, "synthetic"): 1.0}
    with pytest.raises(NotMeasuredError, match="one GPU"):
        configurations(steps, gpu_type="", batch=1)
