"""Statistical efficiency from gradient noise."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.core.application import Noise
from slurm_elastic.models.efficiency import efficiency, gain


def test_formula():
    noise = Noise(sqr=2.0, var=6.0)
    assert gain(256, initial_batch=128, noise=noise) == pytest.approx(8 / (3 + 2))
    assert efficiency(256, initial_batch=128, noise=noise) == pytest.approx(8 / 5 / 2)


def test_the_initial_batch_is_the_measure():
    noise = Noise(sqr=3.0, var=0.7)
    assert gain(128, initial_batch=128, noise=noise) == pytest.approx(1.0)
    assert efficiency(128, initial_batch=128, noise=noise) == pytest.approx(1.0)


def test_shapes_are_kept():
    assert gain([[1, 2], [4, 8]], initial_batch=1, noise=Noise(1.0, 1.0)).shape == (2, 2)


def test_no_statistics_at_all_count_a_step_as_one():
    assert gain(512, initial_batch=128, noise=Noise(0.0, 0.0)) == pytest.approx(1.0)


def test_huge_statistics_do_not_overflow():
    assert gain(256, initial_batch=128, noise=Noise(1e308, 1e308)) == pytest.approx(2 / 1.5)


@pytest.mark.parametrize(
    ("noise", "field"),
    [
        (Noise(math.nan, 1.0), "sqr=nan"),
        (Noise(1.0, -1.0), "var=-1.0"),
        (Noise(1.0, math.inf), "var=inf"),
    ],
)
def test_impossible_statistics_are_refused_by_name(noise, field):
    with pytest.raises(ValueError, match=field):
        gain(256, initial_batch=128, noise=noise)


statistic = st.floats(0, 1e300)


@given(statistic, statistic, st.integers(1, 4096), st.integers(1, 64))
def test_larger_batches_help_more_per_step_and_less_per_sample(sqr, var, initial, times):
    batches = initial * np.array([1, 2, 4, 4 * times])
    steps = gain(batches, initial_batch=initial, noise=Noise(sqr, var))
    samples = efficiency(batches, initial_batch=initial, noise=Noise(sqr, var))
    assert np.isfinite(steps).all()
    assert (np.diff(steps) >= -1e-9).all()
    assert (np.diff(samples) <= 1e-9).all()
    assert (steps >= 1 - 1e-9).all()
    assert (steps <= batches / initial * (1 + 1e-9)).all()
