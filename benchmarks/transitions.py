"""Many resizes at once on 64 nodes, while others wait for every GPU that gets free.

    python -m benchmarks.transitions [--count 20] [--rivals 100] [--json] [--cluster farm64]

The cluster is full. Elastic jobs that hold a whole node each all move on to the
next one's node, in one transaction, while one-GPU jobs of another user pend for
whatever gets free. Prints how long Slurm's part took, and whether every job
landed exactly as planned and no rival got a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.resize import ROOT, on_cluster, quantile

DRIVER = ROOT / "tests/cluster/drivers/resize.py"
PYTHON = "/opt/slurm-elastic/bin/python"
_QUIET = ("-o", "/dev/null", "--mem-per-gpu=100")


def measure(cluster: str, count: int, rivals: int) -> list[dict[str, Any]]:
    """One row for each transition: `state`, `problem`, `slurm_s`, `as_planned`."""
    up = [str(ROOT / "contrib/cluster/cluster"), "--name", cluster, "up", "--farm", "64"]
    subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    on_cluster(cluster, "tee", "/tmp/resize.py", stdin=DRIVER.read_text())  # noqa: S108
    free = on_cluster(cluster, "sinfo", "-hN", "-o", "%N %G").split()
    gpu_type = {n: g.split(":")[1] for n, g in zip(free[::2], free[1::2], strict=True)}
    nodes = sorted(gpu_type)
    try:
        movers = [_submit(cluster, "alice", node) for node in nodes[:count]]
        fillers = [_submit(cluster, "bob", node) for node in nodes[count:]]
        _wait(cluster, [*movers, *fillers])
        others = f"sbatch -Q --gres=gpu:1 {' '.join(_QUIET)} --job-name=rival --wrap 'sleep 300'"
        on_cluster(
            cluster,
            "bash",
            "-c",
            f"cd /tmp; for _ in $(seq {rivals}); do {others}; done",
            user="bob",
        )
        places = [*nodes[1:count], nodes[0]]
        plan = {job: [gpu_type[node], {node: 4}] for job, node in zip(movers, places, strict=True)}
        script = "/tmp/resize.py --ledger $(mktemp -u) --plan"  # noqa: S108
        words = ("bash", "-c", f'{PYTHON} {script} "$0"', json.dumps(plan))
        output = on_cluster(cluster, *words, user="selastic")
        stolen = on_cluster(cluster, "squeue", "-h", "-n", "rival", "-t", "R", "-o", "%i").split()
    finally:
        on_cluster(cluster, "scancel", "-u", "alice")
        on_cluster(cluster, "scancel", "-u", "bob")
    ended = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [
        {
            "job": row["job_id"],
            "state": row["state"],
            "problem": row["problem"],
            "slurm_s": row["seconds"]["slurm"],
            "as_planned": row["state"] == "DONE" and not stolen,
        }
        for row in ended
    ]


def _submit(cluster: str, user: str, node: str) -> str:
    elastic = ("--elastic=1-8",) if user == "alice" else ()
    words = ("sbatch", "--parsable", "--gres=gpu:4", "-w", node, *elastic, *_QUIET)
    return on_cluster(cluster, *words, "--wrap", "exec sleep 900", user=user).split()[-1]


def _wait(cluster: str, jobs: list[str]) -> None:
    listed = ",".join(jobs)
    check = f"[ $(squeue -h -t R -j {listed} | wc -l) = {len(jobs)} ]"
    script = f"for _ in $(seq 300); do {check} && exit; sleep 0.2; done; exit 1"
    on_cluster(cluster, "bash", "-c", script)


def main() -> None:
    """Measure and print; exit code 1 when a job did not land as planned."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transitions")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--rivals", type=int, default=100)
    parser.add_argument("--cluster", default="farm64")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.cluster, args.count, args.rivals)
    landed = sum(r["as_planned"] for r in rows)
    times = [r["slurm_s"] for r in rows if r["slurm_s"] is not None]
    result = {
        "count": args.count,
        "landed": landed,
        "p50_s": statistics.median(times),
        "p95_s": quantile(times, 0.95),
        "rows": rows,
    }
    if args.json:
        print(json.dumps(result))
    else:
        print(f"{landed} of {args.count} landed as planned, {args.rivals} rivals pending")
        print(f"Slurm's part: p50 {result['p50_s']:.2f} s, p95 {result['p95_s']:.2f} s")
        for row in rows:
            if not row["as_planned"]:
                print(f"job {row['job']}: {row['state']} {row['problem']}")
    sys.exit(0 if landed == args.count else 1)


if __name__ == "__main__":
    main()
