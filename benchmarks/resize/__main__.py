"""Resizes of a training job by each kind of change: pause, duration, and what was lost.

    python -m benchmarks.resize [--kind in-place --kind restart --kind requeue] [--count 30]
                                [--parameters 1000000 --parameters 100000000]
                                [--json] [--cluster selastic]

One training on the container cluster goes 1 → 2 → 4 → 2 → 1 ranks over two nodes, through the
real engine, esrun and library, once by each kind of change and for each number of parameters. All
of one run share a machine: quote ratios. Per kind it prints, as median (least-most):

pause       from the end of the last step before a change to the begin of the first one after it
decision    from the decision to the first step in the new size
free        when GPUs are given up: from the notice until they are free
lost        steps that were computed again
difference  largest difference of a step's loss from that of an undisturbed run on one rank

Below the table: the parts of requeues, from the decision to the first step; of other changes the
pause when ranks join and when they leave.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ROOT
from benchmarks.support.container_commands import PYTHON, on_cluster, place_driver

SEQUENCE = Path(__file__).with_name("resize_sequence.py")
TRAINING = ROOT / "benchmarks" / "support" / "wide_training.py"
KINDS = ("in-place", "restart", "requeue")
FOLDER = "/shared/scratch/bench"
OUT = "/shared/home/alice/bench"
#: Parts of a requeue: name, and the marks of the transition between which it lies.
REQUEUE_PARTS = (
    ("until saved", "RESERVE", "saved"),
    ("until the nodes are free", "saved", "drained"),
    ("wait after the requeue", "drained", "RELEASE"),
    ("start by Slurm", "RELEASE", "running"),
    ("start of the ranks", "running", "first_step"),
)


def measure(cluster: str, kind: str, parameters: int, count: int) -> dict[str, Any]:
    """Return `changes`, a row each, and `steps`, the lines of wide_training.py."""
    script = (
        "#!/bin/bash\nexport OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
        f'[ "${{SLURM_RESTART_COUNT:-0}}" -gt 0 ] || {{ rm -rf {OUT}; mkdir {OUT}; }}\n'
        f"exec esrun python3 {FOLDER}/wide_training.py {OUT} --parameters {parameters}\n"
    )
    in_place = ",in-place=never" if kind == "requeue" else ",in-place=auto"
    options = (f"--elastic=1-4{in_place}", "--gres=gpu:a100:1", "-w", "g01", f"-o{OUT}.out")
    words = ("sbatch", "--parsable", "--open-mode=append", *options)
    job = on_cluster(cluster, *words, user="alice", stdin=script).split()[-1]
    driver = ("--job", job, "--count", str(count), "--kind", kind)
    try:
        output = on_cluster(cluster, PYTHON, f"{FOLDER}/{SEQUENCE.name}", *driver, user="selastic")
    finally:
        on_cluster(cluster, "scancel", "-s", "KILL", job)
    steps = on_cluster(cluster, "cat", f"{OUT}/steps.jsonl")
    return {"changes": _rows(output), "steps": _rows(steps)}


def undisturbed(cluster: str, parameters: int, steps: int) -> list[dict[str, Any]]:
    """Return the lines of a training of so many steps on one rank that nothing changes."""
    folder = f"{OUT}-undisturbed"
    train = f"python3 {FOLDER}/wide_training.py {folder} --parameters {parameters} --steps {steps}"
    words = ("sh", "-c", f"rm -rf {folder}; mkdir {folder}; OMP_NUM_THREADS=1 {train}")
    on_cluster(cluster, *words, user="alice")
    return _rows(on_cluster(cluster, "cat", f"{folder}/steps.jsonl"))


def figures(measured: dict[str, Any], reference: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of one kind and number of parameters."""
    changes, steps = measured["changes"], measured["steps"]
    done = [c for c in changes if not c["problem"]]
    marks = [c["entered"] for c in done]
    last = "first_step" if "first_step" in marks[0] else "switched"
    shrinks = [c["entered"] for c in done if c["to"] < c["from"]]
    pauses = [
        after["begin"] - before["end"]
        for before, after in itertools.pairwise(steps)
        if (before["world"], before["run"]) != (after["world"], after["run"])
    ]
    losses = {row["step"]: row["loss"] for row in reference}
    return {
        "changes": len(changes),
        "failed": [c["problem"] for c in changes if c["problem"]],
        "pause_s": pauses,
        "parts_s": _parts(done, pauses),
        "decision_s": [at[last] - at["RESERVE"] for at in marks],
        "free_s": [
            at.get("drained", at["DONE"]) - at.get("NOTIFY", at.get("LEAVE", 0.0)) for at in shrinks
        ],
        "step_s": statistics.median(row["end"] - row["begin"] for row in steps),
        "steps": len(steps),
        "lost": len(steps) - len({row["step"] for row in steps}),
        "missing": steps[-1]["step"] - len({row["step"] for row in steps}),
        "difference": max(abs(row["loss"] - losses[row["step"]]) for row in steps),
    }


def _parts(done: Sequence[dict[str, Any]], pauses: Sequence[float]) -> dict[str, list[float]]:
    """Return the parts of requeues; of other changes the pauses by direction."""
    if any("RELEASE" in change["entered"] for change in done):
        return {
            name: [change["entered"][end] - change["entered"][begin] for change in done]
            for name, begin, end in REQUEUE_PARTS
        }
    parts: dict[str, list[float]] = {}
    if len(done) == len(pauses):
        for change, pause_s in zip(done, pauses, strict=True):
            name = "pause, ranks join" if change["to"] > change["from"] else "pause, ranks leave"
            parts.setdefault(name, []).append(pause_s)
    return parts


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.resize")
    parser.add_argument("--kind", choices=KINDS, action="append", help="all, if left out")
    parser.add_argument("--parameters", type=int, action="append", help="1 M and 100 M")
    parser.add_argument("--count", type=int, default=30, help="changes of each kind")
    parser.add_argument("--cluster", default="selastic")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    up = [str(ROOT / "contrib/cluster/cluster"), "--name", args.cluster, "up"]
    subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    for program in (SEQUENCE, TRAINING):
        place_driver(args.cluster, program, FOLDER)
    rows = []
    for parameters in args.parameters or (10**6, 10**8):
        measured = {
            kind: measure(args.cluster, kind, parameters, args.count) for kind in args.kind or KINDS
        }
        steps = max(run["steps"][-1]["step"] for run in measured.values())
        reference = undisturbed(args.cluster, parameters, steps)
        for kind, run in measured.items():
            rows.append({"kind": kind, "parameters": parameters, **figures(run, reference)})
    print(json.dumps(rows)) if args.json else show(rows)


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print a table."""
    table = Table(box=None)
    for name in ("parameters", "kind", "changes", "pause", "decision", "free", "step"):
        table.add_column(name)
    for name in ("lost", "missing", "difference"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row['parameters'] / 1e6:g} M",
            row["kind"],
            f"{row['changes'] - len(row['failed'])} of {row['changes']}",
            *(spread(row[name]) for name in ("pause_s", "decision_s", "free_s")),
            f"{row['step_s']:.3g} s",
            *(str(row["lost"]), str(row["missing"]), f"{row['difference']:.1e}"),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    for row in rows:
        for name, values in row["parts_s"].items():
            print(f"{row['parameters'] / 1e6:g} M, {row['kind']}, {name}: {spread(values)}")
        for problem in row["failed"]:
            print(f"{row['kind']}: {problem}")


def spread(values: Sequence[float]) -> str:
    """Return median, least and most: `0.011 (0.007-0.018) s`."""
    if not values:
        return "-"
    return f"{statistics.median(values):.3g} ({min(values):.2g}-{max(values):.2g}) s"


def _rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


if __name__ == "__main__":
    main()
