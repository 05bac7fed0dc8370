"""Jobs that leave the GPU they share with another one. Pure.

Pairs part before the policy decides: a job of a pair gets a GPU that is free, if what both lose
by sharing exceeds the cost of its restart. Without a free GPU, a job that was measured to slow the
one that was there before it waits again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.best_fit import fit
from slurm_elastic.placement.eligibility import RoundJob
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.neighbours.gpu_pair_table import EXPECTED_SPEED, GpuPairTable
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.sharing.shareable_gpus import may_share


def separate_pairs(
    assignment: Assignment,
    round_jobs: Mapping[int, RoundJob],
    table: GpuPairTable | None,
    *,
    ready: Iterable[int] = (),
    counts_halves: bool = False,
) -> None:
    """Give one job of each pair a free GPU, or let it wait, where that is better.

    Args:
        assignment: of this round; it is changed.
        round_jobs: all elastic jobs.
        table: speeds of two jobs on one GPU; None: they are not measured.
        ready: ids of waiting jobs that the policy is asked about. GPUs for the MIN of those that
            may not share are not free; the others get the halves that fall free.
        counts_halves: whether the policy gives halves to waiting jobs itself: then none of their
            GPUs is free.
    """
    pairs = {
        frozenset((t.job.job_id, t.partner.job_id))
        for t in round_jobs.values()
        if t.partner is not None
    }
    if not pairs:
        return
    free = assignment.later.meet(assignment.now)
    shares = table is not None and table.pairs_jobs and not counts_halves
    for job_id in ready:
        _keep_least(free, round_jobs[job_id], assignment.frame, shares=shares)
    for pair in sorted(pairs, key=sorted):
        jobs = [round_jobs[j] for j in sorted(pair) if j in round_jobs]
        movable = [t for t in jobs if t.separable and t.current and t.current.half]
        movable.sort(key=lambda t: (t.cost_s, t.job.job_id))
        outcomes = (_separated(assignment, t, table, free) for t in movable)
        outcome = next((o for o in outcomes if o is not None), None)
        if outcome is not None:
            for resources in (assignment.later, free):
                resources.take(outcome.round_job.need, outcome.target)
            assignment.outcomes[outcome.job_id] = outcome


def _keep_least(
    free: FreeResources, round_job: RoundJob, frame: NodeArrays, *, shares: bool
) -> None:
    """Take GPUs for the least size of a waiting job, if it could start there.

    Args:
        free: is changed.
        round_job: the job.
        frame: the cluster.
        shares: whether pairs are made: none are taken for a job that may get half of a GPU.
    """
    demand, directive = round_job.demand(frame), round_job.directive
    for gpu_type in directive.types or frame.types:
        if shares and may_share(round_job, gpu_type):
            return
        sizes = directive.sizes(gpu_type)
        unit = directive.unit_for(gpu_type)
        place = fit(demand, gpu_type, sizes[0], free, unit=unit) if sizes else None
        if place is not None:
            free.take(round_job.need, place)
            return


def _separated(
    assignment: Assignment,
    round_job: RoundJob,
    table: GpuPairTable | None,
    free: FreeResources,
) -> JobOutcome | None:
    """Return the outcome of a job that leaves its half; None: it stays."""
    current, partner = round_job.current, round_job.partner
    assert current is not None
    assert partner is not None
    job, (node,) = round_job.job, current.nodes
    own = table.speed(node, job.job_id, partner.job_id) if table else EXPECTED_SPEED
    other = table.speed(node, partner.job_id, job.job_id) if table else EXPECTED_SPEED
    named = {"job": partner.display_id, "user": partner.user, "speed": min(own, other)}
    gain = 2 - own - other
    if round_job.directive.max_gpus > 1:  # with a GPU of its own it may grow again
        gain = max(gain, assignment.config.resize.min_gain)
    must = _disagree(job, partner) or round_job.record.half_barred is not None
    pays = must or gain * round_job.window_s > round_job.cost_s
    target = _free_gpu(assignment.frame, round_job, current.gpu_type, free) if pays else None
    if target is not None:
        reason = Reason("leaves-shared-gpu", gain=gain, cost_s=round_job.cost_s, **named)
    elif _started_later(job, partner) and table and table.hurts(node, partner.job_id, job.job_id):
        reason = Reason("slows-partner", **named)
    else:
        return None
    return JobOutcome(round_job, target, reason=reason, promised=True)


def _disagree(job: Job, partner: Job) -> bool:
    """Return whether one of two jobs on a GPU does not allow that, or not any more."""
    return any(j.directive is None or j.directive.share == "no" for j in (job, partner))


def _free_gpu(
    frame: NodeArrays, round_job: RoundJob, gpu_type: str, free: FreeResources
) -> Allocation | None:
    """Return a GPU of this type that is free for a job, now and later; None: there is none."""
    if not round_job.directive.allows(1, gpu_type):
        return None
    return fit(dataclasses.replace(round_job, current=None).demand(frame), gpu_type, 1, free)


def _started_later(job: Job, partner: Job) -> bool:
    """Return whether a job came onto the GPU of its partner, by the starts of their attempts."""
    return (job.start_time or 0.0, job.job_id) > (partner.start_time or 0.0, partner.job_id)
