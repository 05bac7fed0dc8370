"""Reproduction of Sia's published results: `python -m benchmarks.sia_tables`.

Replays the published workloads (docs/data.md) on the 64-GPU cluster of the
paper's Table 3 and prints ours beside what the authors' artifact produced for the same
files and beside the paper. By default as the artifact decides (`artifact_compat`);
`--paper` as the paper says; `--ablations` one rule at a time; `--variants` the classes and
the pipeline that the artifact could not run.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import math
import multiprocessing
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slurm_elastic.config.key import key_of
from slurm_elastic.config.policy_settings import SiaSettings as SiaConfig
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.application import JobClass
from slurm_elastic.policies.policy_protocol import load
from slurm_elastic.simulator.results import HOUR_S, Result, mean, summary
from slurm_elastic.simulator.simulation import simulate
from slurm_elastic.simulator.workloads import application_profiles, cluster_text, workload
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support import published_data

CLUSTER = "aws:6x4,dgx-ext:2x8,rtx:3x8"
#: Seconds between rounds, as published.
INTERVAL_S = {"gavel": 360.0}
#: The paper's Table 3: average JCT h, p99 h, makespan h, GPU h per job.
PAPER = {
    ("philly", "sia"): (0.6, 9.5, 14.2, 4.0),
    ("philly", "gavel"): (1.9, 30.0, 33.8, 9.0),
    ("saturn", "sia"): (0.7, 10.9, 14.9, 4.8),
    ("saturn", "gavel"): (2.5, 38.7, 43.0, 12.1),
    ("newtrace", "sia"): (0.7, 4.6, 52.2, 3.0),
    ("newtrace", "gavel"): (11.3, 98.1, 110.0, 6.4),
}
#: The rules of docs/sia-published.md, each of which the artifact follows.
RULES: tuple[str, ...] = next(
    key_of(f).choices for f in dataclasses.fields(SiaConfig) if f.name == "artifact_rules"
)
#: The figures that are compared.
FIGURES = ("avg_jct_h", "gpu_h_per_job", "restarts_per_job", "p99_jct_mean_h", "makespan_h")


@dataclass(frozen=True, kw_only=True)
class Run:
    """Arguments of one simulation; picklable."""

    label: str
    trace: str
    index: int
    policy: str = "sia"
    seed: int = 0
    compat: bool = True
    settings: tuple[tuple[str, Any], ...] = ()
    job_class: JobClass | None = None
    cluster: str = CLUSTER
    data: Path


def run(task: Run) -> tuple[Run, Result]:
    """Simulate one workload."""
    cluster = cluster_text.parse(task.cluster)
    jobs = (
        hybrid(task.index)
        if task.trace == "hybrid"
        else workload.read(task.data / "workloads" / task.trace / f"workload-{task.index}.csv")
    )
    sia = SiaConfig(artifact_compat=task.compat, **dict(task.settings))
    config = Config(
        controller=ControllerSettings(policy=task.policy, queue="controller", seed=task.seed),
        sia=sia,
    )
    result = simulate(
        jobs,
        application_profiles.read(task.data / "traces", jobs.applications, cluster.types),
        cluster,
        config=config,
        policy=load(config),
        interval_s=INTERVAL_S.get(task.policy, 60.0),
        seed=task.seed,
        job_class=task.job_class,
    )
    return task, dataclasses.replace(result, segments=())


def hybrid(seed: int) -> Workload:
    """Return two pipelines of a 2.8B GPT among twenty data-parallel jobs, over two hours (ours)."""
    jobs = [
        SubmittedJob(
            name=f"gpt_pmp-{i}", time_s=60.0 + 1800 * i, application="gpt_pmp", gpus=16, batch=384
        )
        for i in range(2)
    ]
    small = (("cifar10", 2048), ("bert", 192), ("deepspeech2", 320), ("yolov3", 64))
    for i in range(20):
        name, batch = small[(i + seed) % len(small)]
        jobs.append(
            SubmittedJob(
                name=f"{name}-{i}", time_s=360.0 * i, application=name, gpus=4, batch=batch
            )
        )
    return Workload.of(f"hybrid-{seed}", jobs)


def reference(data: Path, policy: str, trace: str, index: int) -> dict[str, float] | None:
    """Return the artifact's figures for one workload; None if they are not in the data."""
    path = data / "reference" / f"{policy}-{trace}-{index}.csv"
    if not path.is_file():
        return None
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    jct = sorted(float(r["jct_s"]) / HOUR_S for r in rows)
    last = max(float(r["completion_s"]) for r in rows)
    return {
        "avg_jct_h": mean(jct),
        "gpu_h_per_job": mean([float(r["gpu_seconds"]) / HOUR_S for r in rows]),
        "restarts_per_job": mean([float(r["restarts"]) for r in rows]),
        "p99_jct_mean_h": jct[int(0.99 * len(jct))],
        "makespan_h": (last - min(float(r["submission_s"]) for r in rows)) / HOUR_S,
    }


def available(data: Path, trace: str) -> list[int]:
    """Return the numbers of a trace's workloads, ascending."""
    files = (data / "workloads" / trace).glob("workload-*.csv")
    return sorted(int(p.stem.partition("-")[2]) for p in files)


def compare(label: str, results: Sequence[tuple[Run, Result]], data: Path) -> dict[str, Any]:
    """Return one row: means over workloads and seeds, their spread over seeds, the reference's."""
    row: dict[str, Any] = {"label": label, "runs": len(results)}
    seeds = sorted({task.seed for task, _ in results})
    of_seed = {}
    for seed in seeds:
        each = [summary((r,)) for task, r in results if task.seed == seed]
        of_seed[seed] = {f: mean([float(e[f]) for e in each]) for f in FIGURES}
    # The artifact ran all jobs as adaptive ones.
    workloads = {(t.policy, t.trace, t.index) for t, _ in results if t.job_class is None}
    theirs = [reference(data, *one) for one in sorted(workloads)]
    for figure in FIGURES:
        values = [of_seed[s][figure] for s in seeds]
        row[figure] = mean(values)
        row[f"{figure}_spread"] = (min(values), max(values))
        known = [t[figure] for t in theirs if t is not None]
        if known and len(known) == len(theirs):
            row[f"{figure}_reference"] = mean(known)
            row[f"{figure}_ratio"] = row[figure] / mean(known)
    row["cpu_s"] = mean([r.cpu_s for _, r in results])
    row["notes"] = sum(len(r.notes) for _, r in results)
    return row


def table(rows: Iterable[dict[str, Any]]) -> str:
    """Return rows as Markdown; ratios to the artifact's figures in brackets."""
    heads = ("avg JCT h", "GPU h/job", "restarts/job", "p99 h", "makespan h")
    lines = [f"| run | {' | '.join(heads)} | CPU s |", "|---" * (len(heads) + 2) + "|"]
    for row in rows:
        cells = []
        for figure in FIGURES:
            low, high = row[f"{figure}_spread"]
            text = f"{row[figure]:.3f}" if "restarts" not in figure else f"{row[figure]:.2f}"
            if high > low:
                text += f" ({low:.3f}..{high:.3f})"
            ratio = row.get(f"{figure}_ratio", math.nan)
            if not math.isnan(ratio):
                text += f" [{row[f'{figure}_reference']:.3f}, {ratio - 1:+.1%}]"
            cells.append(text)
        lines.append(f"| {row['label']} | {' | '.join(cells)} | {row['cpu_s']:.1f} |")
    return "\n".join(lines)


def tasks(options: argparse.Namespace, folder: Path) -> list[Run]:
    """Return the simulations that the options ask for."""
    data: dict[str, Any] = {"data": folder}
    if options.ablations:
        return [
            run
            for i in available(folder, "philly")
            if not options.workloads or i in options.workloads
            for seed in range(options.seeds)
            for run in _ablations({"trace": "philly", "index": i, "seed": seed} | data)
        ]
    base: dict[str, Any] = {"compat": not options.paper} | data
    compared = (folder / "reference").is_dir()
    if options.variants:
        return [run for seed in range(options.seeds) for run in _variants(base, seed)]
    return [
        Run(label=f"{trace}, {policy}", trace=trace, index=i, policy=policy, seed=seed, **base)
        for trace in options.traces
        for policy in options.policies
        for i in available(folder, trace)
        if options.paper or not compared or reference(folder, policy, trace, i) is not None
        if not options.workloads or i in options.workloads
        for seed in range(options.seeds if policy == "sia" else 1)
    ]


def _ablations(plain: dict[str, Any]) -> list[Run]:
    """Yield a workload with one thing changed at a time."""
    variants = [
        Run(label="as the artifact", compat=True, **plain),
        Run(label="as the paper", compat=False, **plain),
    ]
    changes: list[tuple[str, str, Any]] = [
        (f"paper, but {rule}", "artifact_rules", (rule,)) for rule in RULES
    ]
    changes += [
        ("paper, share = true", "share", True),
        ("paper, p = -1", "p", -1.0),
        ("paper, lambda_n = 4", "lambda_n", 4.0),
        ("paper, growth = 64", "growth", 64.0),
    ]
    for label, key, value in changes:
        variants.append(Run(label=label, compat=False, settings=((key, value),), **plain))
    return variants


def _variants(base: dict[str, Any], seed: int) -> list[Run]:
    """Yield philly-1 with all jobs of one class, and a pipeline among data-parallel jobs."""
    variants = []
    for job_class in JobClass:
        plain: dict[str, Any] = {"trace": "philly", "index": 1, "job_class": job_class} | base
        label = f"philly-1, all {job_class.value}"
        variants.append(Run(label=label, seed=seed, **plain))
        if job_class is JobClass.RIGID and not seed:
            variants.append(Run(label=f"{label}, gavel", policy="gavel", **plain))
    pipeline: dict[str, Any] = {"trace": "hybrid", "index": 1, "cluster": "dgx-ext:2x8,rtx:3x8"}
    return [*variants, Run(label="gpt_pmp among others", seed=seed, **pipeline, **base)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sia_tables", description=__doc__)
    parser.add_argument("--traces", nargs="+", default=["philly", "saturn"])
    parser.add_argument("--policies", nargs="+", default=["sia"])
    parser.add_argument("--workloads", nargs="+", type=int, help="only these numbers")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, where ties decide")
    parser.add_argument("--paper", action="store_true", help="without artifact_compat")
    parser.add_argument("--ablations", action="store_true", help="each rule alone, on philly")
    parser.add_argument("--variants", action="store_true", help="job classes and a pipeline")
    parser.add_argument("--processes", type=int, default=2)
    published_data.add_option(parser)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = published_data.locate_or_exit(parser, options, "sia", "traces", "workloads")
    published_data.locate_optional(
        parser, options, "sia", "reference", without="the artifact's figures are left out"
    )
    began = time.perf_counter()
    todo = tasks(options, folder)
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(options.processes, len(todo) or 1)) as pool:
        done = list(pool.imap(run, todo))
    labels = dict.fromkeys(task.label for task in todo)
    rows = [compare(x, [d for d in done if d[0].label == x], folder) for x in labels]
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    print(table(rows))
    for trace, policy in dict.fromkeys((t.trace, t.policy) for t in todo):
        if (trace, policy) in PAPER and not (options.ablations or options.variants):
            jct, p99, makespan, gpu = PAPER[trace, policy]
            print(
                f"paper's Table 3, {trace}, {policy}: avg JCT {jct} h, p99 {p99} h,"
                f" makespan {makespan} h, GPU h/job {gpu}"
            )
    print(f"{len(done)} simulations in {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
