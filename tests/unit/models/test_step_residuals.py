"""Residuals over the seven-parameter fit."""

import dataclasses

import numpy as np
import pytest

from slurm_elastic.core.application import Application, Learned, Noise, Observation, TypeProfile
from slurm_elastic.models import throughput
from slurm_elastic.models.goodput import GoodputModel
from slurm_elastic.models.step_residuals import corrected

#: Seconds of a step and of a micro-step that no seven parameters explain: two GPUs are slow.
SEEN = tuple(
    Observation("t4", nodes, gpus, m, step * m / 8, 0.2 * m / 8)
    for nodes, gpus, step in ((1, 1, 0.2), (1, 2, 0.32), (1, 4, 0.25), (2, 8, 0.26))
    for m in (8, 16, 32)
)
NET = Application(
    name="net",
    initial_batch=8,
    max_batch=512,
    batch=8,
    types=(TypeProfile("t4", least=1, most=64, single=40.0),),
)


def error(model):
    predicted = [float(model.iteration_time(o.nodes, o.gpus, o.micro_batch)) for o in SEEN]
    return max(abs(np.log(p / o.step_s)) for p, o in zip(predicted, SEEN, strict=True))


def test_it_meets_measurements_that_the_fit_misses():
    assert error(throughput.fit(SEEN)) > 0.1
    assert error(corrected(SEEN)) < 0.03


def test_far_from_all_measurements_the_fit_alone_counts():
    model = corrected(SEEN)
    step, micro = model.corrections(64, 512, 8)
    assert float(step) == pytest.approx(1.0, abs=1e-6)
    assert float(micro) == pytest.approx(1.0, abs=1e-6)


def test_one_call_for_many_shapes_is_equal_to_a_call_for_each():
    model = corrected(SEEN)
    nodes, replicas = np.array([[1], [1], [2]]), np.array([[2], [3], [12]])
    micro, accumulation = np.array([[4, 8, 50]] * 3), np.array([[0, 1, 3]] * 3)
    together = model.iteration_time(nodes, replicas, micro, accumulation)
    for i in range(3):
        for k in range(3):
            alone = model.iteration_time(
                int(nodes[i, 0]), int(replicas[i, 0]), int(micro[i, k]), int(accumulation[i, k])
            )
            assert together[i, k] == pytest.approx(float(alone), rel=1e-12)


def test_no_measurement_moves_a_prediction_by_more_than_a_factor_of_two():
    absurd = (*SEEN, Observation("t4", 1, 4, 64, 900.0, 800.0))
    step, micro = corrected(absurd).corrections(1, [1, 2, 4, 8], 64)
    factors = np.concatenate([step, micro])
    assert factors.max() <= 2.0 + 1e-12
    assert factors.min() >= 0.5 - 1e-12


def test_goodput_models_use_them_only_where_that_is_asked_for():
    plain = Learned(NET, SEEN, Noise(1.0, 100.0))
    residual = dataclasses.replace(plain, residuals=True)
    sizes = ("t4", 1, [1, 2, 4])
    without, with_residuals = (
        GoodputModel.of(learned).goodputs(*sizes) for learned in (plain, residual)
    )
    assert without[1] / without[2] > with_residuals[1] / with_residuals[2]
    assert GoodputModel.of(plain) is GoodputModel.of(plain)


def test_a_point_beside_others_of_its_shape_keeps_the_fit():
    model = corrected(SEEN)
    more = corrected((*SEEN, Observation("t4", 1, 4, 17, 0.54, 0.43)))
    assert more.fit is model.fit
    assert len(more.points) == len(model.points) + 1
