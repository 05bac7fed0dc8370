"""Each policy once on a real cluster, where the controller starts and stops jobs.

All nodes but one are full, so that two jobs of four GPUs, which sleep, have to take turns. What
each policy decides in detail is tested without a cluster.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime

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
        began = cluster.exec(["squeue", "-h", "-o%S", f"-j{first}"]).stdout.strip()
        second = submit(cluster, "second", minutes=5)
        until(lambda: runs(cluster, second), what=daemon.log)
        assert preempted(daemon, first, f"preempted-by job={second}")
        ended = re.search(rf"(?m)^(\S+) info: JobId={first} Action=preempt ", daemon.log())[1]
        lease = datetime.fromisoformat(ended) - datetime.fromisoformat(began)
        assert lease.total_seconds() >= 20, "floor_s is over long before"


def test_dallys_published_timers_end(controller: Start, cluster: SlurmCluster) -> None:
    """Two GPUs are free in each rack: they are too far apart until 12 leases, 24 s, are over.

    Both timers count from the submission: after 6 leases a job accepts several nodes of one rack.
    """
    with controller("dally", '[dally]\ntimers = "6,12"\nlease_s = 2\nfloor_s = 2\n') as daemon:
        fill(cluster, "g02")
        fill(cluster, "g01", "g04", gpus=2)
        job = submit(cluster, "spread")
        until(lambda: "waits for one rack" in explained(daemon, job), what=daemon.log)
        until(lambda: runs(cluster, job), what=daemon.log)
        assert held(cluster, job) == {"g01": 2, "g04": 2}
        reason = rf"JobId={job} Action=start .*Reason=starts-after tier=network waited_s=([\d.]+)"
        assert float(re.search(reason, daemon.log())[1]) >= 24


@contextmanager
def several_types(cluster: SlurmCluster, node: str) -> Iterator[None]:
    """Give an idle node two a100 and two v100 instead of four GPUs of one type."""
    files = ("/etc/slurm/slurm.conf", "/etc/slurm/gres.conf")
    devices = [
        f"NodeName={node} Name=gpu Type={kind} File=/dev/fakegpu[{indexes}]"
        for kind, indexes in (("a100", "0-1"), ("v100", "2-3"))
    ]
    change = [
        *(f"cp {file} {file}.kept" for file in files),
        f"sed -i '/NodeName={node}/s/Gres=[^ ]*/Gres=gpu:a100:2,gpu:v100:2/' {files[0]}",
        rf"sed -i 's|.*NodeName={node} .*|{devices[0]}\n{devices[1]}|' {files[1]}",
    ]

    def apply(commands: list[str], gres: str) -> None:
        for host in ("ctld", node):
            cluster.exec(" && ".join(commands), node=host)
        cluster.exec("scontrol reconfigure")
        shown = ["sinfo", "-h", "-N", "-n", node, "-o", "%G %T"]
        until(lambda: cluster.exec(shown).stdout.strip() == f"{gres} idle")

    before = cluster.exec(["sinfo", "-h", "-N", "-n", node, "-o", "%G"]).stdout.strip()
    try:
        apply(change, "gpu:a100:2,gpu:v100:2")
        yield
    finally:
        apply([f"mv {file}.kept {file}" for file in files], before)


def test_jobs_on_a_node_with_several_gpu_types_are_left_alone(cluster: SlurmCluster) -> None:
    config = eager_config(policy="las", queue="controller")
    with several_types(cluster, "g06"), running(cluster, config) as daemon:
        options = ("-wg06", "-t10", "-o/dev/null")
        first, second, waiting = (
            cluster.sbatch("exec sleep 600", *options, *more)
            for more in (
                ("--elastic=1-4,types=a100", "--gres=gpu:a100:1"),
                ("--elastic=1-2,types=v100", "--gres=gpu:v100:2"),
                ("--elastic=1-2,types=v100", "--gres=gpu:v100:1"),
            )
        )
        stays = "node g06 has GPUs of several types, or slices of GPUs (MIG): jobs there are"
        for job in (first, second):
            until(lambda job=job: stays in explained(daemon, job), what=daemon.log)
        begun = daemon.log().count("Round ")
        until(lambda: daemon.log().count("Round ") > begun + 2)
        assert (held(cluster, first), held(cluster, second)) == ({"g06": 1}, {"g06": 2})
        assert "Action=" not in daemon.log()
        assert "Nodes=g06 Growth=none Reason=gpus-not-managed" in daemon.log()
        assert "4 more on nodes with several types or slices" in daemon.selastic("status")
        check = daemon.selastic("check", user="root", check=False)
        assert "Gres of g06 has GPUs of several types" in check
        # Slurm starts a job that can start only there.
        cluster.exec(["scancel", str(second)])
        cluster.wait(waiting, "RUNNING", timeout=30)
        daemon.check_log()
