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
    first_place, second_place = first.target, second.target
    if first_place is None or second_place is None or first_place == second_place:
        return False
    if not _alike(assignment, first_place, second_place):
        return False
    frame, later = assignment.frame, assignment.later
    one, two = first.round_job, second.round_job
    nodes = {*frame.shares(first_place.shares), *frame.shares(second_place.shares)}
    before = _speed(assignment, table, nodes)
    later.give(one.need, first_place)
    later.give(two.need, second_place)
    places = assignment.exactly(one, second_place), assignment.exactly(two, first_place)
    if None not in places:
        later.take(one.need, second_place)
        later.take(two.need, first_place)
        if _speed(assignment, table, nodes) > (1 + _LEAST_GAIN) * before:
            first.target, second.target = second_place, first_place
            return True
        later.give(one.need, second_place)
        later.give(two.need, first_place)
    later.take(one.need, first_place)
    later.take(two.need, second_place)
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
        total += table.total_speed(assignment.frame.names[node], jobs, jobs)
    return total
