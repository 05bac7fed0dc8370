"""Places that a running job can reach in place: its companions leave, or new ones join. Pure.

A change in place keeps the job's own GPUs and cuts no companion
(docs/adr/0018-in-place-changes.md). Slurm gives each companion exactly the GPUs that it asks for on
its node, so that `smaller` and `larger` need no even shares. `place_in_place` is for binding
proposals, whose shape is given (pack.py): whole nodes, and what remains on one node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations

import numpy as np

from slurm_elastic.core.cluster import Allocation, Companion, Job, Node, Snapshot
from slurm_elastic.core.resize_kind import change_in_place
from slurm_elastic.placement.best_fit import NodeDemand, even_splits, fit
from slurm_elastic.placement.eligibility import SPRAWL, RoundJob
from slurm_elastic.placement.free_resources import FreeResources

#: Most companions of which all subsets are compared; of more, those of one node each.
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
    if demand.group_reach and unit == 1:
        return None  # all its GPUs are one spatial group, which companions would tear
    allowed = demand.allowed
    if not round_job.record.in_place:  # one part on each node: see `resize_kind.shares_node`
        allowed = allowed.copy()
        allowed[list(demand.own)] = False
    added = dataclasses.replace(
        demand, allowed=allowed, own={}, required=(), min_nodes=1, max_nodes=None, sprawl=None,
        held_indexes={},
    )  # fmt: skip
    resources.take(round_job.need, current)
    more = fit(added, gpu_type, gpus - current.gpus, resources, unit=unit)
    if more is None and unit == 1 and not demand.whole_nodes:
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
    racks = resources.frame.topology.spread(place.nodes)[1]
    if demand.most_racks is not None and racks > demand.most_racks:
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


def place_in_place(job: Job, gpus: int, most: int, room: Mapping[str, int]) -> Allocation | None:
    """Return a place for so many GPUs that a job reaches in place, or None.

    Args:
        job: running.
        gpus: > 0, on GPUs of the type that it holds.
        most: GPUs of the largest node of the type.
        room: GPUs that the job may hold on each node, those that it holds included; where there is
            a choice, earlier nodes are taken.
    """
    base, held = job.base_allocation, job.allocation
    if base is None or held is None or most <= 0:
        return None
    full, remainder = divmod(gpus, most)
    # Nodes of the base first, then those of companions, then the others.
    base_shares, shares_held = dict(base.shares), dict(held.shares)
    own = sorted(
        (n for n in room if n in shares_held),
        key=lambda n: (-base_shares.get(n, 0), -shares_held[n]),
    )
    others = [n for n in room if n not in shares_held]
    order = [*own, *others]
    for last in _last_nodes(own, others, remainder, room):
        nodes = [n for n in order if n != last and room[n] >= most][:full]
        if len(nodes) < full:
            continue
        shares = dict.fromkeys(nodes, most)
        if last is not None:
            shares[last] = remainder
        place = Allocation.of(base.gpu_type, shares)
        if change_in_place(job, place) is not None:
            return place
    return None


class FreeRoom:
    """Free GPUs of a snapshot, for `place_in_place`; nodes that make no difference are left out."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._names: dict[tuple[str, str], dict[int, list[str]]] = {}

    def of(self, job: Job, nodes: int) -> dict[str, int]:
        """Return the GPUs of its type that a running job may hold now, by node.

        Args:
            job: running.
            nodes: most nodes that it may get.
        """
        held = job.allocation
        if held is None:
            return {}
        names = self._by_free_gpus(job.partition, held.gpu_type)
        whole = self._snapshot.per_node.get(held.gpu_type, 0)
        free: dict[str, int] = {}
        for gpus, equal in names.items():
            count = (nodes if gpus == whole else 1) + len(held.shares)
            free.update(dict.fromkeys(equal[:count], gpus))
        own = {
            name: gpus + self._free(self._snapshot.node.get(name), job.partition)
            for name, gpus in held.shares
        }
        return free | own

    def _by_free_gpus(self, partition: str, gpu_type: str) -> dict[int, list[str]]:
        names = self._names.get((partition, gpu_type))
        if names is None:
            names = {}
            for node in self._snapshot.nodes:
                gpus = self._free(node, partition)
                if gpus and node.gpu_type == gpu_type:
                    names.setdefault(gpus, []).append(node.name)
            self._names[partition, gpu_type] = names
        return names

    @staticmethod
    def _free(node: Node | None, partition: str) -> int:
        """Return the GPUs into which jobs of a partition may grow."""
        if node is None or node.planned or partition not in node.partitions:
            return 0
        return node.free_gpus


def _last_nodes(
    own: list[str], others: list[str], remainder: int, room: Mapping[str, int]
) -> Iterator[str | None]:
    """Iterate over nodes for what remains: those held, then the one with the least to spare."""
    if not remainder:
        yield None
        return
    yield from (n for n in own if room[n] >= remainder)
    with_room = [n for n in others if room[n] >= remainder]
    if with_room:
        yield min(with_room, key=lambda n: room[n])
