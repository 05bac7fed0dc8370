"""A container cluster whose two nodes have a core of this machine each."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.container_cluster.slurm_cluster import SlurmCluster, temporary_cluster

#: The a100 nodes of a cluster of four.
NODES = ("g01", "g02")


@contextmanager
def two_cores(name: str, home: str, driver: Path, *, gpus: int) -> Iterator[SlurmCluster]:
    """Yield a cluster whose a100 nodes have one core of this machine each.

    Args:
        name: of the cluster.
        home: folder of alice's, in which `driver` is then "training.py".
        driver: a training.
        gpus: of each node.
    """
    with temporary_cluster(name, "--nodes=4", f"--gpus-per-node={gpus}") as cluster:
        for core, node in enumerate(NODES):
            update = ["docker", "update", f"--cpuset-cpus={core}", f"{name}-{node}"]
            subprocess.run(update, check=True, stdout=subprocess.DEVNULL)
        cluster.exec(f"rm -rf {home}; mkdir -p {home}", user="alice")
        cluster.exec(f"cat >{home}/training.py", user="alice", stdin=driver.read_text())
        yield cluster
