"""Estimates of run times: quantiles, their tail, and what is left of a job that runs."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from slurm_elastic.core.prediction.duration_estimate import LEVELS, DurationEstimate

SAMPLES = st.lists(st.floats(1.0, 1e7), min_size=1, max_size=30)


@given(SAMPLES, st.floats(0.0, 1e8))
def test_a_job_that_runs_is_expected_to_run_longer_than_it_has(sample, age):
    estimate = DurationEstimate.of_sample(sample)
    renewed = estimate.given(age)
    assert renewed.seconds[0] >= age
    assert all(
        new >= old * (1 - 1e-9) for new, old in zip(renewed.seconds, estimate.seconds, strict=True)
    )
    assert renewed.mean >= renewed.seconds[0] * (1 - 1e-9)


@given(SAMPLES)
@example([1.0, 1.0, 1.0, 220.0, 1599656.0])
def test_quantiles_and_their_inverse_agree(sample):
    estimate = DurationEstimate.of_sample(sample)
    for level, seconds in zip(LEVELS, estimate.seconds, strict=True):
        assert estimate.exceeded(seconds * (1 - 1e-6)) >= 1 - level - 1e-4
        assert estimate.exceeded(seconds * (1 + 1e-6)) <= 1 - level + 1e-4


def test_weights_move_the_median():
    sample, weights = [100.0, 1000.0], [9.0, 1.0]
    assert DurationEstimate.of_sample(sample, weights).median < 200
    assert DurationEstimate.of_sample(sample, weights[::-1]).median > 500


def test_a_job_older_than_all_that_are_known_runs_as_long_again():
    assert DurationEstimate.of_sample([60.0] * 5).given(6000.0).median == pytest.approx(12000.0)


@pytest.mark.parametrize("seconds", [(), (1.0,), tuple(range(11, 0, -1)), (0.0,) * 11])
def test_quantiles_that_are_none_are_refused(seconds):
    with pytest.raises(ValueError, match="quantiles"):
        DurationEstimate(seconds=seconds)
