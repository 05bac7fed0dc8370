"""Slurm's configuration files, generated from a layout.

Runs in every container at its start, so all of them agree.
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from clusterlib.layout import CTLD_HOST, Layout
from clusterlib.slurm_build import series

# Explained line by line because people copy test clusters: some settings are for containers only.
SLURM_CONF = """\
ClusterName=elastic
SlurmctldHost=ctld({ctld})
SlurmUser=slurm
AuthType=auth/munge
StateSaveLocation=/var/lib/slurm/ctld
SlurmdSpoolDir=/var/lib/slurm/slurmd-%n
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd-%n.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd-%n.log

# Containers: no cgroups of our own, and nodes that claim more CPUs and memory than the host has.
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SlurmdParameters=config_overrides
MpiDefault=none
ReturnToService=2

# A dead node is noticed in about 20 s. KillWait and MinJobAge are Slurm's defaults.
SlurmdTimeout=15
KillWait=30
MinJobAge=300
JobRequeue=1
MaxJobCount=50000

SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes={gres_types}
DefMemPerCPU=500
TopologyPlugin=topology/tree

PriorityType=priority/multifactor
PriorityWeightAge=1000
PriorityWeightFairshare=10000
PriorityWeightQOS=1000
# Quick reaction on a small cluster: the main scheduler and backfill look every 5 s instead of
# every 60 and 30 s, and a submission waits at most 1 s instead of 3. A large site cannot afford it.
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5,bf_continue,batch_sched_delay=1

AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=ctld
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu,{typed_tres}
AccountingStoreFlags=job_comment,job_env,job_script

# A request wakes all of slurmctld's threads for connections: 80 by default, on a host of two cores.
SlurmctldParameters=conmgr_threads=4

JobSubmitPlugins=lua
PlugStackConfig=/etc/slurm/plugstack.conf

SlurmctldDebug=info
SlurmdDebug=info
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=ctld
SlurmUser=slurm
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=slurm
StorageLoc=slurm_acct_db
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurm/slurmdbd.pid
"""


def slurm_conf(layout: Layout) -> str:
    """Return slurm.conf."""
    types = sorted({node.gpu_type for node in layout.node_list()})
    head = SLURM_CONF.format(
        ctld=layout.host(CTLD_HOST),
        gres_types="gpu,shard" if layout.shards else "gpu",
        typed_tres=",".join(f"gres/gpu:{t}" for t in types),
    )
    names = ",".join(node.name for node in layout.node_list())
    partition = f"PartitionName=gpu Nodes={names} Default=YES MaxTime=7-0 State=UP"
    return "\n".join([head, *_node_lines(layout), partition, layout.extra_conf, ""])


def _node_lines(layout: Layout) -> list[str]:
    """Return the lines of the nodes: four CPUs and 4000 MB for each GPU, whatever the host has."""
    gpus = layout.gpus_per_node
    where = "NodeHostname=farm " if layout.farm else ""
    shards = f",shard:{layout.shards * gpus}" if layout.shards else ""
    return [
        f"NodeName={node.name} {where}NodeAddr={node.address} Port={node.port}"
        f" CPUs={4 * gpus} Sockets=1 CoresPerSocket={4 * gpus} ThreadsPerCore=1"
        f" RealMemory={4000 * gpus} Gres=gpu:{node.gpu_type}:{gpus}{shards}"
        f" Feature={node.gpu_type},rack{node.rack}"
        for node in layout.node_list()
    ]


def gres_conf(layout: Layout) -> str:
    """Return gres.conf; its devices must be character devices, which `cluster-start` makes."""
    files = (
        f"/dev/fakegpu[0-{layout.gpus_per_node - 1}]"
        if layout.gpus_per_node > 1
        else "/dev/fakegpu0"
    )
    lines = [
        f"NodeName={n.name} Name=gpu Type={n.gpu_type} File={files}" for n in layout.node_list()
    ]
    if layout.shards:
        count = layout.shards * layout.gpus_per_node
        lines += [f"NodeName={n.name} Name=shard Count={count}" for n in layout.node_list()]
    return "\n".join([*lines, ""])


def topology_conf(layout: Layout) -> str:
    """Return topology.conf: one switch per rack, one spine above."""
    racks = [
        f"SwitchName=rack{rack} Nodes={','.join(node.name for node in nodes)}"
        for rack, nodes in groupby(layout.node_list(), key=lambda node: node.rack)
    ]
    return "\n".join([*racks, f"SwitchName=spine Switches=rack[1-{len(racks)}]", ""])


def cgroup_conf(layout: Layout) -> str:
    """Return cgroup.conf: slurmd of 23.11 stops at the plugin `disabled`, which 24.05 has added."""
    plugin = "disabled" if series(layout.slurm) >= (24, 5) else "cgroup/v1"
    return f"CgroupPlugin={plugin}\n"


def main() -> None:
    """Write all files for the layout in the environment into the directory `argv[1]`."""
    layout, etc = Layout.from_environment(), Path(sys.argv[1])
    (etc / "slurm.conf").write_text(slurm_conf(layout))
    (etc / "gres.conf").write_text(gres_conf(layout))
    (etc / "topology.conf").write_text(topology_conf(layout))
    (etc / "cgroup.conf").write_text(cgroup_conf(layout))
    (etc / "slurmdbd.conf").write_text(SLURMDBD_CONF)


if __name__ == "__main__":
    main()
