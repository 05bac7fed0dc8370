"""GPUs kept, and elastic jobs changed, so that pending jobs can start.

Pending jobs that only wait for room are considered in Slurm's order. One that fits beside what
is decided gets a claim: no other job grows into its GPUs. One that fits only with nodes that have
to boot gets a claim on them, and no job gives way. For one that does not fit, elastic jobs give
way (placement/victim_selection.py) if that lets it start in the shape that it asked for; otherwise
nothing is changed for it.

A claim expires `keep_s` after all its GPUs became free: Slurm did not start the job, and no GPUs
are kept for it for `PATIENCE` times that. With `queue = "controller"` pending elastic jobs are in
the same queue, with their MIN, and may preempt jobs of lower priority, as rigid ones may then.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.plan import Claim
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.best_fit import NodeDemand, even_splits
from slurm_elastic.placement.delay.delay_gate import DelayGate
from slurm_elastic.placement.eligibility import Eligibility, RoundJob, most_racks
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed, ResourceViews
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.victim_selection import (
    Concession,
    ConcessionSearch,
    StartShape,
    find_concessions,
)

#: Slurm's reasons of jobs that wait only for resources and their turn.
WAITS_FOR_ROOM = frozenset({"", "None", "Resources", "Priority"})
#: Multiples of `keep_s`: how long GPUs may take to become free, and how long no GPUs are kept
#: for a job whose claim expired.
PATIENCE = 10.0
#: Pending jobs considered in a round, and attempts to make others give way, in all.
_MOST_LOOKED_AT = 512
_MOST_TRIALS = 512
#: Stands for any GPU type, as in `NodeArrays.of_type`.
_ANY_TYPE = ""


@dataclass(slots=True, kw_only=True)
class PendingClaims:
    """Decisions of a round about pending jobs.

    Attributes:
        claims: GPUs kept for pending jobs.
        concessions: changes of elastic jobs for their sake, by id of the elastic job.
        ready: ids of pending elastic jobs whose MIN is free.
        waits_for_nearer: by id, why an elastic job waits although a place is free; nothing is kept
            for it.
        refused: until when (epoch s) no GPUs are kept for a job, by its key.
    """

    claims: list[Claim] = field(default_factory=list)
    concessions: dict[int, Concession] = field(default_factory=dict)
    ready: list[int] = field(default_factory=list)
    waits_for_nearer: dict[int, Reason] = field(default_factory=dict)
    refused: dict[str, float] = field(default_factory=dict)


def claims_for_pending(
    views: ResourceViews,
    round_jobs: Mapping[int, RoundJob],
    config: Config,
    *,
    gate: DelayGate | None = None,
    claims: Iterable[Claim] = (),
    refused: Mapping[str, float] | None = None,
    at_once: bool = False,
    binding: bool = False,
) -> PendingClaims:
    """Decide for which pending jobs GPUs are kept, and which elastic jobs give way.

    Args:
        views: free resources; claims and concessions are booked on them.
        round_jobs: the elastic jobs.
        config: `[resize]` and `queue` matter.
        gate: decides whether an elastic job waits for a nearer place; None: never.
        claims: those of the last round, which go on.
        refused: until when no GPUs are kept for a job, by its key.
        at_once: all changes happen at the same instant: what is free later is free now.
        binding: the policy's proposals are: it alone decides when pending elastic jobs start.
    """
    frame = views.later.frame
    at = frame.snapshot.time
    earlier_claims = {claim.job_id: claim for claim in claims}
    decided = PendingClaims(refused={k: t for k, t in (refused or {}).items() if t > at})
    waiting = waiting_jobs(round_jobs, frame)
    if binding:
        decided.ready = [j.job_id for j in waiting if _controller_starts(round_jobs.get(j.job_id))]
        waiting = [j for j in waiting if not _controller_starts(round_jobs.get(j.job_id))]
    if not waiting:
        return decided
    givers = [
        t for t in round_jobs.values() if t.eligibility in (Eligibility.FREE, Eligibility.YIELDS)
    ]
    search = ConcessionSearch(frame, givers, config.resize.payback_s)
    preempt = (False, True) if config.controller.queue == "controller" else (False,)
    tentative: list[tuple[ResourceNeed, Allocation]] = []
    in_vain: set[tuple[object, ...]] = set()
    for job in waiting[:_MOST_LOOKED_AT]:
        round_job = round_jobs.get(job.job_id)
        controller_starts = _controller_starts(round_job)
        claim = earlier_claims.get(job.job_id)
        if not controller_starts and (job.key in decided.refused or _ran_out(claim, at, config)):
            decided.refused.setdefault(job.key, at + PATIENCE * config.resize.keep_s)
            continue
        shapes = _start_shapes(frame, job, round_job)
        place = next((p for shape in shapes if (p := shape.place(views.later)) is not None), None)
        boots = False
        # Slurm wakes nodes for the jobs that it starts; for others the controller has to.
        wakes = not controller_starts or config.sleep.mode == "act"
        if place is None and wakes and frame.asleep.any() and not _waited(claim, at, config):
            with_boots = _start_shapes(frame, job, round_job, asleep=True)
            place = next((p for s in with_boots if (p := s.place(views.later)) is not None), None)
            boots = place is not None
        refusal = partial(_refusal, gate, round_job if controller_starts else None)
        if place is not None and (reason := refusal(place)):
            decided.waits_for_nearer[job.job_id] = reason
            continue
        concessions: tuple[Concession, ...] = ()
        alike = (
            job.priority,
            len(decided.concessions),
            views.later.limits_of(job.job_id),
            *(shape.key for shape in shapes),
        )
        if place is None and search.trials < _MOST_TRIALS and alike not in in_vain:
            concessions, place = _give_way(
                job, shapes, search, views, refusal=refusal, preempt=preempt
            )
            in_vain.add(alike)
        if place is None:
            continue
        for concession in concessions:
            decided.concessions[concession.round_job.job.job_id] = concession
        need = ResourceNeed.of(job)
        free_now = not (concessions or boots) and (at_once or _is_free(place, need, views.now))
        views.take(need, place)
        if controller_starts and free_now:
            decided.ready.append(job.job_id)
            tentative.append((need, place))
        else:
            decided.claims.append(_claim(job, place, claim, at, config, free_now=free_now))
    for need, place in tentative:
        views.give(need, place)
    return decided


def _refusal(
    gate: DelayGate | None, round_job: RoundJob | None, place: Allocation
) -> Reason | None:
    """Return why a job of ours waits instead of taking a place, or None."""
    return gate.refusal(round_job, place) if gate and round_job else None


def _controller_starts(round_job: RoundJob | None) -> bool:
    return round_job is not None and round_job.eligibility is Eligibility.OURS


def waiting_jobs(round_jobs: Mapping[int, RoundJob], frame: NodeArrays) -> list[Job]:
    """Return the pending jobs that could start if there were room, in Slurm's order."""
    waiting, at = [], frame.snapshot.time
    for job in frame.snapshot.jobs:
        if job.state is not JobState.PENDING or job.gpus <= 0 or job.dependency:
            continue
        round_job = round_jobs.get(job.job_id)
        if round_job and round_job.eligibility is Eligibility.MOVING:
            continue
        leased = round_job is not None and round_job.record.leased
        begins = job.begin_time is not None and job.begin_time > at
        if leased or (job.reason in WAITS_FOR_ROOM and not begins):
            waiting.append(job)
    return sorted(waiting, key=lambda j: (-frame.tier(j), -j.priority, j.submit_time, j.job_id))


def _start_shapes(
    frame: NodeArrays, job: Job, round_job: RoundJob | None, *, asleep: bool = False
) -> list[StartShape]:
    """Return the shapes in which a pending job may start: an elastic one at MIN, others as asked.

    With `asleep`, also on nodes that have to boot.

    A rigid job's request is known as GPUs and nodes: equal shares on the fewest nodes are assumed,
    of one type if possible. Slurm gives a request without a type nodes of several, too. Of several
    partitions each has limits of its own. Of several alternatives of its features (`[a|b]`) all
    nodes have the same one.
    """
    shapes: list[StartShape] = []
    for name in job.partition.split(","):
        alone = job if name == job.partition else dataclasses.replace(job, partition=name)
        for alternative in frame.by_alternative(alone):
            shapes += _shapes_in_partition(frame, alternative, round_job, asleep=asleep)
    return shapes


def _shapes_in_partition(
    frame: NodeArrays, job: Job, round_job: RoundJob | None, *, asleep: bool
) -> list[StartShape]:
    """Return the shapes in which a pending job may start in its one partition."""
    required, *_ = frame.own_constraints(job)
    partition = frame.partition(job.partition)
    demand = NodeDemand(
        need=ResourceNeed.of(job),
        allowed=frame.allowed(job, planned=True, asleep=asleep),
        required=tuple(frame.index[n] for n in required if n in frame.index),
        min_nodes=partition.min_nodes if partition else 1,
        max_nodes=partition.max_nodes if partition else None,
        most_on=frame.most_on_nodes(job, {}),
        most_racks=most_racks(job),
        whole_nodes=frame.takes_whole_nodes(job),
    )
    types = (round_job.directive.types if round_job else ()) or frame.types
    if round_job is not None and round_job.eligibility is Eligibility.OURS:
        demand = dataclasses.replace(demand, group_reach=round_job.group_reach)
        sizes = [(t, round_job.directive.sizes(t)) for t in types]
        return [StartShape(demand, t, s[0], round_job.directive.unit_for(t)) for t, s in sizes if s]
    shapes = []
    most = dict(frame.per_node)
    names = [job.gpu_type] if job.gpu_type else [*types]
    mixes = round_job is None and not demand.whole_nodes
    if mixes and len(names) > 1 and _ANY_TYPE not in names:
        names.append(_ANY_TYPE)
        most[_ANY_TYPE] = max(most.values())
    least = max(job.min_nodes, demand.min_nodes)
    for name in names:
        splits = even_splits(job.gpus, most.get(name, 0))
        nodes = next((n for n, _ in splits if n >= least), None)
        if nodes is not None and nodes <= (demand.max_nodes or nodes):
            exact = dataclasses.replace(demand, min_nodes=nodes, max_nodes=nodes)
            gpus = nodes * most[name] if demand.whole_nodes else job.gpus
            shapes.append(StartShape(exact, name, gpus))
    return shapes


def _give_way(
    job: Job,
    shapes: Iterable[StartShape],
    search: ConcessionSearch,
    views: ResourceViews,
    *,
    refusal: Callable[[Allocation], Reason | None],
    preempt: Iterable[bool],
) -> tuple[tuple[Concession, ...], Allocation | None]:
    """Book changes of elastic jobs that make room, at a place that is not refused.

    `preempt`: whether jobs of lower priority may lose all GPUs, tried in this order.
    """
    shapes = tuple(shapes)
    for may in preempt:
        for shape in shapes:
            answer = find_concessions(job, shape, search, views, preempt=may)
            if answer is not None and not refusal(answer[1]):
                for concession in answer[0]:
                    search.spend(concession, views)
                return answer
    return (), None


def _is_free(place: Allocation, need: ResourceNeed, now: FreeResources) -> bool:
    room = now.room(need)
    return all(room[i] >= gpus for i, gpus in now.frame.shares(place.shares).items())


def _ran_out(claim: Claim | None, at: float, config: Config) -> bool:
    if claim is None:
        return False
    return at >= claim.until or _waited(claim, at, config)


def _waited(claim: Claim | None, at: float, config: Config) -> bool:
    return claim is not None and at - claim.since > PATIENCE * config.resize.keep_s


def _claim(
    job: Job, place: Allocation, earlier: Claim | None, at: float, config: Config, *, free_now: bool
) -> Claim:
    """Return the job's claim; its time runs from when all its GPUs are free."""
    until = earlier.until if earlier and free_now else at + config.resize.keep_s
    since = earlier.since if earlier else at
    return Claim(job_id=job.job_id, shares=place.shares, since=since, until=until)
