"""Changes of a plan that can begin now: on free GPUs, together, or on GPUs that others hand over.

A change begins if its GPUs are free beside all present allocations. Jobs that exchange GPUs begin
together (exchanges.py). A job that grows by companions may begin together with jobs that give up
companions: it costs neither of them anything if the other one fails, as both train on meanwhile
(controller/transitions/handovers.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.placement.assignment import JobOutcome
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed, union


@dataclass(frozen=True, slots=True)
class Beginnings:
    """Changes that begin.

    Attributes:
        jobs: the jobs whose changes begin.
        givers: of a job that grows into GPUs that others give up in the same plan: those jobs.
    """

    jobs: set[int] = field(default_factory=set)
    givers: dict[int, tuple[int, ...]] = field(default_factory=dict)


def beginnings(
    free_now: FreeResources, ordered: Sequence[JobOutcome], outcomes: Mapping[int, JobOutcome]
) -> Beginnings:
    """Return which targets can be reached from now on, and book them on what is free now.

    Args:
        free_now: beside all present allocations.
        ordered: jobs with a target, in the order in which they take what is free.
        outcomes: by job id, for the other jobs of an exchange.
    """
    begun = Beginnings()
    together: dict[frozenset[int], bool] = {}
    for outcome in ordered:
        target = outcome.target
        begins = target is None or not outcome.changed
        if outcome.partners:
            members = [outcome, *(outcomes[j] for j in outcome.partners)]
            job_ids = frozenset(o.job_id for o in members)
            if job_ids not in together:
                together[job_ids] = _begin_together(free_now, members)
            begins = together[job_ids]
        elif target is not None and not begins:
            begins = _begin(free_now, outcome, target)
        if begins:
            begun.jobs.add(outcome.job_id)
    waiting = [o for o in ordered if o.job_id not in begun.jobs and _grows_by_companions(o)]
    if waiting:
        givers = [o for o in ordered if o.job_id in begun.jobs and _gives_companions(o)]
        begun.givers.update(_handed_over(free_now.copy(), waiting, givers))
        begun.jobs.update(begun.givers)
    return begun


def _handed_over(
    soon: FreeResources, waiting: Iterable[JobOutcome], givers: Sequence[JobOutcome]
) -> dict[int, tuple[int, ...]]:
    """Return the givers of each job that can grow once these have left their GPUs.

    Args:
        soon: what is free now; what is given up and taken is booked on it.
        waiting: jobs that find no room now.
        givers: jobs that give up companions.
    """
    matched: dict[int, tuple[int, ...]] = {}
    given = set[int]()
    for outcome in waiting:
        need, current, target = outcome.round_job.need, outcome.round_job.current, outcome.target
        if target is None:
            continue
        more = _fewer(target, current).keys()
        near = [g for g in givers if not more.isdisjoint(_fewer(g.round_job.current, g.target))]
        fresh = [g for g in near if g.job_id not in given]
        for giver in fresh:
            soon.give(giver.round_job.need, giver.round_job.current)
            soon.take(giver.round_job.need, giver.target)
        soon.give(need, current)
        fits = bool(near) and _fits(soon, need, target)
        soon.take(need, union(current, target) if fits else current)
        if fits:
            given.update(g.job_id for g in fresh)
            matched[outcome.job_id] = tuple(sorted(g.job_id for g in near))
            continue
        for giver in fresh:
            soon.give(giver.round_job.need, giver.target)
            soon.take(giver.round_job.need, giver.round_job.current)
    return matched


def _grows_by_companions(outcome: JobOutcome) -> bool:
    """Return whether new companions lead a running job to its target."""
    return (
        outcome.round_job.current is not None
        and outcome.target is not None
        and not outcome.partners
        and bool(_fewer(outcome.target, outcome.round_job.current))
        and _by_companions(outcome)
    )


def _gives_companions(outcome: JobOutcome) -> bool:
    """Return whether a running job only gives up companions."""
    return (
        outcome.changed
        and outcome.target is not None
        and not _fewer(outcome.target, outcome.round_job.current)
        and _by_companions(outcome)
    )


def _by_companions(outcome: JobOutcome) -> bool:
    round_job = outcome.round_job
    kind = round_job.record.kind_of(round_job.job, outcome.target)
    return kind is not ResizeKind.REQUEUE


def _fewer(first: Allocation | None, second: Allocation | None) -> dict[str, int]:
    """Return the GPUs on each node that the second allocation lacks of the first."""
    others = dict(second.shares) if second else {}
    shares = first.shares if first else ()
    return {n: g - others.get(n, 0) for n, g in shares if g > others.get(n, 0)}


def _begin(free_now: FreeResources, outcome: JobOutcome, target: Allocation) -> bool:
    """Book a change if it fits beside all present allocations; return whether it does."""
    round_job, current = outcome.round_job, outcome.round_job.current
    if union(current, target) == current:
        return True
    free_now.give(round_job.need, current)
    fits = _fits(free_now, round_job.need, target)
    free_now.take(round_job.need, current)
    if fits:
        free_now.take_beside(round_job.need, current, target)
    return fits


def _begin_together(free_now: FreeResources, members: Sequence[JobOutcome]) -> bool:
    """Book an exchange if its changes fit beside all other jobs; return whether they do."""
    for outcome in members:
        free_now.give(outcome.round_job.need, outcome.round_job.current)
    booked: list[JobOutcome] = []
    for outcome in members:
        need, target = outcome.round_job.need, outcome.target
        if target is None or not _fits(free_now, need, target):
            break
        free_now.take(need, target)
        booked.append(outcome)
    for outcome in booked:
        free_now.give(outcome.round_job.need, outcome.target)
    fits = len(booked) == len(members)
    for outcome in members:
        current = outcome.round_job.current
        held = union(current, outcome.target) if fits else current
        free_now.take(outcome.round_job.need, held)
    return fits


def _fits(free_now: FreeResources, need: ResourceNeed, target: Allocation) -> bool:
    room, shares = free_now.room(need), free_now.frame.shares(target.shares)
    enough = all(room[i] >= gpus for i, gpus in shares.items())
    return enough and not free_now.exceeds_limits(need, target)
