import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.config.schema import SpeedupSettings
from slurm_elastic.core.plan import Measurement
from slurm_elastic.models.speedup import CEILING, SpeedModel, concave_envelope

STATED = SpeedupSettings()


def seen(gpus, rate, nodes=1, gpu_type="a100", steps=50):
    return Measurement(gpu_type=gpu_type, gpus=gpus, nodes=nodes, samples_per_s=rate, steps=steps)


def test_the_stated_curve_loses_what_the_configuration_says():
    model = SpeedModel.fit(STATED, ())
    assert not model.measured
    assert model.speed("a100", 1) == 1.0
    assert model.speed("a100", 2) == pytest.approx(2 * 0.96)
    assert model.speed("a100", 8) == pytest.approx(8 * 0.96**3)
    assert model.speed("a100", 16, nodes=2) == pytest.approx(16 * 0.96**3 * 0.9)
    assert model.speed("a100", 16, nodes=2, racks=2) == pytest.approx(16 * 0.96**3 * 0.9**2)
    assert model.speed("a100", 0) == 0.0


def test_types_count_as_configured():
    model = SpeedModel.fit(SpeedupSettings(types={"a100": 2.0}), ())
    assert model.speed("a100", 4) == pytest.approx(2 * model.speed("v100", 4))


def test_one_measurement_sets_the_scale_of_all_types():
    model = SpeedModel.fit(SpeedupSettings(types={"a100": 2.0}), (seen(4, 100.0),))
    assert model.measured
    assert model.speed("a100", 4) == pytest.approx(100.0)
    assert model.speed("a100", 8) == pytest.approx(2 * 0.96 * 100.0)
    assert model.speed("v100", 4) == pytest.approx(50.0)


def test_bad_scaling_is_learnt_and_carried_over():
    stated = SpeedModel.fit(STATED, (seen(1, 10.0),))
    learnt = SpeedModel.fit(STATED, (seen(1, 10.0), seen(2, 15.0), seen(4, 22.0)))
    assert learnt.theta > 0
    assert learnt.speed("a100", 8) < 0.85 * stated.speed("a100", 8)
    assert learnt.speed("v100", 8) / learnt.speed("v100", 1) < 0.85 * 8


def test_vectors_and_single_shapes_agree():
    model = SpeedModel.fit(STATED, (seen(4, 100.0), seen(8, 150.0, 2), seen(2, 30.0, 1, "v100")))
    types, gpus, nodes = ["a100", "v100", "a100"], [8, 4, 16], [1, 1, 2]
    many = model.speeds(types, gpus, nodes)
    assert many.tolist() == pytest.approx(
        [model.speed(*shape) for shape in zip(types, gpus, nodes, strict=True)]
    )


def test_a_report_of_super_linear_scaling_is_believed_up_to_the_ceiling():
    model = SpeedModel.fit(STATED, (seen(1, 10.0), seen(8, 8000.0)))
    assert model.speed("a100", 8) == pytest.approx(8 * 10.0 * CEILING)
    assert model.speed("a100", 64, 8) <= 64 * 10.0 * CEILING * 1.001


@pytest.mark.parametrize(
    "lie",
    [
        seen(4, math.nan),
        seen(4, math.inf),
        seen(4, 0.0),
        seen(4, -3.0),
        seen(4, 1e300),
        seen(0, 10.0),
        seen(4, 10.0, nodes=5),
        seen(4, 10.0, nodes=0),
        seen(4, 10.0, steps=0),
    ],
)
def test_reports_that_cannot_be_are_left_out(lie):
    honest = seen(2, 20.0)
    assert SpeedModel.fit(STATED, (honest, lie)) is SpeedModel.fit(STATED, (honest,))


shapes = st.builds(
    lambda nodes, each, rate: seen(nodes * each, rate * nodes * each, nodes),
    st.integers(1, 16),
    st.integers(1, 8),
    st.floats(1.0, 1.05),
)


@given(st.lists(shapes, max_size=6, unique_by=lambda m: (m.gpus, m.nodes)))
def test_it_is_exact_where_it_was_measured(measurements):
    model = SpeedModel.fit(STATED, tuple(measurements))
    for m in measurements:
        assert model.speed("a100", m.gpus, m.nodes) == pytest.approx(m.samples_per_s, rel=1e-6)


@given(st.floats(0, 0.99), st.floats(0, 0.99), st.integers(1, 8))
def test_on_given_nodes_the_stated_curve_rises_and_is_concave(inside, across, nodes):
    model = SpeedModel.fit(SpeedupSettings(loss_in_node=inside, loss_across_nodes=across), ())
    speeds = model.speeds("a100", np.arange(1, 9) * nodes, nodes)
    steps = np.diff(speeds)
    assert (steps >= -1e-9).all()
    assert (np.diff(steps) <= 1e-9).all()


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=5))
def test_false_reports_do_not_break_the_model(rates):
    lies = tuple(seen(2**i, rate) for i, rate in enumerate(rates))
    model = SpeedModel.fit(STATED, lies)
    gpus = np.arange(1, 257)
    speeds = model.speeds("a100", gpus, np.ceil(gpus / 8))
    assert np.isfinite(speeds).all()
    assert (speeds > 0).all()
    assert (speeds <= CEILING**2 * gpus * max(speeds[0], rates[0])).all()


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40))
def test_the_envelope_is_concave_and_above_all_points(values):
    x = np.arange(1.0, len(values) + 1)
    y = np.array(values)
    kept = concave_envelope(x, y)
    assert kept[0] == 0
    assert y[kept[-1]] == y.max()
    slopes = np.diff(y[kept]) / np.diff(x[kept])
    assert (np.diff(slopes) <= 1e-9 * (1 + np.abs(slopes[:-1]))).all()
    line = np.interp(x, x[kept], y[kept])
    assert (line >= y - 1e-6).all()
