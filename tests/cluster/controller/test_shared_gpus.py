"""selasticd on a real cluster whose GPUs may be shared: jobs ask for shards of them."""

from collections.abc import Iterator

import pytest

from tests.support.container_cluster.selasticd import gpus, running
from tests.support.container_cluster.slurm_cluster import (
    SlurmCluster,
    cluster_name,
    temporary_cluster,
    until,
)

SLEEP = "exec sleep 600"


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with temporary_cluster(f"{cluster_name()}-shards", "--nodes=1", "--shards=2") as cluster:
        yield cluster


def test_an_elastic_job_takes_no_gpu_that_others_share_and_gives_way_to_them(
    cluster: SlurmCluster,
) -> None:
    def half() -> int:
        return cluster.sbatch(SLEEP, "--gres=shard:1", "-o/dev/null", user="bob")

    with running(cluster) as daemon:
        assert "slurmctld is read through json" in daemon.log()
        cluster.wait(half(), "RUNNING")
        job = cluster.sbatch(SLEEP, "--elastic=1-4", "-o/dev/null", "-t10")
        until(lambda: gpus(cluster, job) == 3, what=daemon.log)
        # The other half of the GPU is free; for the next one the elastic job gives way.
        cluster.wait(half(), "RUNNING")
        third = half()
        cluster.wait(third, "RUNNING")
        until(lambda: gpus(cluster, job) == 2, what=daemon.log)
        until(lambda: '"used": 4' in daemon.selastic("topology", "--json"), what=daemon.log)
        # Nothing is tried for a fourth GPU.
        log = daemon.log()
        assert "To='4 " not in log, log
        daemon.check_log()
