"""Answer of `selastic simulate --json`: one shape for jobs and gangs (docs/cli-json-tools.md)."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

from slurm_elastic.cli.reason_text import sentence
from slurm_elastic.core.reason import Reason

if TYPE_CHECKING:
    from slurm_elastic.rpc.answers import ReasonRow
    from slurm_elastic.simulator.gangs.gang_results import GangResult
    from slurm_elastic.simulator.results import Result


class GangFigures(TypedDict):
    """Figures that only rigid gangs have; see `slurm_elastic.simulator.gangs.gang_results`."""

    avg_queue_h: float
    max_queue_h: float
    comm_gpu_h: float
    preemptions: int
    #: Leases by tier, of all gangs.
    grants: dict[str, int]
    #: Fraction of the leases by tier, and of the run time in communication: gangs of 2 to 8 GPUs.
    share_2_8: dict[str, float]
    comm_share_2_8: float
    offers: int
    offer_ms: float


class SimulationFigures(TypedDict):
    """Figures of one or more workloads; hours and milliseconds, None where there is no figure."""

    workloads: list[str]
    policy: str
    cluster: str
    gpus: int
    jobs: int
    dropped: int
    avg_jct_h: float
    avg_jct_std_h: float
    p50_jct_h: float
    p99_jct_h: float
    p99_jct_mean_h: float
    makespan_h: float
    makespan_std_h: float
    gpu_h_per_job: float
    gpu_h_lost_per_job: float
    restarts_per_job: float
    in_place_per_job: float | None
    contention_mean: float | None
    contention_max: int | None
    rho_mean: float | None
    rho_max: float | None
    unfair_fraction: float | None
    utilisation: float
    crossing_gpu_h: float | None
    freezing_lost: float | None
    freezing_layers: float | None
    rounds: int | None
    policy_ms_p50: float | None
    policy_ms_p95: float | None
    cpu_s: float
    gangs: GangFigures | None


class SimulationAnswer(SimulationFigures):
    """The whole answer: figures over all workloads, then those of each."""

    notes: list[ReasonRow]
    each: list[SimulationFigures]


def elastic_figures(results: Sequence[Result]) -> SimulationFigures:
    """Return the figures of elastic jobs over the workloads."""
    from slurm_elastic.simulator.results import summary  # noqa: PLC0415

    figures: dict[str, Any] = {
        "dropped": 0,
        "freezing_lost": None,
        "freezing_layers": None,
        **summary(results),
        "gpus": sum(count for _, count in results[0].gpus),
        "gangs": None,
    }
    return _ordered(figures)


def elastic_answer(results: Sequence[Result]) -> SimulationAnswer:
    """Return the answer for elastic jobs."""
    figures_by_workload = [elastic_figures((result,)) for result in results]
    return {**elastic_figures(results), "notes": _notes(results), "each": figures_by_workload}


def _notes(results: Sequence[Result]) -> list[ReasonRow]:
    """Return the notes of all workloads, one for each sentence, in their order."""
    notes: dict[str, Reason] = {}
    for note in (note for result in results for note in result.notes):
        reason = note if isinstance(note, Reason) else Reason("text", text=note)
        notes.setdefault(sentence(reason), reason)
    return [cast("ReasonRow", notes[text].to_json()) for text in sorted(notes)]


def gang_answer(results: Sequence[GangResult], cluster: str) -> SimulationAnswer:
    """Return the answer for gangs on a cluster of this description."""
    figures_by_workload = [gang_figures((result,), cluster) for result in results]
    return {**gang_figures(results, cluster), "notes": [], "each": figures_by_workload}


def gang_figures(results: Sequence[GangResult], cluster: str) -> SimulationFigures:
    """Return the figures of gangs over the workloads.

    Averages are over all gangs; the makespan and the standard deviations are over the workloads.
    """
    summaries = [result.summary() for result in results]
    pooled = dataclasses.replace(
        results[0],
        jobs=tuple(job for result in results for job in result.jobs),
        offers=sum(result.offers for result in results),
        decide_s=sum(result.decide_s for result in results),
        cpu_s=sum(result.cpu_s for result in results),
    ).summary()

    def over_workloads(key: str) -> list[float]:
        return [one[key] for one in summaries]

    jobs = pooled["jobs"]
    absent = dict.fromkeys(SimulationFigures.__annotations__)
    return _ordered(
        {
            **absent,
            **{key: value for key, value in pooled.items() if key in absent},
            "workloads": over_workloads("workload"),
            "cluster": cluster,
            "dropped": 0,
            "avg_jct_std_h": statistics.pstdev(over_workloads("avg_jct_h")),
            "p99_jct_mean_h": statistics.fmean(over_workloads("p99_jct_h")),
            "makespan_h": statistics.fmean(over_workloads("makespan_h")),
            "makespan_std_h": statistics.pstdev(over_workloads("makespan_h")),
            "utilisation": statistics.fmean(over_workloads("utilisation")),
            "gpu_h_per_job": pooled["gpu_h"] / jobs,
            "gpu_h_lost_per_job": pooled["restart_gpu_h"] / jobs,
            "restarts_per_job": pooled["preemptions"] / jobs,
            "gangs": _gang_part(pooled),
        }
    )


def _gang_part(summary: dict[str, Any]) -> GangFigures:
    tiers = ("single", "node", "rack", "network")
    part = {key: summary.get(key) for key in GangFigures.__annotations__}
    part["grants"] = {tier: summary[f"grants_{tier}"] for tier in tiers}
    part["share_2_8"] = {tier: summary[f"share_{tier}_2_8"] for tier in tiers[1:]}
    return cast("GangFigures", part)


def _ordered(figures: dict[str, Any]) -> SimulationFigures:
    """Return the figures in the documented order; a missing one is a KeyError."""
    return cast(
        "SimulationFigures", {key: figures[key] for key in SimulationFigures.__annotations__}
    )
