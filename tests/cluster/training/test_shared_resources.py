"""What a training uses of network and storage reaches the controller as the kernel counts it."""

import json
import statistics
import time
from pathlib import Path
from typing import Any

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
        sent_per_step = sent / sum(begun <= at < ended for at in steps(cluster))

        def learned() -> dict[str, Any]:
            return ledger(cluster, daemon.home) or {}

        until(lambda: learned().get("sent") and learned().get("read"), seconds=120, what=daemon.log)
        found = learned()
        cluster.cancel()
        daemon.check_log()
    # In a step, whose time may differ under load. TCP adds its headers, Slurm and reports little.
    step_s = statistics.median(found["alone"][0][2])
    sent_bytes_s, read_bytes_s = found["sent"][0][1], found["read"][0][1]
    assert 0.8 < sent_bytes_s * step_s / sent_per_step < 1.2, (found, sent_per_step)
    assert 0.6 < read_bytes_s * step_s / 2**20 < 1.5, found


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


def ledger(cluster: SlurmCluster, home: str) -> dict[str, Any] | None:
    """Return the controller's measurements of neighbours; None: nothing yet."""
    command = [PYTHON, "-", f"{home}/ledger.sqlite"]
    found = cluster.exec(command, user="selastic", node="ctld", stdin=_LEARNED, check=False)
    value: dict[str, Any] | None = json.loads(found.stdout or "null")
    return value
