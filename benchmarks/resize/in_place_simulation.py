"""Benefit of changes in place, in simulation: `python -m benchmarks.resize.in_place_simulation`.

Policy `sia` (or `goodput`: `--policy`), a round a minute, on the published workloads philly, saturn
and newtrace (docs/data.md) on the 64-GPU cluster of Sia's Table 3, and on invented workloads
(docs/simulator-model.md), by the kind of change that jobs can have:

* `requeue`: the published simulation, in which a move to other nodes in the same shape is free;
* `requeue, moves too`: such a move is a restart, as on a real cluster;
* `ranks`: the ranks are restarted on the base and other companions;
* `in place`: new ranks take part after as many seconds as the application takes to restart;
* `in place, 4.3 s`: after the seconds that were measured with a small script.

The last three charge moves as well. Ratios are to `requeue, moves too`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.sia_tables import CLUSTER, available
from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.simulator.parallel_runs import Task, run_all
from slurm_elastic.simulator.results import Result, summary
from slurm_elastic.simulator.truth.resize_costs import ResizeCosts
from slurm_elastic.simulator.workloads import (
    application_profiles,
    builtin_profiles,
    cluster_text,
    generate,
    workload,
)
from slurm_elastic.simulator.workloads.application_profiles import Profiles
from slurm_elastic.simulator.workloads.workload import Workload
from tests.support import published_data

PUBLISHED = ("philly", "saturn", "newtrace")
INVENTED = "invented"
INVENTED_SEEDS = 4
BASE = "requeue, moves too"
KINDS: Mapping[str, Mapping[str, Any]] = {
    "requeue": {},
    BASE: {"moves_restart": True},
    "ranks": {"resizes": ResizeCosts(cheapest=ResizeKind.RESTART)},
    "in place": {"resizes": ResizeCosts()},
    "in place, 4.3 s": {"resizes": ResizeCosts(join_s=4.3)},
}
_FIGURES = (
    *("avg_jct_h", "p99_jct_mean_h", "gpu_h_per_job", "gpu_h_lost_per_job"),
    *("restarts_per_job", "in_place_per_job"),
)


def invented(seed: int) -> tuple[Workload, Profiles]:
    """Return 160 jobs of the built-in applications in 8 hours, as `selastic simulate` does."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        builtin_profiles.write(folder)
        lines = generate.generate(
            builtin_profiles.request_patterns(), jobs=160, hours=8.0, seed=seed
        )
        path = folder / f"invented-{seed}.csv"
        with path.open("w", encoding="utf-8") as stream:
            generate.write(lines, stream)
        jobs = workload.read(path)
        types = cluster_text.parse(builtin_profiles.CLUSTER).types
        return jobs, application_profiles.read(folder, jobs.applications, types)


def published(trace: str, index: int, data: Path) -> tuple[Workload, Profiles]:
    """Return one published workload."""
    jobs = workload.read(data / "workloads" / trace / f"workload-{index}.csv")
    types = cluster_text.parse(CLUSTER).types
    return jobs, application_profiles.read(data / "traces", jobs.applications, types)


def tasks(
    loaded: Sequence[tuple[Workload, Profiles]], cluster: str, kind: str, config: Config
) -> list[Task]:
    """Return the simulations of one row."""
    return [
        Task(
            workload=jobs,
            profiles=profiles,
            cluster=cluster_text.parse(cluster),
            config=config,
            **KINDS[kind],
        )
        for jobs, profiles in loaded
    ]


def figures(results: Sequence[Result]) -> dict[str, float]:
    """Return one row's figures."""
    totals = summary(results)
    return {name: totals[name] for name in _FIGURES}


def line(trace: str, kind: str, row: Mapping[str, float], base: Mapping[str, float]) -> str:
    """Return a line of a Markdown table."""
    ratio = row["avg_jct_h"] / base["avg_jct_h"]
    return (
        f"| {trace} | {kind} | {row['avg_jct_h']:.3f} | {ratio:.3f} |"
        f" {row['p99_jct_mean_h']:.2f} | {row['gpu_h_per_job']:.2f} |"
        f" {row['gpu_h_lost_per_job']:.2f} | {row['restarts_per_job']:.2f} |"
        f" {row['in_place_per_job']:.2f} |"
    )


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.resize.in_place_simulation",
        description=__doc__.partition("\n")[0],
    )
    parser.add_argument("--traces", nargs="+", default=[*PUBLISHED, INVENTED])
    parser.add_argument("--workloads", nargs="+", type=int, help="only these numbers")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--policy", choices=("sia", "goodput"), default="sia")
    parser.add_argument("--share", action="store_true", help="[sia] share = true, growth = 64")
    parser.add_argument("--processes", type=int, default=1)
    published_data.add_option(parser)
    parser.add_argument("--json", type=Path, help="also write all figures here")
    args = parser.parse_args()
    data = Path()
    if set(args.traces) != {INVENTED}:
        data = published_data.locate_or_exit(parser, args, "sia", "traces", "workloads")
    config = Config(
        controller=ControllerSettings(policy=args.policy, queue="controller"),
        sia=SiaSettings(share=True, growth=64.0) if args.share else SiaSettings(),
    )
    print(
        "| workloads | kind | avg JCT h | ratio | p99 h | GPU h per job | of these lost |"
        " restarts per job | in place per job |\n" + "|---" * 9 + "|"
    )
    rows: dict[str, dict[str, dict[str, float]]] = {}
    for trace in args.traces:
        own = trace == INVENTED
        indexes = range(1, INVENTED_SEEDS + 1) if own else available(data, trace)
        wanted = [i for i in indexes if not args.workloads or i in args.workloads]
        loaded = [invented(i) if own else published(trace, i, data) for i in wanted]
        cluster = builtin_profiles.CLUSTER if own else CLUSTER
        of_trace = rows[f"{trace} ({len(loaded)})"] = {}
        for kind in sorted(args.kinds, key=lambda k: k != BASE):
            results = run_all(tasks(loaded, cluster, kind, config), processes=args.processes)
            of_trace[kind] = figures(results)
        base = of_trace.get(BASE) or next(iter(of_trace.values()))
        for kind in args.kinds:
            print(line(f"{trace} ({len(loaded)})", kind, of_trace[kind], base), flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
