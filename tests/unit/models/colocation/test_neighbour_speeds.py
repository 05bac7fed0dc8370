"""Neighbours by node type: evidence of a pair outweighs the model."""

import pytest

from slurm_elastic.models.colocation.neighbour_speeds import NeighbourSpeeds
from slurm_elastic.models.colocation.slowdown_model import AloneLoad, SharedRun, SlowdownModel

A = AloneLoad(application="a", compute=0.2, memory_bus=0.1)
B = AloneLoad(application="b", compute=0.3, memory_bus=0.1)


def test_two_measurements_of_a_pair_outweigh_the_model():
    speeds = NeighbourSpeeds()
    model = float(SlowdownModel.prior().speeds([(A, B)])[0])
    unknown = speeds.of("v100", A, B)
    assert (unknown.speed, unknown.measured) == (model, 0)
    speeds.add("v100", [SharedRun(job=A, other=B, speed=0.5)] * 2)
    known = speeds.of("v100", A, B)
    assert known.measured == 2
    assert abs(known.speed - 0.5) < abs(known.speed - model)
    assert known.error < unknown.error
    assert known.surely < known.speed


def test_other_pairs_and_other_node_types_keep_to_their_models():
    speeds = NeighbourSpeeds()
    speeds.add("v100", [SharedRun(job=A, other=B, speed=0.5)])
    assert speeds.of("v100", B, A).measured == 0
    assert speeds.of("a100", A, B) == NeighbourSpeeds().of("a100", A, B)


def load(name, compute):
    return AloneLoad(application=name, compute=compute, memory_bus=0.0)


def test_a_neutral_predictor_knows_nothing_of_pairs_that_never_met():
    speeds = NeighbourSpeeds(neutral=True)
    full = [load(name, 1.0) for name in "ab"]
    assert speeds.of("n", *full).speed == 1.0
    assert not speeds.of("n", *full).modelled
    # However often one pair is measured, it says little about others.
    speeds.add("n", [SharedRun(job=full[0], other=full[1], speed=0.5)] * 40)
    assert speeds.of("n", *full).speed < 0.55
    assert not speeds.of("n", full[1], load("c", 1.0)).modelled


def test_a_neutral_predictor_predicts_others_once_it_has_seen_several_applications():
    speeds = NeighbourSpeeds(neutral=True, boosted=False)
    loads = {"a": 0.9, "b": 0.8, "c": 0.3, "d": 0.2, "e": 0.6}
    runs = [
        SharedRun(job=load(a, u), other=load(b, v), speed=1 - 0.5 * max(0.0, u + v - 1))
        for a, u in loads.items()
        for b, v in loads.items()
        if a != b
    ]
    speeds.add("n", runs * 2)
    heavy = speeds.of("n", load("x", 0.9), load("y", 0.9))
    light = speeds.of("n", load("x", 0.1), load("y", 0.3))
    assert heavy.modelled
    assert heavy.measured == 0
    assert heavy.speed == pytest.approx(0.6, abs=0.05)
    assert light.speed == pytest.approx(1.0, abs=0.05)
    unknown = AloneLoad(application="z", compute=0.0, memory_bus=0.0, known=False)
    assert not speeds.of("n", load("x", 0.9), unknown).modelled
