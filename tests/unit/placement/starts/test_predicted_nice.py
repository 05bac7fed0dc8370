"""What is added to nice values: bounded, more for longer jobs, nothing after a day."""

from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.placement.starts.predicted_nice import added_nice

SECONDS = st.floats(0, 1e9)


@given(SECONDS, st.floats(0, 1e6), st.integers(0, 1_000_000))
def test_it_is_bounded_and_nothing_after_a_day(gpu_seconds, waited_s, most):
    added = added_nice(gpu_seconds, waited_s, most)
    assert 0 <= added <= most
    assert added_nice(gpu_seconds, 86400 + waited_s, most) == 0


@given(SECONDS, SECONDS, st.floats(0, 1e5), st.floats(0, 1e5), st.integers(0, 1_000_000))
def test_shorter_jobs_and_those_that_wait_longer_get_no_more(short, long, since, longer, most):
    short, long = sorted((short, long))
    since, longer = sorted((since, longer))
    assert added_nice(short, since, most) <= added_nice(long, since, most)
    assert added_nice(long, longer, most) <= added_nice(long, since, most)


def test_examples():
    assert added_nice(500.0, 0, 1000) == 0
    assert added_nice(3600.0, 0, 1000) == 150
    assert added_nice(64 * 86400.0, 0, 1000) == 900
    assert added_nice(64 * 86400.0, 43200, 1000) == 450
    assert added_nice(1e8, 0, 1000) == 1000
