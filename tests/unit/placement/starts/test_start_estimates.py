"""Probable starts of pending jobs."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slurm_elastic.core.cluster import Partition
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.placement.starts.start_estimates import start_estimates
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

HOUR = 3600.0


def around(seconds):
    """Return the estimate of jobs that run between half and twice this long."""
    return DurationEstimate.of_sample([seconds * 2 ** (i / 10 - 1) for i in range(21)])


def full(**fields):
    """Return a full node, whose job started a moment ago, and a pending elastic job."""
    cluster = Cluster([node("g1")])
    cluster.add(1, on={"g1": 4}, start_time=NOW, **fields)
    cluster.add(2, elastic="2-4", gpus=2)
    return cluster


def starts(cluster, lengths, **more):
    snapshot = cluster.snapshot()
    return start_estimates(snapshot, lengths, **more)


def test_a_job_starts_when_the_one_before_it_ends():
    estimate = starts(full(), {1: around(HOUR), 2: around(HOUR)})[2]
    assert estimate.median - NOW == pytest.approx(HOUR, rel=0.25)
    assert 1.3 * HOUR < estimate.p90 - NOW <= 2 * HOUR


def test_what_a_job_has_run_already_counts():
    cluster = full()
    cluster.time = NOW + HOUR
    estimate = starts(cluster, {1: around(HOUR)})[2]
    assert 0 < estimate.median - cluster.time < HOUR
    late = start_estimates(
        Cluster(cluster.nodes, cluster.jobs, time=NOW + 10 * HOUR).snapshot(), {1: around(HOUR)}
    )
    assert late[2].median >= NOW + 10 * HOUR


def test_reported_progress_counts_before_a_prediction():
    cluster = full()
    cluster.time = NOW + HOUR
    estimate = starts(cluster, {1: around(100 * HOUR)}, progress={1: 0.5})[2]
    assert estimate.median - cluster.time == pytest.approx(HOUR, rel=0.1)


def test_a_time_limit_ends_a_job_of_which_nothing_is_known():
    assert starts(full(time_limit_s=600), {})[2].median == NOW + 600
    assert not starts(full(time_limit_s=None), {})
    limited = starts(full(time_limit_s=600), {1: around(HOUR)})[2]
    assert limited.p90 <= NOW + 600


def test_jobs_before_it_start_first():
    cluster = full()
    cluster.add(3, gpus=4, priority=10)
    cluster.add(4, gpus=4, partition="other", priority=20)  # its queue is another one
    lengths = {1: around(HOUR), 2: around(HOUR), 3: around(HOUR)}
    assert starts(cluster, lengths)[2].median - NOW == pytest.approx(2 * HOUR, rel=0.3)


def test_jobs_that_wait_for_another_reason_are_left_out():
    cluster = full()
    cluster.add(3, elastic="1-2", gpus=1, reason="Dependency")
    cluster.add(4, elastic="1-2", gpus=1, reason="BeginTime", begin_time=NOW + 300)
    assert set(starts(cluster, {1: around(HOUR)})) == {2}
    assert set(starts(cluster, {1: around(HOUR), 2: around(HOUR)}, leased={4})) == {2, 4}


def test_without_time_there_is_no_estimate():
    assert not start_estimates(full().snapshot(), {1: around(HOUR)}, goes_on=lambda: False)


@settings(max_examples=40)
@given(
    running=st.lists(st.tuples(st.integers(1, 4), st.floats(60, 1e5)), max_size=4),
    pending=st.lists(st.tuples(st.integers(1, 8), st.floats(60, 1e5), st.booleans()), max_size=6),
)
def test_estimates_are_in_order_and_repeat(running, pending):
    cluster = Cluster([node(f"g{i}") for i in range(1, 5)])
    lengths = {}
    for i, (gpus, seconds) in enumerate(running, start=1):
        cluster.add(i, on={f"g{i}": gpus}, start_time=NOW)
        lengths[i] = around(seconds)
    for i, (gpus, seconds, elastic) in enumerate(pending, start=10):
        cluster.add(i, elastic=f"{gpus}-8" if elastic else "", gpus=gpus)
        lengths[i] = around(seconds)
    for backfill in (False, True):
        found = starts(cluster, lengths, draws=15, backfill=backfill)
        assert found == starts(cluster, lengths, draws=15, backfill=backfill)
        assert set(found) <= {i for i, (_, _, e) in enumerate(pending, start=10) if e}
        order = [found[i] for i in sorted(found)]
        for estimate, later in itertools.pairwise(order):
            assert NOW <= estimate.median <= estimate.p90
            if not backfill:
                assert estimate.median <= later.median  # one queue: no job overtakes another


def two_nodes(**fields):
    """Return one node in use for an hour at most, one free, and a job first in line for both."""
    cluster = Cluster(
        [node("g1"), node("g2")], partitions=[Partition(name=n) for n in ("gpu", "debug")]
    )
    cluster.add(1, on={"g1": 4}, start_time=NOW, time_limit_s=3600)
    cluster.add(2, gpus=8, priority=10, time_limit_s=3600)
    cluster.add(3, elastic="1-4", gpus=2, **fields)
    return cluster


def test_a_job_that_ends_before_the_reserved_start_goes_first():
    lengths = {i: around(HOUR) for i in (1, 2, 3)}
    filling = two_nodes(time_limit_s=1800)
    assert starts(filling, lengths)[3].p90 == NOW
    assert starts(filling, lengths, backfill=False)[3].median > NOW + HOUR
    # By its limit it would delay the job in front, whatever is predicted.
    lengths[3] = around(60)
    assert starts(two_nodes(time_limit_s=7200), lengths)[3].median > NOW + HOUR


def test_a_job_that_leaves_enough_gpus_goes_first():
    cluster = two_nodes(time_limit_s=7200)
    cluster.jobs[1] = dataclasses.replace(cluster.jobs[1], gpus=6, min_nodes=2)
    cluster.jobs[2] = dataclasses.replace(cluster.jobs[2], gpus=1)
    assert starts(cluster, {i: around(HOUR) for i in (1, 2, 3)})[3].p90 == NOW


def test_a_reservation_of_another_partition_counts_on_its_nodes_only():
    lengths = {i: around(HOUR) for i in (1, 2, 3)}
    both = frozenset({"gpu", "debug"})
    for partitions, waits in ((both, True), (frozenset({"debug"}), False)):
        cluster = two_nodes(time_limit_s=7200, partition="debug")
        cluster.nodes = [*cluster.nodes, node("g3", partitions=partitions)]
        cluster.nodes[1] = node("g2", partitions=both)
        cluster.jobs[1] = dataclasses.replace(cluster.jobs[1], gpus=12 if waits else 8)
        assert (starts(cluster, lengths)[3].median > NOW) == waits


def test_a_job_that_the_controller_starts_is_held_back_by_no_reservation():
    cluster = two_nodes(time_limit_s=7200, reason="BeginTime", begin_time=NOW + 300)
    cluster.jobs[2] = dataclasses.replace(cluster.jobs[2], gpus=4)
    lengths = {i: around(HOUR) for i in (1, 2, 3)}
    assert starts(cluster, lengths, leased={3})[3].p90 == NOW


def test_an_elastic_job_gives_way_once_that_suffices():
    cluster = Cluster([node("g1")])
    cluster.add(1, elastic="1-4", on={"g1": 2}, start_time=NOW, time_limit_s=86_400)
    cluster.add(2, on={"g1": 2}, start_time=NOW, time_limit_s=600)
    cluster.add(3, elastic="3-4", gpus=3)
    lengths = {1: around(20 * HOUR), 2: around(HOUR), 3: around(HOUR)}
    assert starts(cluster, lengths)[3].median > NOW + 5 * HOUR
    assert starts(cluster, lengths, gives={1: 1})[3].median == NOW + 600
    # One that would have to give more than it may does not.
    assert starts(cluster, lengths, gives={1: 2})[3].median > NOW + 5 * HOUR


def test_a_job_that_has_given_way_frees_what_it_kept():
    cluster = Cluster([node("g1"), node("g2")])
    cluster.add(1, elastic="2-8", on={"g1": 4, "g2": 2}, start_time=NOW, time_limit_s=7200)
    cluster.add(2, on={"g2": 2}, start_time=NOW, time_limit_s=600)
    cluster.add(3, elastic="4-8", gpus=4, time_limit_s=36_000)
    cluster.add(4, elastic="2-8", gpus=2, priority=-1)
    found = starts(cluster, {3: around(9 * HOUR)}, gives={1: 2})
    assert (found[3].median, found[4].median) == (NOW + 600, NOW + 600)
    cluster.jobs[3] = dataclasses.replace(cluster.jobs[3], gpus=4)
    assert starts(cluster, {3: around(9 * HOUR)}, gives={1: 2})[4].median == NOW + 7200


def test_all_jobs_of_a_long_queue_are_estimated():
    cluster = Cluster([node(f"n{i:03d}", 8) for i in range(100)])
    for i in range(100):
        for at in range(4):
            cluster.add(
                4 * i + at + 1, on={f"n{i:03d}": 2}, start_time=NOW, time_limit_s=3600 * (at + 1)
            )
    for i in range(1000, 1100):
        cluster.add(i, elastic="1-16", gpus=(i % 5 + 1) * 4, time_limit_s=3600 * (i % 7 + 1))
    lengths = {job.job_id: around(HOUR * (1 + job.job_id % 3)) for job in cluster.jobs}
    assert len(starts(cluster, lengths, draws=15)) == 100
