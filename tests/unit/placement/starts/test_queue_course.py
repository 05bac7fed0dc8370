"""Course of events in a queue: no GPU twice, and nobody delays the first job of a queue."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.placement.starts.queue_course import (
    HeldGpus,
    QueueCourse,
    StartOptions,
    WaitingJob,
)

NODES, PER_NODE, NOW = 3, 4, 1000.0
ALL = np.ones(NODES, dtype=bool)
#: Nodes of three partitions, of which the last two overlap with the first.
PARTITIONS = (ALL, np.array([True, True, False]), np.array([False, False, True]))
KINDS = {
    (p, gpus): StartOptions(((usable, ((-(-gpus // PER_NODE), min(gpus, PER_NODE)),)),))
    for p, usable in enumerate(PARTITIONS)
    for gpus in (1, 2, 4, 8)
}


def waiting(number, partition, gpus, limit_s, part, **more):
    return WaitingJob(
        job_id=100 + number,
        queue=(str(partition), ""),
        options=KINDS[partition, gpus],
        limit_s=limit_s,
        seconds=part * limit_s,
        **more,
    )


@st.composite
def queues(draw):
    """Return running jobs, free GPUs, and pending jobs with the GPUs of each."""
    free, held = np.full(NODES, PER_NODE), {}
    for number in range(draw(st.integers(0, 6))):
        node, gpus = draw(st.integers(0, NODES - 1)), draw(st.integers(1, PER_NODE))
        if free[node] >= gpus:
            free[node] -= gpus
            limit = draw(st.integers(1, 50))
            end = NOW + limit * draw(st.sampled_from([0.1, 0.5, 1.0]))
            least = draw(st.sampled_from([None, 0, 1, 2]))
            held[number] = HeldGpus(shares={node: gpus}, end=end, latest=NOW + limit, least=least)
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.sampled_from([1, 2, 4, 8]),
                st.integers(1, 50),
                st.sampled_from([0.1, 0.5, 1.0]),
            ).filter(lambda row: row[:2] != (2, 8)),  # more than its partition has
            max_size=8,
        )
    )
    return free, held, rows


@settings(max_examples=300)
@given(queue=queues(), backfill=st.booleans(), gives=st.booleans(), ours=st.booleans())
def test_no_gpu_is_held_twice_and_all_jobs_that_can_start(queue, backfill, gives, ours):
    free, held, rows = queue
    if not gives:
        for job in held.values():
            job.least = None
    jobs = [waiting(n, *row, controller_starts=ours) for n, row in enumerate(rows)]
    course = QueueCourse(NOW, free, held, jobs, backfill=backfill)
    before = {job_id: dict(h.shares) for job_id, h in held.items()}
    starts = {}
    start = course._start

    def checked(job, at, shares, reserved):
        start(job, at, shares, reserved)
        used = np.zeros(NODES, dtype=int)
        for h in course._held.values():
            for i, gpus in h.shares.items():
                used[i] += gpus
        assert (course._free >= 0).all()
        assert (used + course._free == PER_NODE).all()

    course._start = checked
    starts = course.starts()
    assert {job_id: h.shares for job_id, h in held.items()} == before, "the caller's stay"
    assert set(starts) == {job.job_id for job in jobs}


@settings(max_examples=300)
@given(queue=queues())
def test_the_first_job_starts_no_later_than_by_the_limits_alone(queue):
    free, held, rows = queue
    jobs = [waiting(n, *row) for n, row in enumerate(rows)]
    for job in held.values():
        job.least = None
    starts = QueueCourse(NOW, free, held, jobs).starts()
    for first in jobs[:1]:
        by_limits = {
            i: HeldGpus(shares=h.shares, end=h.latest, latest=h.latest) for i, h in held.items()
        }
        bound = QueueCourse(NOW, free, by_limits, [first]).starts()
        assert starts.get(first.job_id, math.inf) <= bound.get(first.job_id, math.inf)


def test_a_job_that_does_not_end_for_certain_may_not_delay_the_first_one():
    held = {1: HeldGpus(shares={0: 4, 1: 4}, end=NOW + 10, latest=NOW + 20)}
    first = waiting(0, 0, 8, 50, 1.0)
    endless = waiting(1, 0, 4, math.inf, 0.0)
    free = np.array([0, 0, 4])
    starts = QueueCourse(NOW, free, held, [first, endless]).starts()
    # The first one has nodes 0 and 1 at its reserved start: node 2 is left over.
    assert starts == {100: NOW + 10, 101: NOW}


@pytest.mark.parametrize(("backfill", "start"), [(True, NOW), (False, NOW + 10)])
def test_in_order_nobody_overtakes(backfill, start):
    held = {1: HeldGpus(shares={0: 4, 1: 4}, end=NOW + 10, latest=NOW + 20)}
    jobs = [waiting(0, 0, 8, 50, 1.0), waiting(1, 0, 1, 5, 1.0)]
    starts = QueueCourse(NOW, np.array([0, 0, 4]), held, jobs, backfill=backfill).starts()
    assert starts[101] == start
