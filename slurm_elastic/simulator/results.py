"""Results of a simulation: figures of each job and each round, and their summary.

Definitions (after `print_run_stats.py` of Sia's artifact, SOSP'23, section 5):
JCT = completion less submission; makespan = last completion less first
submission; p99 = `sorted[int(0.99 n)]`, pooled over workloads, and beside it
the mean of each workload's own; contention of a round = jobs submitted and not
complete (means are over time). GPU hours count every second that a job held its GPUs, restarts
included.

Finish-time fairness rho of a job is its JCT over the time it would take alone on its share of
the cluster, by our own definition: see `slurm_elastic.simulator.fairness`.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slurm_elastic.core.reason import Reason

HOUR_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of one job. Times are seconds since the workload's start.

    Attributes:
        gpu_s: GPU seconds held.
        lost_gpu_s: of these, held while restarting or waiting for new ranks.
        restarts: restarts after the first start.
        changes_in_place: changes of its GPUs without a restart.
        contention: mean over the rounds of its life.
        rho: finish-time fairness, see the module; NaN: not computed.
    """

    name: str
    application: str
    job_class: str
    submission_s: float
    start_s: float
    completion_s: float
    jct_s: float
    restarts: int
    gpu_s: float
    lost_gpu_s: float
    contention: float
    rho: float = math.nan
    changes_in_place: int = 0


@dataclass(frozen=True, slots=True)
class JobFreezing:
    """Effect of frozen layers on one job.

    Attributes:
        name: name of the job.
        lost: extra progress needed because of freezing, as a fraction of the job's progress.
        layers: mean fraction of its layers that was frozen while it trained.
    """

    name: str
    lost: float
    layers: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Allocation that a job held from `begin_s` to `end_s`."""

    job: str
    begin_s: float
    end_s: float
    gpu_type: str
    #: GPUs on each of its nodes.
    shape: tuple[int, ...]

    @property
    def gpus(self) -> int:
        """GPUs over all nodes."""
        return sum(self.shape)


@dataclass(frozen=True, slots=True)
class RoundResult:
    """One round: its time, the jobs submitted and not complete, GPUs and nodes in use after it."""

    time_s: float
    contention: int
    #: (type, GPUs held).
    held: tuple[tuple[str, int], ...]
    nodes: int = 0


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of one workload under one policy.

    Attributes:
        workload, policy, cluster: names for display.
        gpus: (type, GPUs) of the cluster.
        nodes: number of nodes of the cluster.
        jobs: in order of submission.
        segments: allocations of all jobs, in order of their ends.
        policy_s: CPU seconds of each call of the policy.
        cpu_s: CPU seconds of the whole simulation.
        crossing_gpu_s: GPU seconds lost to crossing racks (truth/rack_network.py).
        freezing: results of the jobs that may freeze layers.
        dropped: names of jobs that the policy dropped; `jobs` has the others.
    """

    workload: str
    policy: str
    cluster: str
    gpus: tuple[tuple[str, int], ...]
    jobs: tuple[JobResult, ...]
    rounds: tuple[RoundResult, ...]
    segments: tuple[Segment, ...]
    policy_s: tuple[float, ...]
    cpu_s: float
    #: Unusual events of decisions, e.g. a solver's time limit.
    notes: tuple[Reason | str, ...] = ()
    crossing_gpu_s: float = 0.0
    freezing: tuple[JobFreezing, ...] = ()
    dropped: tuple[str, ...] = ()
    nodes: int = 0

    def summary(self) -> dict[str, Any]:
        """Return the figures of this workload; see `summary`."""
        return summary((self,))


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Return figures over the workloads of one trace; times in hours and milliseconds.

    Averages are over all jobs but those `dropped` (a key only where there are any), with frozen
    layers also those of `JobFreezing`; `makespan_h`,
    `contention` and the `*_mean_h` keys are means of each workload's own figure, and `*_std` keys
    their standard deviation.
    """
    jobs = [j for r in results for j in r.jobs]
    jct = sorted(j.jct_s / HOUR_S for j in jobs)
    jct_by_workload = [sorted(j.jct_s / HOUR_S for j in r.jobs) for r in results]
    rho = sorted(j.rho for j in jobs if not math.isnan(j.rho))
    policy = sorted(1000 * s for r in results for s in r.policy_s)
    busy = [(x.contention, s) for r in results for x, s in _with_durations(r) if x.contention]
    frozen = [f for r in results for f in r.freezing]
    freezing_figures = (
        {}
        if not frozen
        else {
            "freezing_lost": mean([f.lost for f in frozen]),
            "freezing_layers": mean([f.layers for f in frozen]),
        }
    )
    dropped = sum(len(r.dropped) for r in results)
    return {
        "workloads": [r.workload for r in results],
        "policy": results[0].policy if results else "",
        "cluster": results[0].cluster if results else "",
        "jobs": len(jobs),
        **({"dropped": dropped} if dropped else {}),
        "avg_jct_h": mean(jct),
        "avg_jct_std_h": _std([mean(one) for one in jct_by_workload]),
        "p50_jct_h": _rank(jct, 0.5),
        "p99_jct_h": _rank(jct, 0.99),
        "p99_jct_mean_h": mean([_rank(one, 0.99) for one in jct_by_workload]),
        "makespan_h": mean([_makespan_h(r) for r in results]),
        "makespan_std_h": _std([_makespan_h(r) for r in results]),
        "gpu_h_per_job": mean([j.gpu_s / HOUR_S for j in jobs]),
        "gpu_h_lost_per_job": mean([j.lost_gpu_s / HOUR_S for j in jobs]),
        "restarts_per_job": mean([float(j.restarts) for j in jobs]),
        "in_place_per_job": mean([float(j.changes_in_place) for j in jobs]),
        "contention_mean": _ratio(sum(c * s for c, s in busy), sum(s for _, s in busy)),
        "contention_max": max((c for c, _ in busy), default=0),
        "rho_mean": mean(rho),
        "rho_max": rho[-1] if rho else math.nan,
        "unfair_fraction": mean([float(r > 1) for r in rho]),
        "utilisation": mean([_utilisation(r) for r in results]),
        "crossing_gpu_h": sum(r.crossing_gpu_s for r in results) / HOUR_S,
        "rounds": sum(len(r.rounds) for r in results),
        "policy_ms_p50": _rank(policy, 0.5),
        "policy_ms_p95": _rank(policy, 0.95),
        "cpu_s": sum(r.cpu_s for r in results),
        **freezing_figures,
    }


def jobs_csv(results: Iterable[Result]) -> str:
    """Return a CSV table with one row per job, with its workload and policy."""
    out = io.StringIO()
    names = [f.name for f in fields(JobResult)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["workload", "policy", *names])
    for result in results:
        for job in result.jobs:
            writer.writerow(
                [result.workload, result.policy, *(_cell(getattr(job, n)) for n in names)]
            )
    return out.getvalue()


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; NaN for no values."""
    return sum(values) / len(values) if values else math.nan


def _with_durations(result: Result) -> Iterable[tuple[RoundResult, float]]:
    """Return the rounds, each with its seconds; the last is as long as the one before."""
    times = [r.time_s for r in result.rounds]
    lasts = [after - before for before, after in itertools.pairwise(times)]
    return zip(result.rounds, [*lasts, *(lasts[-1:] or [1.0])], strict=True)


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else math.nan


def _cell(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.3f}".rstrip("0").rstrip(".")
    return value


def _rank(ordered: Sequence[float], fraction: float) -> float:
    return ordered[min(len(ordered) - 1, int(fraction * len(ordered)))] if ordered else math.nan


def _std(values: Sequence[float]) -> float:
    centre = mean(values)
    return math.sqrt(mean([(v - centre) ** 2 for v in values])) if values else math.nan


def _makespan_h(result: Result) -> float:
    if not result.jobs:
        return math.nan
    first = min(j.submission_s for j in result.jobs)
    return (max(j.completion_s for j in result.jobs) - first) / HOUR_S


def _utilisation(result: Result) -> float:
    """Return GPU seconds held over GPU seconds available during the makespan."""
    total = sum(g for _, g in result.gpus) * _makespan_h(result) * HOUR_S
    return sum(j.gpu_s for j in result.jobs) / total if total else math.nan
