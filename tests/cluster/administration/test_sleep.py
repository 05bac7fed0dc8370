"""Nodes that selasticd switches off and on through Slurm's power saving."""

import re
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.power_saving import (
    SLEEP,
    asleep,
    forget_present_bin,
    power_saving,
    remember_idle_day,
    states,
    without_power,
)
from tests.support.container_cluster.selasticd import (
    Daemon,
    eager_config,
    gpus,
    held,
    shown,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

#: Its jobs only sleep.
pytestmark = pytest.mark.sleeping


@pytest.fixture(scope="module")
def powered(cluster: SlurmCluster) -> Iterator[None]:
    with power_saving(cluster, resume_timeout_s=600):
        yield


@pytest.fixture
def daemon(cluster: SlurmCluster, powered: None) -> Iterator[Daemon]:
    """Run selasticd, which remembers a day without jobs."""
    daemon = Daemon(cluster, config("act"))
    remember_idle_day(cluster, f"{daemon.home}/ledger.sqlite")
    try:
        daemon.start()
        yield daemon
        daemon.check_log()
        observe(daemon)
        until(lambda: not asleep(cluster), what=lambda: f"{states(cluster)}")
    finally:
        daemon.close()


def cluster_state(daemon: Daemon) -> str:
    """Return nodes, jobs and the newest lines of the log, for the message of a test that fails."""
    jobs = daemon.cluster.exec("squeue").stdout
    return f"{states(daemon.cluster)}\n{jobs}\n{daemon.log()[-3000:]}"


def config(mode: str, *, clear_s: int = 0) -> str:
    return eager_config(extra=SLEEP.format(mode=mode) + f"clear_s = {clear_s}\n")


def observe(daemon: Daemon) -> None:
    """Let selasticd switch no node any more: it wakes those that it has switched off."""
    daemon.configure(config("observe"))
    daemon.signal("HUP")


def test_idle_nodes_sleep_and_wake_for_a_job(daemon: Daemon, cluster: SlurmCluster) -> None:
    busy = cluster.sbatch("exec sleep 3000", "-wg02", "--gpus-per-node=1", "-o/dev/null")
    cluster.wait(busy, "RUNNING")
    # In use is one node; one more stays awake.
    until(lambda: len(without_power(cluster)) == 4, what=lambda: cluster_state(daemon))
    assert "g02" not in asleep(cluster)
    assert "16 asleep" in daemon.selastic("status", user="root")
    sleeping = without_power(cluster)[-1]
    late = cluster.sbatch("exec sleep 3000", f"-w{sleeping}", "--gpus-per-node=4", "-o/dev/null")
    cluster.wait(late, "RUNNING")
    daemon.wait_for(rf"Node={sleeping} Power=on|Node={sleeping} Power=up By=slurm")
    daemon.kill()
    cluster.exec(["scancel", str(late)])
    cluster.wait(late, "CANCELLED")
    forget_present_bin(cluster, f"{daemon.home}/ledger.sqlite")
    daemon.start()
    # It remembers what it has switched off before it was killed.
    until(lambda: len(without_power(cluster)) == 4, what=lambda: cluster_state(daemon))
    assert cluster.state(busy) == "RUNNING"
    assert shown(cluster, busy)["restart_cnt"] == 0
    assert "slept" in daemon.selastic("usage", user="root")


def test_a_job_grows_onto_nodes_that_sleep(daemon: Daemon, cluster: SlurmCluster) -> None:
    rigid = cluster.sbatch("exec sleep 3000", "-wg01", "--gpus-per-node=2", "-o/dev/null")
    cluster.wait(rigid, "RUNNING")
    until(lambda: len(without_power(cluster)) == 4, what=lambda: cluster_state(daemon))
    before = without_power(cluster)
    job = cluster.sbatch(
        "exec sleep 3000", "--elastic=2-6", "-o/dev/null", "-t60", "-wg01", "-Ca100"
    )
    cluster.wait(job, "RUNNING")
    until(
        lambda: gpus(cluster, job) == 6,
        what=lambda: f"{held(cluster, job)}; {daemon.log()[-4000:]}",
    )
    # a100 has g01, of which a rigid job holds a half, g02 and g04: at least one of them slept.
    woken = set(held(cluster, job)) & set(before)
    assert woken
    for node in woken:
        assert f"Node={node} Power=on" in daemon.log()
    assert shown(cluster, rigid)["restart_cnt"] == 0


def test_a_job_leaves_its_node_for_another_one_so_that_it_sleeps(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    first, filler, second = (
        cluster.sbatch("exec sleep 3000", "--gpus-per-node=a100:2", "-o/dev/null", *options)
        for options in (["--elastic=2-2"], [], ["--elastic=2-2"])
    )
    for job in (first, filler, second):
        cluster.wait(job, "RUNNING")
    apart = [*held(cluster, first), *held(cluster, second)]
    assert len(set(apart)) == 2, cluster_state(daemon)
    cluster.exec(["scancel", str(filler)])
    until(lambda: len(without_power(cluster)) == 3, what=lambda: cluster_state(daemon))
    daemon.configure(config("act", clear_s=14400))
    daemon.signal("HUP")
    daemon.wait_for("State=DONE Action=move")
    assert held(cluster, first) == held(cluster, second)
    daemon.stop()
    forget_present_bin(cluster, f"{daemon.home}/ledger.sqlite")
    daemon.start()
    # In use is one node; one more stays awake.
    until(lambda: len(without_power(cluster)) == 4, what=lambda: cluster_state(daemon))
    assert {shown(cluster, job)["restart_cnt"] for job in (first, second)} == {0, 1}
    assert len(re.findall("Action=move .*Reason=clears-node", daemon.log())) == 1


def test_a_node_that_is_set_down_while_it_sleeps_is_left_to_the_administrator(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    until(lambda: len(without_power(cluster)) == 5, what=lambda: cluster_state(daemon))
    lost = without_power(cluster)[0]
    cluster.exec(f"scontrol update nodename={lost} state=down reason=broken")
    try:
        daemon.wait_for(rf"Node={lost} Power=lost")
        assert "DOWN" in states(cluster)[lost].split("+")
    finally:
        observe(daemon)  # else it would sleep again
        cluster.exec(f"scontrol update nodename={lost} state=power_down_force")

        def awake() -> bool:  # Slurm ignores POWER_UP while a node loses its power
            if lost in without_power(cluster):
                cluster.exec(f"scontrol update nodename={lost} state=power_up")
            return lost not in asleep(cluster)

        until(awake, what=lambda: f"{states(cluster)}")
