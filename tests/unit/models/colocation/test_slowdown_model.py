"""Speed beside a neighbour: monotone, learned from runs, with an error of its own."""

import itertools

import numpy as np
import pytest

from slurm_elastic.models.colocation.slowdown_model import AloneLoad, SharedRun, SlowdownModel

LEVELS = (0.1, 0.4, 0.7, 1.0)


def load(compute, memory_bus=0.3, application="net"):
    return AloneLoad(application=application, compute=compute, memory_bus=memory_bus)


def runs(*, applications=4, noise=0.0, seed=0):
    """Return runs in which what a GPU lacks for both jobs slows both down."""
    rng = np.random.default_rng(seed)
    measured = []
    for a, b in itertools.product(range(applications), repeat=2):
        for u1, u2 in itertools.product(LEVELS, repeat=2):
            speed = 1.0 - 0.3 * max(0.0, u1 + u2 - 1) + rng.normal(scale=noise)
            job, other = load(u1, application=f"n{a}"), load(u2, application=f"n{b}")
            measured.append(SharedRun(job=job, other=other, speed=speed))
    return measured


def test_two_busy_jobs_are_slow_before_anything_was_measured():
    prior = SlowdownModel.prior()
    light, heavy = load(0.2), load(1.0, 0.8)
    assert prior.speeds([(light, light)])[0] > 0.95
    assert prior.speeds([(heavy, heavy)])[0] < 0.8
    assert (prior.runs, prior.error) == (0, 0.15)


@pytest.mark.parametrize("boosted", [False, True])
def test_more_load_never_predicts_more_speed(boosted):
    if boosted:
        pytest.importorskip("sklearn")
    model = SlowdownModel.fit(runs(applications=5, noise=0.05), boosted=boosted)
    assert model.boosted is boosted
    for others in (LEVELS, reversed(LEVELS)):
        other = load(next(iter(others)))
        speeds = model.speeds([(load(u), other) for u in LEVELS])
        assert (np.diff(speeds) <= 1e-9).all()
        speeds = model.speeds([(other, load(u)) for u in LEVELS])
        assert (np.diff(speeds) <= 1e-9).all()


def test_what_was_measured_is_learned_with_its_error():
    exact = SlowdownModel.fit(runs(), boosted=False)
    predicted = exact.speeds([(load(1.0), load(1.0)), (load(0.4), load(0.4))])
    assert predicted == pytest.approx([0.7, 1.0], abs=0.03)
    noisy = SlowdownModel.fit(runs(noise=0.1), boosted=False)
    assert exact.error < 0.05 < noisy.error
    assert noisy.runs == 256


def test_a_few_runs_do_not_overthrow_the_prior():
    one = SlowdownModel.fit([SharedRun(job=load(0.1), other=load(0.1), speed=0.5)])
    assert one.speeds([(load(0.2), load(0.2))])[0] > 0.85


def test_no_pairs():
    assert SlowdownModel.prior().speeds([]).size == 0
