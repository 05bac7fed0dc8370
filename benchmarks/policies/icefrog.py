"""Gain of layer freezing in simulation: `python -m benchmarks.policies.icefrog`.

The published workloads philly 1-4 and saturn 1-5 (docs/data.md) on the 64-GPU cluster of
Sia's Table 3, a round a minute. `fifo`, `las` and `sia` where no job freezes layers; then, for
each belief about freezing (simulator/truth/freezing_truth.py), `sia` with jobs that freeze all they
may and a scheduler that does not know it, which separates what freezing is worth by itself from
what scheduling with it adds, and `icefrog`. `--quick` takes philly-1 alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sia_tables import CLUSTER
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.simulator.parallel_runs import Task, run_all
from slurm_elastic.simulator.results import Result, summary
from slurm_elastic.simulator.truth.freezing_truth import BELIEFS
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from tests.support import published_data

WORKLOADS = tuple(("philly", i) for i in range(1, 5)) + tuple(("saturn", i) for i in range(1, 6))
#: (policy, belief); "" without freezing.
ROWS = (
    ("sia", ""),
    *((p, b) for b in ("central", "optimistic", "pessimistic") for p in ("sia", "icefrog")),
    ("las", ""), ("fifo", ""), ("las", "central"), ("fifo", "central"),
)  # fmt: skip
_FIGURES = ("avg_jct_h", "p99_jct_h", "makespan_h", "gpu_h_per_job", "restarts_per_job")


def task(policy: str, belief: str, name: tuple[str, int], data: Path) -> Task:
    """Return one simulation."""
    cluster = cluster_text.parse(CLUSTER)
    jobs = workload.read(data / "workloads" / name[0] / f"workload-{name[1]}.csv")
    return Task(
        workload=jobs,
        profiles=application_profiles.read(data / "traces", jobs.applications, cluster.types),
        cluster=cluster,
        config=Config(controller=ControllerSettings(policy=policy, queue="controller")),
        freezing=belief or None,
    )


def figures(results: Sequence[Result], base: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return one row's figures; `base`: those of sia without freezing."""
    totals = summary(results)
    row = {name: totals[name] for name in _FIGURES}
    row |= {n: totals.get(n, 0.0) for n in ("freezing_layers", "freezing_lost")}
    each = [r.summary()["avg_jct_h"] for r in results]
    row["each_avg_jct_h"] = each
    row["vs_sia"] = row["avg_jct_h"] / (base or row)["avg_jct_h"] - 1
    return row


def line(policy: str, belief: str, row: Mapping[str, Any]) -> str:
    """Return a line of a Markdown table."""
    return (
        f"| {policy} | {belief or 'nobody freezes'} | {row['avg_jct_h']:.3f} |"
        f" {row['vs_sia']:+.1%} | {row['p99_jct_h']:.2f} | {row['gpu_h_per_job']:.2f} |"
        f" {row['restarts_per_job']:.2f} | {row['freezing_layers']:.1%} |"
        f" {row['freezing_lost']:.2%} |"
    )


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policies.icefrog", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="philly-1 alone")
    parser.add_argument("--processes", type=int, default=1)
    published_data.add_option(parser)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    data = published_data.locate_or_exit(parser, args, "sia", "traces", "workloads")
    names = WORKLOADS[:1] if args.quick else WORKLOADS
    print("| policy | freezing | avg JCT h | against sia | p99 h | GPU h per job | restarts |"
          " layers frozen | progress lost |\n|---|---|---|---|---|---|---|---|---|")  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    runs: dict[tuple[str, str], list[Result]] = {}
    for policy, belief in ROWS:
        tasks = [task(policy, belief, name, data) for name in names]
        results = runs[policy, belief] = run_all(tasks, processes=args.processes)
        base = figures(runs["sia", ""], None)
        row = rows[f"{policy} {belief}".strip()] = figures(results, base)
        print(line(policy, belief, row), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    print("\nicefrog against sia whose jobs freeze as much as they may:")
    for belief in BELIEFS:
        one, other = rows[f"icefrog {belief}"], rows[f"sia {belief}"]
        pairs = zip(one["each_avg_jct_h"], other["each_avg_jct_h"], strict=True)
        gains = [a / b - 1 for a, b in pairs]
        better = sum(g < 0 for g in gains)
        print(
            f"  {belief}: avg JCT {one['avg_jct_h'] / other['avg_jct_h'] - 1:+.1%}, GPU hours"
            f" {one['gpu_h_per_job'] / other['gpu_h_per_job'] - 1:+.1%}; better in {better} of"
            f" {len(gains)} workloads, {min(gains):+.1%} to {max(gains):+.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
