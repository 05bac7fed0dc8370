"""Results of a simulation of gangs.

Definitions: JCT = finish less arrival; queueing = from arrival to the first start, and from each
return of GPUs to the next start; communication GPU hours = (running less computing time) x GPUs; a
*grant* is one lease; a preemption is a lease followed by a wait longer than a checkpoint; shares
of tiers are of the grants of gangs of 2 to 8 GPUs, their communication share is of their running
time. p99 is the nearest rank.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from slurm_elastic.placement.delay.free_map import GangTier
from slurm_elastic.simulator.results import HOUR_S, mean

#: GPUs of the gangs whose tiers are compared: they fit into a node.
_SMALL = range(2, 9)


@dataclass(frozen=True, slots=True, kw_only=True)
class GangJobResult:
    """Result of one gang. Times are seconds since the workload's start.

    Attributes:
        restart_s: time with GPUs held while loading its state.
        grants, tier_s: leases, and seconds run, by tier (single GPU, node, rack, network).
    """

    name: str
    model: str
    gpus: int
    arrival_s: float
    start_s: float
    finish_s: float
    run_s: float
    compute_s: float
    restart_s: float
    queue_s: float
    preemptions: int
    grants: tuple[int, ...]
    tier_s: tuple[float, ...]

    @property
    def jct_s(self) -> float:
        """Completion time."""
        return self.finish_s - self.arrival_s


@dataclass(frozen=True, kw_only=True)
class GangResult:
    """Results of one workload under one policy.

    Attributes:
        offers: number of offers to the policy.
        decide_s: wall seconds of the policy's decisions.
        cpu_s: CPU seconds of the whole simulation.
    """

    workload: str
    policy: str
    gpus: int
    jobs: tuple[GangJobResult, ...]
    offers: int
    decide_s: float
    cpu_s: float

    def summary(self) -> dict[str, Any]:
        """Return the figures of the summary; times in hours."""
        jobs = self.jobs
        small = [j for j in jobs if j.gpus in _SMALL]
        jct = sorted(j.jct_s / HOUR_S for j in jobs)
        leases = sum(sum(j.grants[1:]) for j in small)
        ran = sum(j.run_s for j in small)
        span_s = max(j.finish_s for j in jobs) - min(j.arrival_s for j in jobs)
        held = sum((j.run_s + j.restart_s) * j.gpus for j in jobs)
        return {
            "workload": self.workload,
            "policy": self.policy,
            "jobs": len(jobs),
            "gpus": self.gpus,
            "avg_jct_h": mean(jct),
            "p50_jct_h": statistics.median(jct),
            "p99_jct_h": nearest_rank(jct, 0.99),
            "makespan_h": span_s / HOUR_S,
            "avg_queue_h": mean([j.queue_s / HOUR_S for j in jobs]),
            "max_queue_h": max(j.queue_s for j in jobs) / HOUR_S,
            "gpu_h": held / HOUR_S,
            "comm_gpu_h": sum((j.run_s - j.compute_s) * j.gpus for j in jobs) / HOUR_S,
            "restart_gpu_h": sum(j.restart_s * j.gpus for j in jobs) / HOUR_S,
            "utilisation": held / (span_s * self.gpus) if span_s else 0.0,
            "preemptions": sum(j.preemptions for j in jobs),
            **{
                f"grants_{tier.name.lower()}": sum(j.grants[tier] for j in jobs)
                for tier in GangTier
            },
            **{
                f"share_{tier.name.lower()}_2_8": sum(j.grants[tier] for j in small) / leases
                if leases
                else 0.0
                for tier in GangTier
                if tier is not GangTier.SINGLE
            },
            "comm_share_2_8": sum(j.run_s - j.compute_s for j in small) / ran if ran else 0.0,
            "offers": self.offers,
            "offer_ms": 1000 * self.decide_s / self.offers if self.offers else 0.0,
            "cpu_s": self.cpu_s,
        }


def jobs_csv(results: Iterable[GangResult]) -> str:
    """Return a CSV table with one row per gang."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    plain = [f.name for f in fields(GangJobResult) if f.name not in ("grants", "tier_s")]
    tiers = [t.name.lower() for t in GangTier]
    writer.writerow(
        ["workload", "policy", *plain, *(f"n_{t}" for t in tiers), *(f"t_{t}" for t in tiers)]
    )
    for result in results:
        for job in result.jobs:
            cells = (getattr(job, name) for name in plain)
            writer.writerow(
                [result.workload, result.policy, *map(_cell, (*cells, *job.grants, *job.tier_s))]
            )
    return out.getvalue()


def _cell(value: object) -> object:
    return f"{value:.3f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def nearest_rank(ordered: Sequence[float], part: float) -> float:
    """Return the value at this quantile by nearest rank, as in the published summary."""
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)]
