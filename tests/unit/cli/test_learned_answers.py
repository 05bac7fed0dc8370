"""The goodput model of a job in `explain` and `show`."""

import json
from dataclasses import replace

import pytest

from slurm_elastic.cli import status
from slurm_elastic.cli.decisions import explain
from slurm_elastic.controller.queries import dispatch
from slurm_elastic.controller.queries.dispatch import Viewer
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from tests.support.decisions import example_round as example

NET = Application(
    name="net",
    job_class=JobClass.STRONG_SCALING,
    initial_batch=64,
    max_batch=64,
    batch=64,
    gpus=2,
    types=(
        TypeProfile("a100", least=1, most=64, single=100.0),
        TypeProfile("h100", least=1, most=64, single=200.0),
        TypeProfile("v100", least=1, most=64, single=50.0),
    ),
)
SEEN = Observation("a100", nodes=2, gpus=8, micro_batch=8, step_s=0.1, micro_step_s=0.08)


def answer(op, learned):
    records = {4711: replace(example.RECORDS[4711], learned=learned)}
    view = replace(example.PLANNED, records=records)
    body = dispatch.answer(op, view, Viewer(), {"job_ids": (4711,)}, history=[], segments=[])
    return json.loads(json.dumps(body))


def test_types_are_compared_on_as_many_gpus_as_it_holds():
    lines = explain.explained(answer("explain", Learned(NET, (SEEN,), Noise(1.0, 3.0))))
    assert (
        "  Learned:        8 a100: 640 samples/s ±4% (measured there),"
        " 8 v100: 320 samples/s ±20% (estimated); fitted to 1 shape."
    ) in lines  # there is no h100 in this cluster


def test_json():
    model = answer("show", Learned(NET, (SEEN,), Noise(1.0, 3.0)))["model"]
    assert model["noise_scale"] == 192.0
    (a100, v100) = model.pop("types")
    assert a100 == {
        "gpu_type": "a100", "gpus": 8, "nodes": 2, "goodput": pytest.approx(640.0, rel=1e-5),
        "observed": 1, "uncertainty": pytest.approx(0.04, rel=0.02),
    }  # fmt: skip
    assert [(t["gpus"], t["nodes"]) for t in model["sizes"]] == [(4, 1), (16, 4)]
    assert all(t["uncertainty"] > 0.2 for t in model["sizes"])
    assert (v100["observed"], v100["goodput"]) == (0, pytest.approx(320.0, rel=1e-5))


def test_before_any_measurement_only_ratios_are_shown():
    lines = explain.explained(answer("explain", Learned(NET)))
    expected = "nothing measured yet; expected ratio of types a100 2.0 : v100 1.0."
    assert any(expected in line for line in lines)
    assert not any("Learned" in line for line in explain.explained(answer("explain", None)))


def test_show_lists_it():
    lines = status.details(answer("show", Learned(NET, (SEEN,), Noise(1.0, 3.0))))
    expected = "   Application=net Class=strong-scaling Batch=64 NoiseScale=192 Observed=1"
    assert expected in lines
    assert "   Goodput=320samples/s GPUs=8 Type=v100 Nodes=2 Observed=0 Uncertainty=20%" in lines
    status.details(answer("show", None))
