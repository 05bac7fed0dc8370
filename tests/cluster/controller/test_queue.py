"""queue = "controller": pending elastic jobs wait for selasticd, but not for ever."""

import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import (
    Daemon,
    eager_config,
    gpus,
    held,
    running,
    shown,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

FIRST = 4_000_000_000


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(queue="controller")) as daemon:
        yield daemon


def submit(cluster: SlurmCluster, *options: str, directive: str = "4-8,types=a100") -> int:
    return cluster.sbatch("exec sleep 600", f"--elastic={directive}", "-o/dev/null", *options)


def fill(cluster: SlurmCluster, *nodes: str) -> list[int]:
    """Submit rigid jobs on whole nodes."""
    jobs = [
        cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:4", "-w", node, user="bob")
        for node in nodes
    ]
    for job in jobs:
        cluster.wait(job, "RUNNING")
    return jobs


def leased(cluster: SlurmCluster, job: int) -> bool:
    found = shown(cluster, job)
    return found["state_reason"] == "BeginTime" and found["eligible_time"]["number"] > time.time()


def test_waiting_jobs_are_leased_renewed_and_started_by_the_controller(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    rigid = fill(cluster, "g01", "g02", "g04")
    job = submit(cluster, "--nice=5", "--exclude=g02,g04")
    broken = submit(cluster, "-Ca100&rack2")
    until(lambda: leased(cluster, job) and leased(cluster, broken))
    first = shown(cluster, job)["eligible_time"]["number"]
    later = submit(cluster, "--begin=now+1hour")
    begin = shown(cluster, later)["eligible_time"]["number"]
    waits = submit(cluster, f"--dependency=afterany:{rigid[1]}")
    # A lease is its owner's to break, and then it is not made again.
    cluster.exec(["scontrol", "update", f"jobid={broken}", "StartTime=now"], user="alice")
    held_ = submit(cluster, "-Ca100&rack2")
    until(lambda: leased(cluster, held_))
    cluster.exec(["scontrol", "hold", str(held_)], user="alice")
    until(lambda: shown(cluster, job)["eligible_time"]["number"] > first, what="not renewed")
    assert not leased(cluster, broken)
    assert shown(cluster, later)["eligible_time"]["number"] == begin
    assert shown(cluster, waits)["state_reason"] == "Dependency"
    cluster.exec(["scancel", str(rigid[0]), str(rigid[2])])
    until(lambda: held(cluster, job) == {"g01": 4})
    until(lambda: gpus(cluster, broken) == 4)
    until(lambda: shown(cluster, job)["resv_name"] == "")  # given back last
    found = shown(cluster, job)
    assert found["priority"]["number"] < FIRST
    assert (found["nice"], found["restart_cnt"]) == (5, 0)
    assert found["excluded_nodes"] == "g[02,04]"
    assert f"JobId={job} Action=start" in daemon.log()
    # A hold is respected; after its release the job starts as soon as there is room.
    cluster.exec(["scancel", str(broken)])
    time.sleep(3)
    assert shown(cluster, held_)["state_reason"] == "JobHeldUser"
    cluster.exec(["scontrol", "release", str(held_)], user="alice")
    until(lambda: gpus(cluster, held_) == 4)


def test_one_that_is_preempted_comes_back_as_it_was_submitted(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    fill(cluster, "g01", "g02")
    job = submit(cluster, "-C", "rack2", "--exclude=g01,g05", "--time=30")
    until(lambda: gpus(cluster, job) == 4)
    rigid = cluster.sbatch("exec sleep 8", "-o/dev/null", "--gres=gpu:a100:4", user="bob")
    cluster.exec(["scontrol", "update", f"jobid={rigid}", "Priority=100000"])
    cluster.wait(rigid, "RUNNING")
    # Slurm makes a requeued job wait too, until the controller reshapes it: within what is left of
    # its time limit, and without the nodes that it may have had to start on.
    until(lambda: leased(cluster, job) and shown(cluster, job)["time_limit"]["number"] == 29)
    found = shown(cluster, job)
    assert (found["features"], found["excluded_nodes"]) == ("rack2", "g[01,05]")
    assert (found["resv_name"], found["required_nodes"]) == ("", "")
    assert found["priority"]["number"] < FIRST
    until(lambda: gpus(cluster, job) == 4)
    assert held(cluster, job) == {"g04": 4}


def test_held_and_retired_jobs_are_given_to_slurm(daemon: Daemon, cluster: SlurmCluster) -> None:
    rigid = fill(cluster, "g01", "g02", "g04")
    job, other = submit(cluster), submit(cluster)
    until(lambda: leased(cluster, job) and leased(cluster, other))
    daemon.selastic("hold", str(job))
    until(lambda: not leased(cluster, job))
    try:
        assert "1 waiting jobs" in daemon.selastic("retire", "--yes", user="root")
        until(lambda: not leased(cluster, other))
        cluster.exec(["scancel", *map(str, rigid)])
        until(lambda: gpus(cluster, job) == gpus(cluster, other) == 4)
        assert shown(cluster, job)["required_nodes"] == ""
        time.sleep(5)
        assert (gpus(cluster, job), gpus(cluster, other)) == (4, 4)
    finally:
        daemon.selastic("reconfigure", user="root")


def test_the_queue_goes_back_to_slurm_when_the_configuration_says_so(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    fill(cluster, "g01", "g02", "g04")
    job = submit(cluster)
    until(lambda: leased(cluster, job))
    daemon.configure(eager_config(queue="slurm"))
    daemon.signal("HUP")
    until(lambda: not leased(cluster, job))
    daemon.configure(eager_config(queue="controller"))
    daemon.signal("HUP")
    until(lambda: leased(cluster, job))


def test_a_start_that_a_crash_interrupted_is_finished(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    """In RESHAPE it has left nothing behind; it must not be taken for a job that lost its nodes."""
    (rigid,) = fill(cluster, "g04")
    job = submit(cluster, "-C", "a100&rack2")
    until(lambda: leased(cluster, job))
    cluster.exec(["scancel", str(rigid)])
    daemon.when(job, "RESHAPE", daemon.kill_command)
    daemon.start()
    until(lambda: gpus(cluster, job) == 4)
    time.sleep(8)
    assert shown(cluster, job)["restart_cnt"] == 0
    assert shown(cluster, job)["priority"]["number"] < FIRST
