"""Jobs that start in one round exchange places, where jobs then slow each other down less.

Jobs choose their places one after the other, so an early one may take the place that a later one
needs. Two of them exchange places of equal shape if the speeds of all jobs on these nodes, each
times its GPUs there, add up to more afterwards (our definition; the aim is that of a matching of
most total speed, but jobs that already run stay where they are).
"""

from __future__ import annotations

from itertools import combinations

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable

#: Passes over all pairs of jobs, and most jobs of a round that are compared.
_PASSES, _MOST_JOBS = 3, 64
#: Least gain: part of the speed of all jobs on the nodes.
_LEAST_GAIN = 0.01


def swap_starts(assignment: Assignment) -> None:
    """Let pairs of jobs that start exchange places, until no exchange gains anything."""
    table = assignment.frame.neighbours
    if table is None:
        return
    starting = [
        outcome
        for _, outcome in sorted(assignment.outcomes.items())
        if outcome.round_job.current is None and outcome.target is not None
    ][:_MOST_JOBS]
    for _ in range(_PASSES):
        swapped = [_swap(assignment, table, *pair) for pair in combinations(starting, 2)]
        if not any(swapped):
            return


def _swap(
    assignment: Assignment, table: NeighbourTable, first: JobOutcome, second: JobOutcome
) -> bool:
    """Exchange the places of two jobs if that gains speed; return whether it did."""
    mine, others = first.target, second.target
    if mine is None or others is None or mine == others or not _alike(assignment, mine, others):
        return False
    frame, later = assignment.frame, assignment.later
    one, two = first.round_job, second.round_job
    nodes = {*frame.shares(mine.shares), *frame.shares(others.shares)}
    before = _speed(assignment, table, nodes)
    later.give(one.need, mine)
    later.give(two.need, others)
    if assignment.exactly(one, others) is not None and assignment.exactly(two, mine) is not None:
        later.take(one.need, others)
        later.take(two.need, mine)
        if _speed(assignment, table, nodes) > (1 + _LEAST_GAIN) * before:
            first.target, second.target = others, mine
            return True
        later.give(one.need, others)
        later.give(two.need, mine)
    later.take(one.need, mine)
    later.take(two.need, others)
    return False


def _alike(assignment: Assignment, first: Allocation, second: Allocation) -> bool:
    """Return whether two places have the same type, shares, and number of nodes and racks."""
    spread = assignment.frame.topology.spread
    return (
        first.gpu_type == second.gpu_type
        and sorted(g for _, g in first.shares) == sorted(g for _, g in second.shares)
        and spread(first.nodes) == spread(second.nodes)
    )


def _speed(assignment: Assignment, table: NeighbourTable, nodes: set[int]) -> float:
    """Return the speeds of all jobs on these nodes beside each other, times their GPUs there."""
    total = 0.0
    for node in sorted(nodes):
        jobs = sorted(assignment.later.tenants.get(node, ()))
        for job in jobs:
            others = [other for other in jobs if other != job]
            total += job[1] * table.slowed(assignment.frame.names[node], job, others)
    return total
