"""Limits that a site sets on partitions and QOS, known to selasticd or not."""

import time
from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import Daemon, gpus, held, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

SITE = """
scontrol create PartitionName=cpus8 Nodes=g01 MaxCPUsPerNode=8 State=UP
scontrol create PartitionName=mem4 Nodes=g02 MaxMemPerNode=4000 State=UP
scontrol create PartitionName=oneuser Nodes=g03,g05 ExclusiveUser=YES State=UP
scontrol create PartitionName=cpusgpu Nodes=g04 JobDefaults=DefCpuPerGPU=3 State=UP
scontrol create PartitionName=aside Nodes=g01 State=UP
sacctmgr -iQ add qos pernode set MaxTRESPerNode=gres/gpu=2
sacctmgr -iQ add qos jobminutes set MaxTRESMinsPerJob=gres/gpu=60
sacctmgr -iQ add qos unknown set MaxTRESRunMinsPerUser=gres/gpu=60
sacctmgr -iQ add qos onejob set MaxJobsPerUser=1
sacctmgr -iQ add qos over set MaxTRES=gres/gpu=3
sacctmgr -iQ modify user alice set qos+=pernode,jobminutes,unknown,onejob
sacctmgr -iQ modify user bob set qos+=over MaxTRES=gres/gpu=1
"""
NO_SITE = """
for name in cpus8 mem4 oneuser cpusgpu aside; do scontrol delete PartitionName=$name; done
sacctmgr -iQ modify user alice set qos-=pernode,jobminutes,unknown,onejob
sacctmgr -iQ modify user bob set qos-=over MaxTRES=gres/gpu=-1
sacctmgr -iQ delete qos pernode jobminutes unknown onejob over
"""


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(SITE, check=False)
    with running(cluster) as daemon:
        yield daemon
    cluster.exec(NO_SITE, check=False)


@pytest.fixture(autouse=True)
def no_jobs_are_left(cluster: SlurmCluster) -> Iterator[None]:
    yield
    cluster.cancel()


def elastic(cluster: SlurmCluster, *options: str, directive: str = "1-4") -> int:
    return cluster.sbatch("exec sleep 600", f"--elastic={directive}", "-o/dev/null", *options)


def test_growth_keeps_to_limits_of_partitions_and_qos(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    begun = len(daemon.log())
    cluster.sbatch("exec sleep 600", "-poneuser", "-wg05", "-c1", "-o/dev/null", user="bob")
    sizes = {
        elastic(cluster, "-pcpus8", "-c4", "--gres=gpu:1"): 2,
        elastic(cluster, "-pmem4", "--mem=1500", "--gres=gpu:1"): 2,
        elastic(cluster, "-poneuser", "-wg03", directive="1-8"): 4,
        elastic(cluster, "--qos=pernode", "-wg06", "-xg03,g05", directive="1-4,sizes=1:2:4"): 2,
    }
    per_gpu = elastic(cluster, "-pcpusgpu", "--qos=jobminutes", "-t20")
    until(
        lambda: {j: gpus(cluster, j) for j in (*sizes, per_gpu)} == sizes | {per_gpu: 3},
        seconds=60,
        what=lambda: [held(cluster, j) for j in (*sizes, per_gpu)],
    )
    assert shown(cluster, per_gpu)["cpus"]["number"] == 9
    time.sleep(4)
    assert {j: gpus(cluster, j) for j in sizes} == sizes
    assert "Problem=" not in daemon.log()[begun:]


def test_jobs_are_not_requeued_where_that_would_harm_them_or_help_nobody(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    """Others would start in their place; whole nodes cannot be divided; racks were limited."""
    whole = elastic(cluster, "--exclusive", "--gres=gpu:1", "-wg03", directive="1-3")
    array = elastic(cluster, "--array=0-1%1", "-wg04", "-Jraw")
    one = elastic(cluster, "--qos=onejob", "-wg05", "-Jraw")
    cluster.wait(one, "RUNNING")
    cluster.sbatch("exec sleep 600", "--qos=onejob", "-wg05", "--gres=gpu:1", "-o/dev/null")
    near = elastic(cluster, "--switches=1", "-wg01", directive="1-12,types=a100,sizes=1:8:12")
    sockets = ("--gpus-per-socket=1", "--sockets-per-node=1", "--qos=over", "-wg06")
    over = cluster.sbatch("exec sleep 600", "--elastic=1-4", "-o/dev/null", *sockets, user="bob")
    waiting = "squeue -h -t PD -o %r | sort -u | tr '\\n' ' '"
    limits = "JobArrayTaskLimit QOSMaxJobsPerUserLimit "
    until(lambda: cluster.exec(waiting).stdout == limits, what=lambda: cluster.exec(waiting).stdout)
    for job in (one, f"{array}_0"):
        cluster.exec(["scontrol", "update", f"jobid={job}", "JobName=now"])  # proven from now on
    sizes = {near: 8, over: 3}
    until(
        lambda: {j: gpus(cluster, j) for j in sizes} == sizes,
        what=lambda: [held(cluster, j) for j in sizes],
    )
    cluster.sbatch("exec sleep 600", "--exclusive", "--gres=gpu:1", "-wg06", "-o/dev/null")
    until(
        lambda: (
            "(QOSMaxJobsPerUserLimit) and would start in its place"
            in " ".join(daemon.selastic("explain", str(one)).split())
        )
    )
    time.sleep(4)
    for job, held_gpus, runs in (
        *((whole, 4, 0), (f"{array}_0", 1, 0), (one, 1, 0)),
        *((near, 8, 1), (over, 3, 1)),
    ):
        assert (gpus(cluster, job), shown(cluster, job)["restart_cnt"]) == (held_gpus, runs), job


def test_a_limit_that_is_not_known_costs_two_changes_and_no_more(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job = elastic(cluster, "--qos=unknown", "-wg04", "-t40", directive="1-4,sizes=1:4")
    barred = "4 a100 (Slurm did not start it (MaxGRESRunMinsPerUser)); `selastic release"
    until(
        lambda: barred in " ".join(daemon.selastic("explain", str(job), check=False).split()),
        seconds=60,
        what=lambda: daemon.selastic("explain", str(job), check=False),
    )
    cluster.wait(job, "RUNNING")
    time.sleep(6)
    assert gpus(cluster, job) == 1
    assert daemon.log().count(f"JobId={job} Action=grow") == 2


def test_a_job_is_not_requeued_into_a_partition_that_is_down(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job = elastic(cluster, "-paside")
    until(lambda: gpus(cluster, job) == 4, seconds=60)
    cluster.exec("scontrol update PartitionName=aside State=DOWN")
    try:
        until(lambda: "partition aside is not up" in daemon.selastic("explain", str(job)))
        run = shown(cluster, job)["restart_cnt"]
        rigid = cluster.sbatch("exec sleep 600", "-pgpu", "--gres=gpu:2", "-wg01", "-o/dev/null")
        time.sleep(6)
        assert cluster.state(rigid) == "PENDING"
        assert (gpus(cluster, job), shown(cluster, job)["restart_cnt"]) == (4, run)
    finally:
        cluster.exec("scontrol update PartitionName=aside State=UP")
    cluster.wait(rigid, "RUNNING", timeout=60)
