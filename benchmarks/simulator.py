"""CPU seconds of simulated traces, by part.

    python -m benchmarks.simulator [WORKLOAD.csv ...] [--profiles DIR] [--data DIR] [--cluster C]
                                   [--policy sia] [--artifact-compat] [--clock round]
                                   [--replay TRACE] [--json]

Without a workload: `philly/workload-1.csv` of Sia's published data (docs/data.md), else the
built-in workload of 160 jobs. Parts are exclusive of each other: `fits` are throughput fits,
wherever they are asked for; `goodput matrix` the policy's predictions without these; `solver`
the integer program; `policy` the rest of it; `jobs` jobs making progress and choosing their
batches; `round` snapshots, eligibility, placement and plan; `rest` results and fairness.

`--replay` gives jobs what a recorded trace (`trace-philly-1.jsonl.gz`) gave them, round by
round, and counts where their state then differs: the simulator's truth without any policy.
"""

from __future__ import annotations

import argparse
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slurm_elastic.config.policy_settings import SiaSettings
from slurm_elastic.config.schema import Config, ControllerSettings
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.models import throughput
from slurm_elastic.policies import policy_protocol
from slurm_elastic.policies.milp import assignment_milp
from slurm_elastic.policies.sia.goodput_rows import Goodputs
from slurm_elastic.simulator import simulation
from slurm_elastic.simulator.applications import describe
from slurm_elastic.simulator.results import Result
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads import (
    application_profiles,
    builtin_profiles,
    cluster_text,
    generate,
    workload,
)
from slurm_elastic.simulator.workloads.workload import SubmittedJob, Workload
from tests.support import published_data

CLUSTER = "aws:6x4,dgx-ext:2x8,rtx:3x8"

#: A table with more entries has one for each job: of it only the mean is printed as text.
_FEW = 20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulator", description=__doc__.split("\n", maxsplit=1)[0]
    )
    parser.add_argument("workloads", nargs="*", type=Path)
    parser.add_argument("--profiles", type=Path, help="default: Sia's published ones")
    published_data.add_option(parser)
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--policy", default="sia")
    parser.add_argument("--artifact-compat", action="store_true")
    parser.add_argument("--clock", choices=("round", "event"), default="round")
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for jobs, tables, cluster in _inputs(parser, options):
        if options.replay:
            rows.append(replay(jobs, tables, cluster, options.replay))
        else:
            rows.append(measure(jobs, tables, cluster, options))
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for one in rows:
        for name, value in one.items():
            by_job = isinstance(value, dict) and len(value) > _FEW
            shown = sum(value.values()) / len(value) if by_job else value
            label = f"{name}, mean" if by_job else name
            print(f"{label:22} {shown:.3f}" if isinstance(shown, float) else f"{label:22} {shown}")
        print()


Inputs = tuple[Workload, dict[str, application_profiles.ApplicationProfile], cluster_text.Cluster]


def _inputs(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Inputs]:
    paths, tables_folder = options.workloads, options.profiles
    if not paths:
        philly = "workloads/philly/workload-1.csv"
        data = published_data.locate_optional(
            parser, options, "sia", philly, "traces", without="the built-in workload is taken"
        )
        if data is None:
            return [invented()]
        paths = [data / philly]
    if tables_folder is None:
        tables_folder = published_data.locate_or_exit(parser, options, "sia", "traces") / "traces"
    cluster = cluster_text.parse(options.cluster)
    read = [workload.read(path) for path in paths]
    names = {name for jobs in read for name in jobs.applications}
    tables = application_profiles.read(tables_folder, names, cluster.types)
    return [(jobs, tables, cluster) for jobs in read]


def invented(jobs: int = 160, hours: float = 8.0) -> Inputs:
    """Write the built-in profiles, and return a workload drawn for them."""
    cluster = cluster_text.parse(builtin_profiles.CLUSTER)
    lines = generate.generate(builtin_profiles.request_patterns(), jobs=jobs, hours=hours)
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        builtin_profiles.write(at / "profiles")
        with (at / "built-in.csv").open("w", newline="") as stream:
            generate.write(lines, stream)
        jobs_read = workload.read(at / "built-in.csv")
        return (
            jobs_read,
            application_profiles.read(at / "profiles", jobs_read.applications, cluster.types),
            cluster,
        )


def measure(
    jobs: Workload,
    tables: dict[str, application_profiles.ApplicationProfile],
    cluster: cluster_text.Cluster,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Simulate and account for the CPU seconds of this process."""
    config = Config(
        controller=ControllerSettings(policy=options.policy),
        sia=SiaSettings(artifact_compat=options.artifact_compat),
    )
    throughput._fit.cache_clear()  # noqa: SLF001 - a cold start is what is measured
    with _Account() as account:
        result: Result = simulation.simulate(
            jobs,
            tables,
            cluster,
            config=config,
            policy=policy_protocol.load(config),
            clock=options.clock,
        )
    figures = result.summary()
    parts = account.parts(result.cpu_s)
    return {
        "workload": result.workload,
        "policy": result.policy,
        "jobs": len(result.jobs),
        "rounds": len(result.rounds),
        "cpu_s": result.cpu_s,
        "parts_s": {name: round(value, 3) for name, value in parts.items()},
        "fits": account.calls["fits"],
        "round_ms": 1000 * parts["round"] / max(1, account.calls["round"]),
        "avg_jct_h": figures["avg_jct_h"],
        "gpu_h_per_job": figures["gpu_h_per_job"],
        "restarts_per_job": figures["restarts_per_job"],
    }


class _Account:
    """CPU seconds by part, each without the parts called within it."""

    def __init__(self) -> None:
        self._places: list[tuple[Any, str, str]] = [
            (throughput, "_fit", "fits"),
            (Goodputs, "rows", "goodput matrix"),
            (assignment_milp, "solve", "solver"),
            (simulation._Timed, "decide", "policy"),  # noqa: SLF001
            (simulation._Run, "_advance", "jobs"),  # noqa: SLF001
            (SimulatedJob, "hold", "jobs"),
            (simulation._Run, "_decide", "round"),  # noqa: SLF001
        ]
        self.seconds = dict.fromkeys((part for *_, part in self._places), 0.0)
        self.calls = dict.fromkeys(self.seconds, 0)
        self._inner = [0.0]
        self._before: list[Any] = []

    def __enter__(self) -> _Account:
        self._before = [getattr(owner, name) for owner, name, _ in self._places]
        for (owner, name, part), function in zip(self._places, self._before, strict=True):
            setattr(owner, name, self._counted(function, part))
        return self

    def __exit__(self, *_: object) -> None:
        for (owner, name, _part), function in zip(self._places, self._before, strict=True):
            setattr(owner, name, function)

    def parts(self, total_s: float) -> dict[str, float]:
        """Return all parts; `rest` is the time of none of them."""
        return {**self.seconds, "rest": total_s - sum(self.seconds.values())}

    def _counted(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        missed = getattr(function, "cache_info", None)

        def call(*args: Any, **more: Any) -> Any:
            misses = missed().misses if missed else 0
            self._inner.append(0.0)
            begin = time.process_time()
            try:
                return function(*args, **more)
            finally:
                spent = time.process_time() - begin
                self.seconds[part] += spent - self._inner.pop()
                self._inner[-1] += spent
                self.calls[part] += missed().misses - misses if missed else 1

        return call


def replay(
    jobs: Workload,
    tables: dict[str, application_profiles.ApplicationProfile],
    cluster: cluster_text.Cluster,
    trace: Path,
) -> dict[str, Any]:
    """Give jobs what a recorded trace gave them; see the module.

    Progress counts as different from 1e-4 relative on (the trace has four decimals).
    """
    began = time.process_time()
    truth = {name: GroundTruth(table) for name, table in tables.items()}
    running = {j.name: _job(j, truth[j.application], cluster) for j in jobs.jobs}
    different = dict.fromkeys(("epoch", "progress", "restarts", "batch"), 0)
    records = 0
    with gzip.open(trace, "rt") as lines:
        for line in lines:
            entry = json.loads(line)
            for job in running.values():
                if job.submitted.time_s < entry["t"] and job.completion_s is None:
                    job.advance(entry["t"])
            for name, epoch, progress, restarts, gpu_type, shape, micro, steps in entry["jobs"]:
                job = running[name]
                if not job.shape:
                    job.now_s = entry["t"]
                nodes = tuple((f"n{i}", g) for i, g in enumerate(shape))
                job.hold(Allocation(gpu_type, nodes) if shape else None)
                records += 1
                different["epoch"] += job.epoch != epoch
                different["progress"] += abs(job.progress - progress) > 1e-4 * max(1.0, progress)
                different["restarts"] += job.restarts != (restarts or 0)
                batch = (job.micro_batch, job.accumulation)
                different["batch"] += bool(shape) and batch != (micro, steps)
    return {
        "workload": jobs.name,
        "records": records,
        "different": different,
        "complete": sum(job.completion_s is not None for job in running.values()),
        "completion_s": {name: job.completion_s for name, job in running.items()},
        "gpu_s": {name: job.gpu_s for name, job in running.items()},
        "restarts": {name: job.restarts for name, job in running.items()},
        "cpu_s": time.process_time() - began,
    }


def _job(job: SubmittedJob, truth: GroundTruth, cluster: cluster_text.Cluster) -> SimulatedJob:
    return SimulatedJob(
        job,
        truth,
        describe(job, truth, cluster),
        job_id=1,
        restart_s=truth.profile.restart_s,
        compat=True,
    )


if __name__ == "__main__":
    main()
