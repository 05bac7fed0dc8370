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
sacctmgr -iQ modify user alice set qos+=pernode,jobminutes,unknown
"""
NO_SITE = """
for name in cpus8 mem4 oneuser cpusgpu aside; do scontrol delete PartitionName=$name; done
sacctmgr -iQ modify user alice set qos-=pernode,jobminutes,unknown
sacctmgr -iQ delete qos pernode jobminutes unknown
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
