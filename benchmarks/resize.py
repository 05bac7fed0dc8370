"""Duration of a resize, from the notice to the first step at the new size.

    python -m benchmarks.resize [--count 30] [--requeues 3] [--json] [--cluster selastic]

One training job (docs/examples/train_library.py) on the container cluster goes
1 → 2 → 4 → 2 → 1 ranks over two nodes and from rack to rack, through the real
engine, esrun and library. Beside it, in the same run and alternating with the
blocks of resizes, plain `scontrol requeue`s of the same job. The machine is
shared: quote the ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("checkpoint", "slurm", "startup", "restore", "total")


def on_cluster(cluster: str, *words: str, user: str = "root", stdin: str = "") -> str:
    """Run a command in the cluster's head container; its output."""
    command = [str(ROOT / "contrib/cluster/cluster"), "--name", cluster]
    done = subprocess.run(
        [*command, "exec", "--user", user, "--", *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"benchmarks: {' '.join(words)[:80]}: {done.stderr.strip()[-400:]}")
    return done.stdout


def place_driver(cluster: str, name: str, folder: str) -> str:
    """Copy a driver of ours, and what it imports, into the head container; its path there."""
    shared = "benchmarks/drivers/manual_controller.py"
    on_cluster(cluster, "mkdir", "-p", f"{folder}/benchmarks/drivers")
    on_cluster(cluster, "tee", f"{folder}/{shared}", stdin=(ROOT / shared).read_text())
    driver = (ROOT / "benchmarks/drivers" / name).read_text()
    on_cluster(cluster, "tee", f"{folder}/{name}", stdin=driver)
    return f"{folder}/{name}"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie (nearest rank)."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(cluster: str, count: int, requeues: int) -> list[dict[str, Any]]:
    """Return rows `{"kind": "resize"|"requeue", "from", "to", "checkpoint", …, "total"}`."""
    up = [str(ROOT / "contrib/cluster/cluster"), "--name", cluster, "up"]
    subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    on_cluster(cluster, "mkdir", "-p", "/shared/scratch/bench")
    for name in ("train_library.py", "emulate.py"):
        text = (ROOT / "docs" / "examples" / name).read_text()
        on_cluster(cluster, "tee", f"/shared/scratch/bench/{name}", stdin=text)
    driver = place_driver(cluster, "resize.py", "/shared/scratch/bench")
    script = (
        "#!/bin/bash\nexport OMP_NUM_THREADS=1\n"
        "rm -rf /shared/home/alice/bench\n"
        "exec esrun python3 /shared/scratch/bench/train_library.py "
        "--out /shared/home/alice/bench --samples 4096 --epochs 100000 --rate 400\n"
    ).replace("rm -rf", '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] || rm -rf')
    options = (
        "--elastic=1-8",
        "--gres=gpu:a100:1",
        "-w",
        "g01",
        "-o",
        "/shared/home/alice/bench.out",
    )
    words = ("sbatch", "--parsable", *options)
    job = on_cluster(cluster, *words, user="alice", stdin=script).split()[-1]
    try:
        output = on_cluster(
            cluster,
            "/opt/slurm-elastic/bin/python",
            driver,
            *("--job", job, "--count", str(count), "--requeues", str(requeues)),
            user="selastic",
        )
    finally:
        on_cluster(cluster, "scancel", job)
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resize")
    parser.add_argument("--count", type=int, default=30, help="resizes")
    parser.add_argument("--requeues", type=int, default=3, help="plain requeues beside them")
    parser.add_argument("--cluster", default="selastic")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = measure(args.cluster, args.count, args.requeues)
    resizes = [r for r in rows if r["kind"] == "resize"]
    plain = [r["total"] for r in rows if r["kind"] == "requeue"]
    parts = {p: [r[p] for r in resizes if r.get(p) is not None] for p in PARTS}
    summary = {
        part: {"p50": statistics.median(v), "p95": quantile(v, 0.95), "count": len(v)}
        for part, v in parts.items()
        if v
    }
    ratio = statistics.median(plain) / summary["total"]["p50"] if plain else None
    if args.json:
        print(json.dumps({"resize_s": summary, "requeue_s": plain, "ratio": ratio, "rows": rows}))
        return
    print(f"{'seconds':12}{'p50':>8}{'p95':>8}   {len(resizes)} resizes, notice to first step")
    for part, values in summary.items():
        print(f"{part:12}{values['p50']:8.2f}{values['p95']:8.2f}")
    if ratio is not None:
        shown = ", ".join(f"{v:.1f}" for v in plain)
        print(f"plain scontrol requeue of the same job: {shown} s; {ratio:.1f} times slower")


if __name__ == "__main__":
    main()
