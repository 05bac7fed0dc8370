"""Each policy once on a real cluster, where the controller starts and stops jobs.

All nodes but one are full, so that two jobs of four GPUs, which sleep, have to take turns. What
each policy decides in detail is tested without a cluster.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, gpus, held, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: GPUs of the node that is left free; the other two a100 nodes are full.
NODE, KIND = "g04", "gpu:a100:4"

Start = Callable[..., AbstractContextManager[Daemon]]


@pytest.fixture
def controller(cluster: SlurmCluster) -> Iterator[Start]:
    """Yield what runs selasticd under a policy, and checks what it leaves."""

    @contextmanager
    def started(policy: str, extra: str = "") -> Iterator[Daemon]:
        text = eager_config(policy=policy, queue="controller", extra=extra)
        # Jobs that take turns each round have to come to run in between.
        text = text.replace("interval_s = 2", "interval_s = 8", 1)
        with running(cluster, text, reporters=("alice",)) as daemon:
            yield daemon
            daemon.check_log()

    return started


def fill(cluster: SlurmCluster, *nodes: str, gpus: int = 4) -> int:
    """Take GPUs of these nodes away."""
    options = (f"-N{len(nodes)}", f"-w{','.join(nodes)}", "--ntasks-per-node=1")
    job = cluster.sbatch(
        "exec sleep 900", "-o/dev/null", f"--gres=gpu:{gpus}", *options, user="bob"
    )
    cluster.wait(job, "RUNNING")
    return job


def submit(cluster: SlurmCluster, name: str, minutes: int = 30) -> int:
    """Submit a sleeping job of alice's that runs on four a100, or waits."""
    return cluster.sbatch(
        "exec sleep 900",
        *("--elastic=4-4,types=a100", f"--gres={KIND}", f"-t{minutes}", f"-J{name}"),
        *("-o/dev/null", "--requeue"),
    )


def explained(daemon: Daemon, job: int) -> str:
    return " ".join(daemon.selastic("explain", str(job), check=False).split())


def preempted(daemon: Daemon, job: int, reason: str) -> bool:
    """Return whether the log says that a job was stopped for this reason."""
    line = rf"JobId={job} Action=preempt From=4 .*Reason={re.escape(reason)}"
    return re.search(line, daemon.log()) is not None


def runs(cluster: SlurmCluster, job: int) -> bool:
    return gpus(cluster, job) == 4


def first_of_two(cluster: SlurmCluster, daemon: Daemon) -> int:
    """Fill the cluster up to four a100, and let a job have these."""
    fill(cluster, "g01", "g02")
    first = submit(cluster, "first", minutes=60)
    until(lambda: runs(cluster, first), what=daemon.log)
    return first


def test_las_gives_gpus_to_the_job_that_had_least(controller: Start, cluster: SlurmCluster) -> None:
    with controller("las", "[las]\nqueue_gpu_s = 60\n") as daemon:
        first = first_of_two(cluster, daemon)
        second = submit(cluster, "second")
        until(lambda: runs(cluster, second), what=daemon.log)
        assert preempted(daemon, first, "others-less-served")
        # In the second queue the first start counts.
        until(lambda: runs(cluster, first), seconds=90, what=daemon.log)


def test_srtf_lets_the_shorter_job_pass(controller: Start, cluster: SlurmCluster) -> None:
    with controller("srtf") as daemon:
        first = first_of_two(cluster, daemon)
        second = submit(cluster, "second", minutes=5)
        until(lambda: runs(cluster, second), what=daemon.log)
        assert preempted(daemon, first, "others-shorter")
        cluster.exec(["scancel", str(second)])
        until(lambda: runs(cluster, first), what=daemon.log)


def test_gavel_lets_jobs_take_turns(controller: Start, cluster: SlurmCluster) -> None:
    with controller("gavel") as daemon:
        first = first_of_two(cluster, daemon)
        second = submit(cluster, "second")
        for job in (second, first, second):
            until(lambda job=job: runs(cluster, job), seconds=90, what=daemon.log)
        for job in (first, second):
            assert re.search(rf"JobId={job} Action=start .*Reason=time-share", daemon.log())


def test_dally_preempts_when_a_lease_ends(controller: Start, cluster: SlurmCluster) -> None:
    with controller("dally", "[dally]\nlease_s = 20\nfloor_s = 2\n") as daemon:
        first = first_of_two(cluster, daemon)
        second = submit(cluster, "second", minutes=5)
        until(lambda: runs(cluster, second), what=daemon.log)
        assert preempted(daemon, first, f"preempted-by job={second}")


def test_dallys_published_timers_end(controller: Start, cluster: SlurmCluster) -> None:
    """Two GPUs are free in each rack: they are too far apart until 24 leases are over."""
    with controller("dally", '[dally]\ntimers = "6,12"\nlease_s = 2\nfloor_s = 2\n') as daemon:
        fill(cluster, "g02")
        fill(cluster, "g01", "g04", gpus=2)
        job = submit(cluster, "spread")
        until(lambda: "waits for one rack" in explained(daemon, job), what=daemon.log)
        until(lambda: runs(cluster, job), what=daemon.log)
        assert held(cluster, job) == {"g01": 2, "g04": 2}
        assert f"JobId={job} Action=start" in daemon.log()
        assert "Reason=starts-after" in daemon.log()
