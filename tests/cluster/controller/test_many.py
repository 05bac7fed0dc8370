"""Twenty resizes at once on a full cluster of 64 nodes, with a hundred jobs waiting."""

import json
import os
import subprocess
import sys

import pytest

from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR, WAIT_FACTOR, SlurmCluster

ROOT = CLUSTER_DIR.parents[1]
#: On a calm machine it takes half as long.
TIMEOUT_S = 250 * WAIT_FACTOR


def test_all_land_as_planned_and_nobody_steals(cluster: SlurmCluster) -> None:
    farm = SlurmCluster(f"{cluster.name}-farm")
    bench = [sys.executable, "-m", "benchmarks.transitions", "--json", "--cluster", farm.name]
    bench += ["--notice", "60"]  # on a busy machine some jobs take more than the usual 10 s
    try:
        done = subprocess.run(
            bench,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
        assert done.stdout, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        wrong = [
            (r["id"], r["problem"], r["entered"]) for r in result["rows"] if r["state"] != "DONE"
        ]
        assert (result["landed"] >= 20, wrong) == (True, [])
        assert (result["stolen"], result["left"]) == ([], [])
        assert result["attempts"]["lost"] == 0
        assert result["attempts"]["resumed"] == result["landed"]
    except subprocess.TimeoutExpired as error:
        jobs = farm.exec("squeue -u alice; scontrol show res", check=False).stdout
        pytest.fail(f"not through in {TIMEOUT_S:.0f} s: {(error.stderr or b'')[-2000:]!r}\n{jobs}")
    finally:
        subprocess.run(
            [str(CLUSTER_DIR / "cluster"), "--name", farm.name, "down"],
            capture_output=True,
            check=True,
        )
