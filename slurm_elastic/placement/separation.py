"""Separation: a running job moves away from a neighbour that hurts, if that pays.

As consolidation (`placement.defragment`): the gain over the payback window has to exceed the cost
of the change. The gain counts the job, the neighbours that it leaves and those that it gets: the
GPUs of each, times its predicted speed relative to that alone. The job itself gets no slower.

Speeds are learned from what jobs report. As no user may move another one's job by false reports, a
job moves only if it is slowed itself, or slows a job of the same user.
"""

from __future__ import annotations

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable, Tenant


def separate(assignment: Assignment) -> None:
    """Move jobs that keep their GPUs away from measured neighbours that hurt, where that pays."""
    table = assignment.frame.neighbours
    if table is None:
        return
    hurt = [
        (min(hurting)[0], job_id)
        for job_id, outcome in assignment.outcomes.items()
        if (hurting := _hurting(assignment, table, outcome))
    ]
    for _, job_id in sorted(hurt):  # the jobs that are slowed most come first
        _separate_job(assignment, table, assignment.outcomes[job_id])


def _hurting(
    assignment: Assignment, table: NeighbourTable, outcome: JobOutcome
) -> list[tuple[float, int]]:
    """Return (speed of the slower, neighbour) for each reason of an unchanged job to move away."""
    current, job_id = outcome.round_job.current, outcome.job_id
    if outcome.changed or current is None:
        return []
    hurting, jobs = [], assignment.frame.snapshot.job
    for i, gpus in assignment.frame.shares(current.shares).items():
        node, job = assignment.frame.names[i], (job_id, gpus)
        for other in _others(assignment.later.tenants.get(i), job_id):
            pairs = [table.speed(node, job, other)]
            if jobs[other[0]].uid == jobs[job_id].uid:
                pairs.append(table.speed(node, other, job))
            slowest = min(
                (p for p in pairs if p.measured >= table.measurements),
                key=lambda p: p.speed,
                default=None,
            )
            if slowest is not None and slowest.speed < table.gate:
                hurting.append((slowest.speed, other[0]))
    return hurting


def _separate_job(assignment: Assignment, table: NeighbourTable, outcome: JobOutcome) -> None:
    hurting = _hurting(assignment, table, outcome)  # anew: its neighbour may have left meanwhile
    round_job, current = outcome.round_job, outcome.round_job.current
    if current is None or not hurting:
        return
    assignment.later.give(round_job.need, current)
    target = assignment.find(round_job, current.gpu_type, current.gpus)
    if target is not None and target != current:
        speed, other_id = min(hurting)
        gain, cost_s = _gain(assignment, table, outcome, target), round_job.change_cost_s(target)
        if gain >= assignment.config.resize.min_gain and gain * round_job.window_s > cost_s:
            other = assignment.frame.snapshot.job[other_id]
            outcome.target = target
            outcome.reason = Reason(
                "leaves-neighbour",
                job=other.display_id,
                speed=speed,
                gain=gain,
                cost_s=cost_s,
            )
    assignment.later.take(round_job.need, outcome.target)


def _gain(
    assignment: Assignment, table: NeighbourTable, outcome: JobOutcome, target: Allocation
) -> float:
    """Return the gain of all jobs concerned, relative to the speed of the job that moves.

    0 where that job itself would be slower.
    """
    round_job, frame, job_id = outcome.round_job, assignment.frame, outcome.job_id
    current = round_job.current
    assert current is not None
    here, there = (_own_speed(assignment, table, job_id, p) for p in (current, target))
    alone_here, alone_there = (round_job.speed(frame, p) for p in (current, target))
    there *= alone_there / alone_here if alone_here > 0 else 1.0
    if there < here or here <= 0:
        return 0.0
    nodes = {*frame.shares(current.shares), *frame.shares(target.shares)}
    others = {
        place: _speed_of_others(assignment, table, job_id, place, nodes)
        for place in (current, target)
    }
    gained = (there - here) * current.gpus + others[target] - others[current]
    return gained / (here * current.gpus)


def _own_speed(
    assignment: Assignment, table: NeighbourTable, job_id: int, place: Allocation
) -> float:
    """Return the speed of a job on a place relative to that alone: that on its slowest node."""
    frame, tenants = assignment.frame, assignment.later.tenants
    return min(
        (
            table.slowed(frame.names[i], (job_id, gpus), _others(tenants.get(i), job_id))
            for i, gpus in frame.shares(place.shares).items()
        ),
        default=1.0,
    )


def _speed_of_others(
    assignment: Assignment,
    table: NeighbourTable,
    job_id: int,
    place: Allocation,
    nodes: set[int],
) -> float:
    """Return GPUs times speed of the other jobs on these nodes with the job on a place."""
    frame, total = assignment.frame, 0.0
    held = frame.shares(place.shares)
    for i in sorted(nodes):
        others = _others(assignment.later.tenants.get(i), job_id)
        present = [*others, *([(job_id, held[i])] if i in held else [])]
        total += table.total_speed(frame.names[i], others, present)
    return total


def _others(tenants: frozenset[Tenant] | None, job_id: int) -> list[Tenant]:
    return sorted(t for t in tenants or () if t[0] != job_id)
