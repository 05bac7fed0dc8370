"""Places that a running job can reach in place: its companions leave, or new ones join. Pure.

Slurm gives each companion exactly the GPUs that it asks for on its node, so that these places need
no even shares. A change in place keeps the job's own GPUs and cuts no companion
(docs/adr/0018-in-place-changes.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import combinations

import numpy as np

from slurm_elastic.core.cluster import Allocation, Companion
from slurm_elastic.placement.best_fit import NodeDemand, even_splits, fit
from slurm_elastic.placement.eligibility import SPRAWL, RoundJob
from slurm_elastic.placement.free_resources import FreeResources

#: Up to so many companions, all subsets of them are compared; else those of one node each.
_MOST_COMPARED = 8


def smaller(round_job: RoundJob) -> list[Allocation]:
    """Return the places with fewer companions that the directive allows, the largest first."""
    current, companions = round_job.current, round_job.job.companions
    if current is None or not companions or not round_job.record.by_companions:
        return []
    places = {_without(current, leaving) for leaving in _subsets(companions)}
    allowed = (p for p in places if p.gpus and round_job.allowed(p))
    return sorted(allowed, key=lambda p: (-p.gpus, len(p.shares), p.shares))


def larger(
    round_job: RoundJob, demand: NodeDemand, gpus: int, resources: FreeResources
) -> Allocation | None:
    """Return the place with so many GPUs that new companions lead to, or None.

    Args:
        round_job: running.
        demand: its demands on nodes.
        gpus: more than it has.
        resources: with the job's own GPUs given back.
    """
    current = round_job.current
    if current is None or not round_job.record.by_companions:
        return None
    gpu_type, unit = current.gpu_type, round_job.directive.unit_for(current.gpu_type)
    added = dataclasses.replace(
        demand, own={}, required=(), min_nodes=1, max_nodes=None, sprawl=None
    )
    resources.take(round_job.need, current)
    more = fit(added, gpu_type, gpus - current.gpus, resources, unit=unit)
    if more is None and unit == 1:
        more = _fill(added, gpu_type, gpus - current.gpus, resources)
    resources.give(round_job.need, current)
    if more is None:
        return None
    shares = dict(current.shares)
    for node, count in more.shares:
        shares[node] = shares.get(node, 0) + count
    place = Allocation.of(gpu_type, shares)
    most = resources.frame.per_node.get(gpu_type, gpus)
    splits = even_splits(gpus, most, unit)
    nodes = SPRAWL * splits[0][0] if splits else len(current.shares)
    if demand.max_nodes is not None:
        nodes = min(nodes, demand.max_nodes)
    if len(place.shares) > max(nodes, len(current.shares)):
        return None
    return None if resources.exceeds_limits(round_job.need, place) else place


def _fill(
    demand: NodeDemand, gpu_type: str, gpus: int, resources: FreeResources
) -> Allocation | None:
    """Return so many GPUs on as few nodes as possible, in uneven shares."""
    frame = resources.frame
    room = np.where(demand.allowed, resources.room(demand.need), 0) * frame.of_type(gpu_type)
    shares: dict[str, int] = {}
    for i in np.argsort(-room, kind="stable").tolist():
        count = min(int(room[i]), gpus - sum(shares.values()))
        if count <= 0:
            break
        shares[frame.names[i]] = count
    if sum(shares.values()) < gpus:
        return None
    place = Allocation.of(gpu_type, shares)
    return None if resources.exceeds_limits(demand.need, place) else place


def _subsets(companions: tuple[Companion, ...]) -> Iterable[tuple[Companion, ...]]:
    """Return sets of companions that may leave together."""
    if len(companions) <= _MOST_COMPARED:
        for count in range(1, len(companions) + 1):
            yield from combinations(companions, count)
        return
    by_node: dict[str, list[Companion]] = {}
    for companion in companions:
        by_node.setdefault(companion.allocation.nodes[0], []).append(companion)
    for order in (companions, companions[::-1]):
        for count in range(1, len(order) + 1):
            yield order[:count]
    for present in by_node.values():
        for count in range(1, len(present) + 1):
            yield tuple(present[:count])


def _without(current: Allocation, leaving: Iterable[Companion]) -> Allocation:
    left = dict(current.shares)
    for companion in leaving:
        for node, gpus in companion.allocation.shares:
            left[node] = left.get(node, 0) - gpus
    return Allocation.of(current.gpu_type, {n: g for n, g in left.items() if g > 0})
