"""What a training uses of network and storage reaches the controller as the kernel counts it."""

import json
import time
from pathlib import Path

from tests.support.container_cluster.selasticd import PYTHON, eager_config, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "exchanging.py"
OUT = "/shared/home/alice/exchanging"
#: Prints what a controller has learned of neighbours.
_LEARNED = """
import sqlite3, sys
db = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
row = db.execute("SELECT value FROM meta WHERE name = 'neighbour_speeds'").fetchone()
print(row[0] if row else "null")
"""
SECONDS = 20.0


def test_the_bytes_between_nodes_and_from_storage_are_those_of_the_kernel(
    cluster: SlurmCluster,
) -> None:
    cluster.exec(f"rm -rf {OUT}; mkdir {OUT}; cat >{OUT}/training.py", user="alice",
                 stdin=DRIVER.read_text())  # fmt: skip
    with running(cluster, eager_config(mode="observe"), reporters=()) as daemon:
        job = cluster.sbatch(
            f"export OMP_NUM_THREADS=1\nexec esrun python3 {OUT}/training.py {OUT}",
            *("--elastic=2-2,types=a100", "-N2", "-wg01,g02", "--gpus-per-node=a100:1"),
            *("--ntasks-per-node=1", "-t10", f"--output={OUT}.log"),
        )
        cluster.wait(job, "RUNNING")
        until(lambda: len(steps(cluster)) > 50, seconds=90, what=lambda: text(cluster))
        begun, sent_before = time.time(), sent_bytes(cluster)
        time.sleep(SECONDS)
        ended, sent = time.time(), sent_bytes(cluster) - sent_before
        rate = sum(begun <= at < ended for at in steps(cluster)) / (ended - begun)

        def learned() -> dict[str, float]:
            found = ledger(cluster, daemon.home) or {}
            return {k: found[k][0][1] for k in ("sent", "read") if found.get(k)}

        until(lambda: len(learned()) == 2, seconds=120, what=daemon.log)
        values = learned()
        cluster.cancel()
        daemon.check_log()
    # A rank of two passes on what it has; TCP adds its headers, Slurm and reports little.
    assert 0.75 < values["sent"] * (ended - begun) / sent < 1.15, (values, sent)
    assert 0.6 < values["read"] / (rate * 2**20) < 1.5, (values, rate)


def steps(cluster: SlurmCluster) -> list[float]:
    """Return the times of the steps that are done."""
    found = cluster.exec(f"cat {OUT}/steps 2>/dev/null || true").stdout
    return [float(line) for line in found.split("\n")[:-1]]


def text(cluster: SlurmCluster) -> str:
    """Return the job's log."""
    return cluster.exec(f"tail -c 3000 {OUT}.log", check=False).stdout


def sent_bytes(cluster: SlurmCluster) -> int:
    """Return the bytes that the first node has sent."""
    counter = "/sys/class/net/eth0/statistics/tx_bytes"
    return int(cluster.exec(f"cat {counter}", node="g01").stdout)


def ledger(cluster: SlurmCluster, home: str) -> dict[str, list[list[float]]] | None:
    """Return what the controller has learned of neighbours; None: nothing yet."""
    command = [PYTHON, "-", f"{home}/ledger.sqlite"]
    found = cluster.exec(command, user="selastic", node="ctld", stdin=_LEARNED, check=False)
    value: dict[str, list[list[float]]] | None = json.loads(found.stdout or "null")
    return value
