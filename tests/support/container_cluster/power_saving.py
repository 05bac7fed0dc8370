"""Slurm's power saving on the container cluster, with programs in place of the nodes' hardware.

SuspendProgram and ResumeProgram write `off` or `on` to a file of each node on the shared volume; a
process on the node stops or starts slurmd accordingly.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.container_cluster.added_settings import added_settings
from tests.support.container_cluster.selasticd import PYTHON
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

POWER = "/shared/scratch/power"
_PROGRAM = f"""#!/bin/sh
for node in $(scontrol show hostnames "$1"); do
    echo {{power}} >{POWER}/$node.new && mv {POWER}/$node.new {POWER}/$node
done
"""
_SETTINGS = f"""
SuspendProgram={POWER}/off
ResumeProgram={POWER}/on
SuspendTime=10000000
SuspendTimeout=3
ResumeTimeout={{resume_timeout_s}}
"""
#: Ends with the folder. A host that Slurm waits for has just been started: -b tells slurmctld so.
#: slurmd does not start without its network; then it is tried again. It starts
#: no programs to look: six of these loops run beside the tests.
_HARDWARE = f"""
before=on
if scontrol show node $HOSTNAME | grep -q POWERING_UP; then pkill -x slurmd; before=off; fi
while [ -d {POWER} ]; do
    power=on
    [ ! -e {POWER}/$HOSTNAME ] || read -r power <{POWER}/$HOSTNAME
    if [ $power = off ]; then pkill -x slurmd; before=off
    elif [ $before = off ] && slurmd -N $HOSTNAME -b; then before=on
    fi
    sleep 0.5
done
"""
#: Fills a ledger with a day in which no node was in use.
_HISTORY = """
import sys, time
from slurm_elastic.controller.sleep.sleep_record import BIN_S, SleepBin, SleepRecord
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.placement.sleep.awake_rule import LEAST_HISTORY
try:
    ledger, last = Ledger(sys.argv[1]), int(time.time() // BIN_S)
except LedgerError:
    sys.exit()
record = SleepRecord.of_json(ledger.get("sleep_bins", []))
if len(record.series()) < LEAST_HISTORY:
    bins = {last - i: SleepBin() for i in range(1, 200)}
    ledger.put("sleep_bins", SleepRecord(bins).to_json())
ledger.close()
"""
#: Removes the bin of now from a ledger.
_PRESENT_BIN = """
import sys, time
from slurm_elastic.controller.sleep.sleep_record import BIN_S
from slurm_elastic.controller.state.ledger import Ledger
ledger, now = Ledger(sys.argv[1]), time.time() // BIN_S
ledger.put("sleep_bins", [row for row in ledger.get("sleep_bins", []) if row[0] < now])
ledger.close()
"""
#: Section of elastic.toml with which idle nodes sleep as soon as they may. With the default of
#: `served`, jobs that begin at once would keep as many more nodes awake from the next bin on.
SLEEP = """
[sleep]
mode = "{mode}"
window_s = 10
spare = 0
cycles_per_day = 100
grow_boots = 1
served = 0.5
"""
_ADMINISTRATOR = "sacctmgr -i modify user selastic set adminlevel={}"


@contextmanager
def power_saving(cluster: SlurmCluster, *, resume_timeout_s: int) -> Iterator[None]:
    """Give a cluster power saving, and selasticd's account the right to use it.

    Args:
        cluster: all of whose nodes are up.
        resume_timeout_s: of slurm.conf.
    """
    for power in ("off", "on"):
        write = f"mkdir -pm 777 {POWER}; cat >{POWER}/{power}; chmod 755 {POWER}/{power}"
        cluster.exec(write, stdin=_PROGRAM.format(power=power))
    for node in states(cluster):
        start_hardware(cluster, node)
    cluster.exec(_ADMINISTRATOR.format("Administrator"))
    settings = _SETTINGS.format(resume_timeout_s=resume_timeout_s)
    try:
        with added_settings(cluster, settings, shown=f"SuspendProgram *= {POWER}"):
            yield
            for node in without_power(cluster):
                cluster.exec(f"scontrol update nodename={node} state=power_up")
            until(lambda: not _waking(cluster), what=lambda: f"{states(cluster)}")
    finally:
        cluster.exec(_ADMINISTRATOR.format("Operator"))
        cluster.exec(["rm", "-r", POWER])


def start_hardware(cluster: SlurmCluster, node: str) -> None:
    """Start the process in place of a node's hardware; it ends with the node's container."""
    cluster.exec(f"setsid bash -c '{_HARDWARE}' </dev/null >/dev/null 2>&1 &", node=node)


def switch_on_by_hand(cluster: SlurmCluster, node: str) -> None:
    """Switch a node off and on as an administrator does, without Slurm; it boots."""
    cluster.exec(f"sh {POWER}/off {node}; sleep 2; sh {POWER}/on {node}")


def remember_idle_day(cluster: SlurmCluster, ledger: str) -> None:
    """Fill a ledger with a day without jobs: nothing sleeps in a controller's first day.

    One with a record of a day stays as it is, and so does one that cannot be opened.
    """
    cluster.exec([PYTHON, "-", ledger], user="selastic", stdin=_HISTORY)


def forget_present_bin(cluster: SlurmCluster, ledger: str) -> None:
    """Forget how many nodes were in use in these ten minutes, as if they had just begun.

    Nodes in use at any time of a bin count to its end. selasticd does not run.
    """
    cluster.exec([PYTHON, "-", ledger], user="selastic", stdin=_PRESENT_BIN)


def states(cluster: SlurmCluster) -> dict[str, str]:
    """Return Slurm's state of each node."""
    text = cluster.exec("scontrol -o show node").stdout
    return dict(re.findall(r"^NodeName=(\S+) .*? State=(\S+)", text, re.MULTILINE))


def asleep(cluster: SlurmCluster) -> list[str]:
    """Return the nodes that have no power, or lose or gain it."""
    return sorted(name for name, state in states(cluster).items() if "POWER" in state)


def _waking(cluster: SlurmCluster) -> list[str]:
    """Return the nodes that are asleep, but for those that have not booted in time."""
    found = states(cluster)
    return [name for name in asleep(cluster) if "DOWN" not in found[name].split("+")]


def without_power(cluster: SlurmCluster) -> list[str]:
    """Return the nodes that have no power, and do not gain it."""
    found = states(cluster).items()
    return sorted(name for name, state in found if "POWERED_DOWN" in state and "UP" not in state)
