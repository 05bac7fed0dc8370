"""Figures of a controller's view, for metrics. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics import metric_definitions as metrics
from slurm_elastic.controller.metrics.metric_definitions import ANY_TYPE, MetricDefinition
from slurm_elastic.controller.queries.view import View
from slurm_elastic.controller.state.transition import TransitionState
from slurm_elastic.core.cluster import Job, JobState

#: Values of a metric by the values of its labels.
Figures = Mapping[tuple[str, ...], float]
_KINDS = ("elastic", "rigid")
_STATES = (JobState.PENDING, JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED)


def figures(view: View, config: Config, now: float) -> Iterator[tuple[MetricDefinition, Figures]]:
    """Yield the figures of each metric of the cluster.

    Args:
        view: of the controller that acts.
        config: the site's.
        now: epoch s.
    """
    snapshot = view.snapshot
    jobs = [j for j in snapshot.jobs if j.state is not JobState.ENDED]
    reservations = [now - r.start_time for r in snapshot.reservations if r.ours]
    records, lease_s = view.records, config.slurm.lease_s
    leased = [j for j in jobs if j.job_id in records and records[j.job_id].leased]
    renewed = [now - (j.begin_time - lease_s) for j in leased if j.begin_time]
    stopped = sum(
        j.state is JobState.PENDING and j.job_id in records and bool(records[j.job_id].stopped)
        for j in jobs
    )
    yield metrics.GPUS, _gpus(view, jobs)
    yield metrics.GPUS_PLANNED, _planned(view)
    yield metrics.GPUS_WANTED, {(): _wanted(view, jobs)}
    yield metrics.GPUS_PENDING, _pending(jobs)
    yield metrics.JOBS, _jobs(jobs)
    yield metrics.JOBS_STOPPED, {(): stopped}
    yield metrics.JOBS_ON_TRIAL, {(): sum(r.on_trial is not None for r in records.values())}
    yield metrics.TRANSITIONS_LIVE, _transitions(view)
    yield metrics.RESERVATIONS, {(): len(reservations)}
    yield metrics.RESERVATION_OLDEST, {(): max((0.0, *reservations))}
    yield metrics.LEASES, {(): len(leased)}
    yield metrics.LEASE_OLDEST, {(): max((0.0, *renewed))}
    yield metrics.LEASE_LENGTH, {(): lease_s}
    yield metrics.SNAPSHOT_AGE, {(): max(0.0, now - snapshot.time)}
    yield metrics.ROUND_INTERVAL, {(): config.controller.interval_s}
    yield metrics.NOTES, Counter((n.code,) for n in view.notes)


def _kind(job: Job) -> str:
    return "elastic" if job.elastic else "rigid"


def _types(view: View) -> set[str]:
    return {n.gpu_type for n in view.snapshot.nodes if n.gpus}


def _shown(gpu_type: str, types: set[str]) -> str:
    return gpu_type if gpu_type and gpu_type in types else ANY_TYPE


def _gpus(view: View, jobs: list[Job]) -> Figures:
    types = _types(view)
    uses = (*_KINDS, "idle", "unavailable")
    gpus: defaultdict[tuple[str, ...], float] = defaultdict(
        float, {(_shown(t, types), use): 0.0 for t in types for use in uses}
    )
    for node in view.snapshot.nodes:
        name = _shown(node.gpu_type, types)
        gpus[name, "idle"] += node.free_gpus
        if not node.available:
            gpus[name, "unavailable"] += max(0, node.gpus - node.used_gpus)
    for job in jobs:
        if job.allocation and job.state is not JobState.PENDING:
            gpus[_shown(job.allocation.gpu_type, types), _kind(job)] += job.allocation.amount
    return gpus


def _planned(view: View) -> Figures:
    types = _types(view)
    planned: defaultdict[tuple[str, ...], float] = defaultdict(
        float, {(_shown(t, types),): 0.0 for t in types}
    )
    for decision in view.plan.decisions if view.plan else ():
        if decision.target:
            planned[(_shown(decision.target.gpu_type, types),)] += decision.target.amount
    return planned


def _wanted(view: View, jobs: list[Job]) -> float:
    most = sum(n.gpus for n in view.snapshot.nodes)
    wanted = 0
    for job in jobs:
        if job.elastic and job.directive:
            held = job.allocation.gpus if job.allocation else 0
            wanted += max(0, min(job.directive.max_gpus, most) - held)
    return wanted


def _pending(jobs: list[Job]) -> Figures:
    pending: Counter[tuple[str, ...]] = Counter({(kind,): 0 for kind in _KINDS})
    for job in jobs:
        if job.state is JobState.PENDING:
            directive = job.directive if job.elastic else None
            pending[(_kind(job),)] += directive.min_gpus if directive else job.gpus
    return pending


def _jobs(jobs: list[Job]) -> Figures:
    counts: Counter[tuple[str, ...]] = Counter(
        {(kind, state.value.lower()): 0 for kind in _KINDS for state in _STATES}
    )
    counts.update((_kind(j), j.state.value.lower()) for j in jobs)
    return counts


def _transitions(view: View) -> Figures:
    live: Counter[tuple[str, ...]] = Counter({(s.value,): 0 for s in TransitionState if s.live})
    live.update((t["state"],) for t in view.transitions)
    return live
