"""Twenty resizes at once on a full cluster of 64 nodes, with a hundred jobs waiting for a gap."""

import json
import os
import subprocess
import sys

from tests.support.cluster import CLUSTER_DIR, Cluster


def test_all_land_as_planned_and_nobody_steals(cluster: Cluster) -> None:
    name = f"{cluster.name}-farm"
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.transitions", "--json", "--cluster", name],
            cwd=CLUSTER_DIR.parents[1],
            env={**os.environ, "PYTHONPATH": str(CLUSTER_DIR.parents[1])},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr
        result = json.loads(done.stdout.splitlines()[-1])
        wrong = [r for r in result["rows"] if r["state"] != "DONE"]
        assert (result["landed"] >= 20, wrong) == (True, [])
        assert (result["stolen"], result["left"]) == ([], [])
        assert result["attempts"]["lost"] == 0
        assert result["attempts"]["resumed"] == result["landed"]
    finally:
        subprocess.run(
            [str(CLUSTER_DIR / "cluster"), "--name", name, "down"], capture_output=True, check=True
        )
