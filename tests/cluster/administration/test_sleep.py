"""Nodes that selasticd switches off and on through Slurm's power saving.

The programs of power saving write `on` or `off` to a file of each node on the shared volume; a
process on the node, in place of its hardware, starts or stops slurmd accordingly.
"""

import re
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.added_settings import added_settings
from tests.support.container_cluster.selasticd import (
    PYTHON,
    Daemon,
    eager_config,
    gpus,
    held,
    shown,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

POWER = "/shared/scratch/power"
NODES = ("g01", "g02", "g03", "g04", "g05", "g06")
PROGRAM = f"""#!/bin/sh
for node in $(scontrol show hostnames "$1"); do
    echo {{power}} >{POWER}/$node.new && mv {POWER}/$node.new {POWER}/$node
done
"""
SETTINGS = f"""
SuspendProgram={POWER}/off
ResumeProgram={POWER}/on
SuspendTime=10000000
SuspendTimeout=3
ResumeTimeout=600
"""
#: Ends with the folder; -b tells slurmctld that the host was started.
HARDWARE = f"""
present=on
while [ -d {POWER} ]; do
    power=$(cat {POWER}/$(hostname) 2>/dev/null || echo on)
    if [ $power != $present ]; then
        if [ $power = off ]; then pkill -x slurmd; else slurmd -N $(hostname) -b; fi
        present=$power
    fi
    sleep 0.5
done
"""
#: Fills a ledger with a day in which no node was in use.
HISTORY = """
import sys, time
from slurm_elastic.controller.sleep.sleep_record import BIN_S, SleepBin, SleepRecord
from slurm_elastic.controller.state.ledger import Ledger
ledger, last = Ledger(sys.argv[1]), int(time.time() // BIN_S)
bins = {last - i: SleepBin() for i in range(1, 200)}
ledger.put("sleep_bins", SleepRecord(bins).to_json())
ledger.close()
"""
SLEEP = """
[sleep]
mode = "{mode}"
window_s = 10
spare = 0
cycles_per_day = 100
grow_boots = 1
"""
ADMINISTRATOR = "sacctmgr -i modify user selastic set adminlevel={}"


@pytest.fixture(scope="module")
def powered(cluster: SlurmCluster) -> Iterator[None]:
    """Give the cluster power saving, and selasticd's account the right to use it."""
    for power in ("off", "on"):
        write = f"mkdir -pm 777 {POWER}; cat >{POWER}/{power}; chmod 755 {POWER}/{power}"
        cluster.exec(write, stdin=PROGRAM.format(power=power))
    for node in NODES:
        cluster.exec(f"setsid bash -c '{HARDWARE}' </dev/null >/dev/null 2>&1 &", node=node)
    cluster.exec(ADMINISTRATOR.format("Administrator"))
    try:
        with added_settings(cluster, SETTINGS, shown=f"SuspendProgram *= {POWER}"):
            yield
            for node in without_power(cluster):
                cluster.exec(f"scontrol update nodename={node} state=power_up")
            until(lambda: not asleep(cluster), what=lambda: f"{states(cluster)}")
    finally:
        cluster.exec(ADMINISTRATOR.format("Operator"))
        cluster.exec(["rm", "-r", POWER])


@pytest.fixture
def daemon(cluster: SlurmCluster, powered: None) -> Iterator[Daemon]:
    """Run selasticd, which remembers a day without jobs."""
    daemon = Daemon(cluster, config("act"))
    ledger = f"{daemon.home}/ledger.sqlite"
    cluster.exec([PYTHON, "-", ledger], user="selastic", stdin=HISTORY)
    try:
        daemon.start()
        yield daemon
        daemon.check_log()
        observe(daemon)
        until(lambda: not asleep(cluster), what=lambda: f"{states(cluster)}")
    finally:
        daemon.close()


def config(mode: str) -> str:
    return eager_config(extra=SLEEP.format(mode=mode))


def states(cluster: SlurmCluster) -> dict[str, str]:
    """Return Slurm's state of each node."""
    text = cluster.exec("scontrol -o show node").stdout
    return dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+)", text, re.MULTILINE))


def asleep(cluster: SlurmCluster) -> list[str]:
    """Return the nodes that have no power, or lose or gain it."""
    return sorted(name for name, state in states(cluster).items() if "POWER" in state)


def without_power(cluster: SlurmCluster) -> list[str]:
    found = states(cluster).items()
    return sorted(name for name, state in found if "POWERED_DOWN" in state and "UP" not in state)


def observe(daemon: Daemon) -> None:
    """Let selasticd switch no node any more: it wakes those that it has switched off."""
    daemon.configure(config("observe"))
    daemon.signal("HUP")


def test_idle_nodes_sleep_and_wake_for_a_job(daemon: Daemon, cluster: SlurmCluster) -> None:
    busy = cluster.sbatch("exec sleep 3000", "-wg02", "--gpus-per-node=1", "-o/dev/null")
    cluster.wait(busy, "RUNNING")
    # In use is one node; one more stays awake.
    until(lambda: len(without_power(cluster)) == 4, what=lambda: daemon.log()[-3000:])
    assert "g02" not in asleep(cluster)
    assert "16 asleep" in daemon.selastic("status", user="root")
    sleeping = without_power(cluster)[-1]
    late = cluster.sbatch("exec sleep 3000", f"-w{sleeping}", "--gpus-per-node=4", "-o/dev/null")
    cluster.wait(late, "RUNNING")
    daemon.wait_for(rf"Node={sleeping} Power=on|Node={sleeping} Power=up By=slurm")
    daemon.kill()
    cluster.exec(["scancel", str(late)])
    daemon.start()
    # It remembers what it has switched off before it was killed.
    until(lambda: len(without_power(cluster)) == 4, what=lambda: daemon.log()[-3000:])
    assert cluster.state(busy) == "RUNNING"
    assert shown(cluster, busy)["restart_cnt"] == 0
    assert "slept" in daemon.selastic("usage", user="root")


def test_a_job_grows_onto_nodes_that_sleep(daemon: Daemon, cluster: SlurmCluster) -> None:
    rigid = cluster.sbatch("exec sleep 3000", "-wg01", "--gpus-per-node=2", "-o/dev/null")
    cluster.wait(rigid, "RUNNING")
    until(lambda: len(without_power(cluster)) == 4, what=lambda: daemon.log()[-3000:])
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


def test_a_node_that_is_set_down_while_it_sleeps_is_left_to_the_administrator(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    until(lambda: len(without_power(cluster)) == 5, what=lambda: daemon.log()[-3000:])
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
