"""The seven-parameter model and its fit."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.application import Observation
from slurm_elastic.models import fitting, throughput
from slurm_elastic.models.throughput import ThroughputParameters, fit, objective

THETA = ThroughputParameters(
    alpha_c=0.1, beta_c=0.01, alpha_n=0.2, beta_n=0.02, alpha_r=0.05, beta_r=0.005, gamma=2.0
)
SHAPES = [(1, 1), (1, 2), (1, 4), (2, 8), (4, 16)]


def seen(nodes=1, gpus=1, micro_batch=8, step_s=0.2, micro_step_s=0.19, gpu_type="t4"):
    return Observation(gpu_type, nodes, gpus, micro_batch, step_s, micro_step_s)


def measured(theta, shapes=SHAPES, batches=(8, 32)):
    return tuple(
        seen(n, r, m, float(theta.step_time(n, r, m)), float(theta.accumulation_time(m)))
        for n, r in shapes
        for m in batches
    )


def test_times_follow_the_formula():
    assert THETA.accumulation_time(8) == pytest.approx(0.18)
    assert THETA.step_time(1, 1, 8) == pytest.approx(0.18)
    assert THETA.step_time(1, 2, 8) == pytest.approx(math.hypot(0.18, 0.05))
    assert THETA.step_time(1, 4, 8) == pytest.approx(math.hypot(0.18, 0.05 + 2 * 0.005))
    assert THETA.step_time(2, 4, 8) == pytest.approx(math.hypot(0.18, 0.2 + 2 * 0.02))
    assert THETA.throughput(2, 4, 8, 3) == pytest.approx(
        4 * 8 * 4 / (3 * 0.18 + math.hypot(0.18, 0.24))
    )


def test_without_overlap_communication_is_added():
    plain = dataclasses.replace(THETA, gamma=1.0)
    assert plain.step_time(1, 2, 8) == pytest.approx(0.18 + 0.05)


def test_arguments_broadcast():
    rates = THETA.throughput([[1], [2]], [[2], [8]], [8, 16, 32])
    assert rates.shape == (2, 3)
    assert rates[1, 2] == THETA.throughput(2, 8, 32)


def test_high_powers_do_not_overflow():
    huge = dataclasses.replace(THETA, alpha_c=1e200, alpha_r=1e-100, gamma=10.0)
    assert huge.step_time(1, 2, 8) == pytest.approx(1e200)


def test_exact_measurements_are_explained():
    points = measured(THETA)
    found = fit(points)
    assert objective(found, points) <= objective(THETA, points) + 1e-4
    predicted = [float(found.step_time(o.nodes, o.gpus, o.micro_batch)) for o in points]
    assert predicted == pytest.approx([o.step_s for o in points], rel=0.02)


def test_one_measurement_predicts_itself_and_scales():
    found = fit((seen(step_s=0.2, micro_step_s=0.19),))
    assert found.step_time(1, 1, 8) == pytest.approx(0.2)
    assert found.alpha_c == pytest.approx(0.19 / 2)
    rates = found.throughput([1, 1, 2, 4], [1, 4, 8, 16], 8)
    assert rates == pytest.approx(rates[0] * np.array([1, 4, 8, 16]), rel=1e-5)


def test_across_nodes_is_taken_a_little_slower_until_measured():
    found = fit(measured(THETA, shapes=[(1, 1), (1, 2), (1, 4)]))
    assert found.alpha_n == pytest.approx(1.1 * found.alpha_r)
    assert found.beta_n == pytest.approx(1.1 * found.beta_r)


def test_beta_needs_three_replicas():
    found = fit(measured(THETA, shapes=[(1, 1), (1, 2)]))
    assert found.beta_r == pytest.approx(1e-8)


def test_no_overlap_means_gamma_one():
    found = fit(measured(THETA), overlap=False)
    assert found.gamma == 1.0
    assert fit(measured(THETA), overlap=False, compat=True).gamma == 1.0


def test_units_count_replicas():
    single = measured(THETA)
    grouped = tuple(dataclasses.replace(o, gpus=4 * o.gpus) for o in single)
    assert fit(grouped, unit=4) == fit(single)


def test_of_equal_configurations_the_first_counts():
    first = seen(step_s=0.2)
    assert fit((first, seen(step_s=0.4))) == fit((first,))


def test_equal_measurements_are_fitted_once():
    assert fit(measured(THETA)) is fit(measured(THETA))


def test_the_fit_is_no_worse_than_the_published_search():
    # Communication hidden at small batches only: the published search stops early here.
    theta = dataclasses.replace(THETA, alpha_n=0.6, gamma=5.0)
    points = measured(theta, batches=(8, 32, 64))
    better, published = fit(points), fit(points, compat=True)
    assert objective(better, points) <= objective(published, points) + 1e-6


@pytest.mark.parametrize("exchange_s", [None, 0.4])
def test_gradient_is_analytic(exchange_s):
    seen = [dataclasses.replace(o, exchange_s=exchange_s) for o in measured(THETA)]
    points = throughput._points(tuple(seen), 1)
    evaluate = fitting.objective(points)
    theta = [0.12, 0.008, 0.3, 0.03, 0.04, 0.006, 1.7]
    _, gradient = evaluate(theta)
    for i in range(7):
        step = 1e-6 * theta[i]
        above, below = list(theta), list(theta)
        above[i] += step
        below[i] -= step
        numeric = (evaluate(above)[0] - evaluate(below)[0]) / (2 * step)
        assert gradient[i] == pytest.approx(numeric, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("step_s", math.nan),
        ("step_s", 0.0),
        ("micro_step_s", -1.0),
        ("micro_step_s", math.inf),
        ("nodes", 0),
        ("gpus", 0),
        ("micro_batch", 0),
        ("micro_batch", 1.5),
    ],
)
def test_impossible_measurements_are_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"t4: {field}="):
        fit((dataclasses.replace(seen(), **{field: value}),))


def test_broken_replicas_are_refused():
    with pytest.raises(ValueError, match="gpus=6 is not a multiple of the 4 GPUs"):
        fit((seen(gpus=6),), unit=4)


def test_nothing_and_mixtures_are_refused():
    with pytest.raises(ValueError, match="no observations"):
        fit(())
    with pytest.raises(ValueError, match=r"several GPU types \(a100, t4\)"):
        fit((seen(), seen(gpu_type="a100")))


seconds = st.floats(1e-4, 1e3)
points = st.lists(
    st.builds(
        seen,
        nodes=st.just(1),
        gpus=st.sampled_from([1, 2, 4, 8]),
        micro_batch=st.integers(1, 512),
        step_s=seconds,
        micro_step_s=seconds,
    )
    | st.builds(
        seen,
        nodes=st.integers(2, 4),
        gpus=st.sampled_from([8, 16, 32]),
        micro_batch=st.integers(1, 512),
        step_s=seconds,
        micro_step_s=seconds,
    ),
    min_size=1,
    max_size=8,
).map(tuple)


@settings(max_examples=150)
@given(points)
def test_any_measurements_give_a_sane_model(observations):
    found = fit(observations)
    values = dataclasses.astuple(found)
    assert all(math.isfinite(v) and v > 0 for v in values)
    assert 1.0 <= found.gamma <= 10.0
    batches = np.array([1, 4, 64, 4096])
    times = found.step_time(
        np.array([[1], [1], [2], [8]]), np.array([[1], [4], [8], [64]]), batches
    )
    assert np.isfinite(times).all()
    assert (times > 0).all()
    assert (np.diff(times, axis=1) >= 0).all(), "a larger micro-batch never takes less time"
    inside = found.step_time(1, np.arange(2, 9), 8)
    assert (np.diff(inside) >= 0).all(), "a step never gets faster with more replicas on a node"


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from(SHAPES), st.sampled_from([4, 16, 64]), st.floats(0.95, 1.05)),
        min_size=2,
        max_size=8,
        unique_by=lambda row: row[:2],
    ),
    st.floats(0.01, 1.0),
    st.floats(1.0, 8.0),
)
def test_noisy_measurements_are_explained_no_worse_than_published(rows, alpha_n, gamma):
    truth = dataclasses.replace(THETA, alpha_n=alpha_n, gamma=gamma)
    observations = tuple(
        seen(
            *shape,
            m,
            noise * float(truth.step_time(*shape, m)),
            float(truth.accumulation_time(m)) / noise,
        )
        for shape, m, noise in rows
    )
    best, published = fit(observations), fit(observations, compat=True)
    # Both may stop in a local minimum: of 10,000 such problems ours was above by 0.01 at most.
    assert objective(best, observations) <= objective(published, observations) + 2e-2


@settings(max_examples=40)
@given(
    st.sampled_from([((1, 2),), ((1, 1), (1, 2)), ((1, 2), (2, 4))]),
    st.floats(0.05, 0.6),
    st.floats(1.5, 10.0),
)
def test_the_exchange_alone_tells_how_much_of_it_is_hidden(shapes, alpha_r, gamma):
    """Measured at two batches, steps at others: those of a hidden exchange look like none."""
    truth = dataclasses.replace(
        THETA, alpha_c=0.02, alpha_r=alpha_r, alpha_n=1.3 * alpha_r, beta_n=1e-8, gamma=gamma
    )
    points = measured(truth, shapes=shapes, batches=(32, 64))
    told = tuple(
        dataclasses.replace(o, exchange_s=float(truth.network_time(o.nodes, o.gpus)))
        for o in points
    )

    def error(found):
        n, r = np.array(shapes)[:, :, None].transpose(1, 0, 2)
        m = np.array([[4, 8, 16, 128, 256]])
        return float(np.abs(np.log(found.step_time(n, r, m) / truth.step_time(n, r, m))).mean())

    assert error(fit(told)) <= 0.1
    assert error(fit(told)) <= error(fit(points)) + 0.08, "both nearly 0 if little is exchanged"


def test_an_exchange_of_which_more_than_all_is_exposed_is_not_hidden():
    seen = measured(dataclasses.replace(THETA, gamma=1.0))
    found = fit(tuple(dataclasses.replace(o, exchange_s=0.01) for o in seen))
    assert found.gamma == pytest.approx(1.0, abs=0.01)
    predicted = [float(found.step_time(o.nodes, o.gpus, o.micro_batch)) for o in seen]
    assert predicted == pytest.approx([o.step_s for o in seen], rel=0.01)


def test_a_hidden_exchange_is_told_from_none():
    hidden = dataclasses.replace(THETA, alpha_c=0.02, alpha_r=0.3, gamma=8.0)
    seen = measured(hidden, shapes=[(1, 1), (1, 2)], batches=(32, 64))
    told = tuple(dataclasses.replace(o, exchange_s=0.3 if o.gpus > 1 else None) for o in seen)
    truth = float(hidden.step_time(1, 2, 8))
    assert float(fit(told).step_time(1, 2, 8)) == pytest.approx(truth, rel=0.1)
    assert float(fit(seen).step_time(1, 2, 8)) < 0.5 * truth, "in proportion to the batch"


@settings(max_examples=60)
@given(st.lists(st.floats(1e-300, 1e300), min_size=2, max_size=6))
def test_extreme_seconds_stay_finite(times):
    observations = tuple(
        seen(1 + (i > 2), 2**i, 1 + i, a, b) for i, (a, b) in enumerate(itertools.pairwise(times))
    )
    for compat in (False, True):
        found = fit(observations, compat=compat)
        assert all(math.isfinite(v) for v in dataclasses.astuple(found))
