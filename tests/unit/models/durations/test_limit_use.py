"""Time limits beside run times, by user and name."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.limit_use import limit_uses


def ended(seconds, *, name="net", user="alice", limit_s=86400.0, gpus=2, at=0.0):
    request = JobRequest(user=user, name=name, gpus=gpus, limit_s=limit_s)
    return FinishedJob(request=request, seconds=seconds, ended=at)


def test_the_names_with_the_largest_limits_in_vain_come_first():
    jobs = [ended(600.0, name=f"net-{i}") for i in range(6)]
    jobs += [ended(3600.0, name="gpt", gpus=8, at=float(i)) for i in range(5)]
    jobs += [ended(600.0, name="rare") for _ in range(4)]
    jobs += [ended(600.0, name="endless", limit_s=None) for _ in range(9)]
    gpt, net = limit_uses(jobs, most=10)
    assert (gpt.name, gpt.jobs, gpt.median_s, gpt.advised_s) == ("gpt", 5, 3600.0, 4500.0)
    assert gpt.gpu_hours == pytest.approx(5 * 8 * (86400 - 4500) / 3600)
    assert (net.name, net.jobs, net.limit_s, net.advised_s) == ("net-#", 6, 86400.0, 900.0)
    assert limit_uses(jobs, most=1) == [gpt]


def test_limits_that_end_jobs_are_advised_to_be_longer():
    (use,) = limit_uses([ended(3598.0, limit_s=3600.0) for _ in range(5)], most=1)
    assert use.reached == 5
    assert use.advised_s > 3600.0
    assert use.gpu_hours < 0


def test_the_latest_jobs_count():
    jobs = [ended(60.0, at=float(i)) for i in range(100)]
    jobs += [ended(7200.0, at=1000.0 + i) for i in range(48)]
    (use,) = limit_uses(reversed(jobs), most=1)
    assert (use.jobs, use.median_s) == (48, 7200.0)


@given(
    st.lists(
        st.builds(
            ended,
            st.floats(1.0, 1e7),
            name=st.sampled_from(["a1", "a2", "b"]),
            user=st.sampled_from(["alice", "bob"]),
            limit_s=st.one_of(st.none(), st.floats(60.0, 1e6)),
            gpus=st.integers(1, 64),
        ),
        max_size=60,
    ),
    st.integers(0, 3),
)
def test_every_name_has_one_line(jobs, most):
    uses = limit_uses(jobs, most=most)
    assert len(uses) <= most
    assert len({(use.user, use.name) for use in uses}) == len(uses)
    for use in uses:
        assert use.jobs >= 5
        assert use.advised_s >= use.p90_s * (1 - 1e-9)
        assert 0 <= use.reached <= use.jobs
        assert math.isfinite(use.gpu_hours)
