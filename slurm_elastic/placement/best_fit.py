"""Best-fit by tier: which nodes a job gets for a given number of GPUs.

The rules, in this order (our definition):

1. An even share: k GPUs on each of n nodes (Slurm's TresPerNode), n as small
   as possible, and for a running job at most twice the fewest that take its
   size. A replica (`unit`) that fits into a node never straddles two: k is a
   multiple of it; a larger one takes whole nodes' shares.
2. n nodes of one rack if any rack has them, else as few racks as possible, in
   each of them whole replicas first.
3. Nodes on which the job and a neighbour do not hurt each other (`neighbour_table`), of these
   nodes that it already holds, then those with the fewest GPUs left over,
   so that whole nodes stay free, then those where so many GPUs of one link domain are free,
   then the lowest index. Spatial groups go only where each has linked GPUs (`link_domains`).
4. Only if nothing even fits, an uneven share (TresPerJob): Slurm fills such a
   request greedily from the lowest index and keeps to the plan only when it
   takes *everything* that is free on its nodes. So it is offered only on nodes
   whose free GPUs it uses up, which no other job is about to enter or leave,
   and on at most one node more than necessary.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.placement.free_resources import FreeResources, ResourceNeed
from slurm_elastic.placement.link_domains import group_room
from slurm_elastic.placement.node_arrays import Ints, Mask


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDemand:
    """Demands of a job on its nodes; its `own` GPUs must be given back to the resources first.

    Attributes:
        allowed: nodes that may give it GPUs it does not hold yet.
        own: GPUs it holds, by node index: these it may keep anywhere but on `closed` nodes.
        required: node indices that must be part of any allocation.
        min_nodes, max_nodes: how many nodes it may have, by its partition's limits, too.
        sprawl: at most this many times the fewest nodes for its size; None: any number.
        group_reach: "domain" or "node": each replica is a spatial group that stays within one;
            with units of one GPU all its GPUs are one group. "": no such rule.
        most_on: GPUs that limits leave it on each node; None: there are no such limits.
        most_racks: most racks of its nodes, by its user (--switches); None: any number.
        whole_nodes: Slurm gives it all of its nodes: it needs idle ones, and takes all their GPUs.
        closed: nodes that it holds, by index, on which Slurm would not start it again.
        held_indexes: indexes of its `own` GPUs, by node index, as far as they are known.
    """

    need: ResourceNeed
    allowed: Mask
    own: Mapping[int, int] = field(default_factory=dict)
    required: tuple[int, ...] = ()
    max_nodes: int | None = None
    min_nodes: int = 1
    sprawl: int | None = None
    group_reach: str = ""
    most_on: Ints | None = None
    most_racks: int | None = None
    whole_nodes: bool = False
    closed: frozenset[int] = frozenset()
    held_indexes: Mapping[int, Sequence[int]] = field(default_factory=dict)


def fit(
    demand: NodeDemand,
    gpu_type: str,
    gpus: int,
    resources: FreeResources,
    *,
    unit: int = 1,
    settled: Mask | None = None,
    caps: Mapping[int, int] | None = None,
) -> Allocation | None:
    """Return the best place for this many GPUs of a type, or None.

    Args:
        demand: the job.
        gpu_type: "" on clusters without types.
        gpus: > 0.
        resources: with the job's own GPUs given back.
        unit: GPUs per replica.
        settled: mask of nodes that no job is about to enter or leave; None: no uneven shares.
        caps: at most this many GPUs on these node indices.
    """
    frame = resources.frame
    room = _room(demand, gpu_type, resources, caps or {})
    most = frame.per_node.get(gpu_type, int(room.max(initial=0)))
    if demand.group_reach:
        unit = unit if unit > 1 else gpus
        room = _grouped(demand, room, unit, resources)
        most = max(most, unit)  # no group is divided among nodes
    chosen: dict[int, int] | None = None
    splits = even_splits(gpus, most, unit)
    ceiling = demand.max_nodes or gpus
    if demand.sprawl is not None and splits:
        ceiling = min(ceiling, demand.sprawl * splits[0][0])
    for nodes, share in splits:
        if nodes < demand.min_nodes:
            continue
        if nodes > ceiling:
            break
        enough = room >= share
        if demand.whole_nodes:
            enough &= frame.gpus == share
        picked = _pick(demand, enough, nodes, share, resources, replica=max(1, unit // share))
        if picked is not None and _near_enough(demand, picked, resources):
            chosen = dict.fromkeys(picked, share)
            break
    if chosen is None and settled is not None and unit <= most and not demand.whole_nodes:
        chosen = _uneven(demand, np.where(settled, room, 0), gpus, unit, resources)
        if chosen is not None and not _near_enough(demand, chosen, resources):
            chosen = None
    if chosen is None:
        return None
    allocation = Allocation.of(gpu_type, {frame.names[i]: k for i, k in chosen.items()})
    return None if resources.exceeds_limits(demand.need, allocation) else allocation


def takes(
    demand: NodeDemand,
    place: Allocation,
    resources: FreeResources,
    *,
    unit: int = 1,
    settled: Mask | None = None,
) -> bool:
    """Return whether a job may have exactly this place, and Slurm would allocate just that.

    Args:
        demand: the job; `sprawl` does not bind, as its policy chose the place.
        place: on nodes of one type.
        resources: with the job's own GPUs given back.
        unit: GPUs per replica.
        settled: see `fit`.
    """
    frame, shares = resources.frame, resources.frame.shares(place.shares)
    if len(shares) != len(place.shares) or any(i not in shares for i in demand.required):
        return False
    of_type, room = frame.of_type(place.gpu_type), resources.room(demand.need)
    if demand.most_on is not None:
        room = np.minimum(room, demand.most_on)
    for i, gpus in shares.items():
        away = gpus > demand.own.get(i, 0) and not demand.allowed[i]
        if away or not of_type[i] or gpus > room[i]:
            return False
    if demand.max_nodes and len(shares) > demand.max_nodes:
        return False
    unchanged = dict(demand.own) == shares
    if not unchanged and not _may_start(demand, shares, resources):
        return False
    most = frame.per_node.get(place.gpu_type, 0)
    if demand.group_reach and not unchanged:
        unit = unit if unit > 1 else place.gpus
        limited = _grouped(demand, room, unit, resources)
        if any(gpus > limited[i] or gpus % unit for i, gpus in shares.items()):
            return False
    if not unchanged and not evenly(shares.values(), most, unit):
        exhausts = all(gpus == room[i] == resources.gpus[i] for i, gpus in shares.items())
        if (
            settled is None
            or demand.required
            or not exhausts
            or not all(settled[i] for i in shares)
        ):
            return False
        if any(gpus % unit for gpus in shares.values()):
            return False
    return not resources.exceeds_limits(demand.need, place)


def _may_start(demand: NodeDemand, shares: Mapping[int, int], resources: FreeResources) -> bool:
    """Return whether Slurm would start the job with just these GPUs, by node index."""
    if demand.whole_nodes:
        idle, gpus = _idle(resources), resources.frame.gpus
        if not all(idle[i] and gpus[i] == share for i, share in shares.items()):
            return False
    enough = len(shares) >= demand.min_nodes and demand.closed.isdisjoint(shares)
    return enough and _near_enough(demand, shares, resources)


def _idle(resources: FreeResources) -> Mask:
    """Return the mask of nodes of which no job holds anything."""
    frame = resources.frame
    return np.asarray((resources.gpus >= frame.gpus) & (resources.cpus >= frame.cpus))


def evenly(shares: Iterable[int], most: int, unit: int) -> bool:
    """Return whether each node has the same number of GPUs, with no replica split (rule 1)."""
    counts = list(shares)
    split = (len(counts), counts[0])
    return min(counts) == max(counts) and split in even_splits(sum(counts), most, unit)


@lru_cache(maxsize=65536)
def even_splits(gpus: int, most: int, unit: int = 1) -> tuple[tuple[int, int], ...]:
    """Return (nodes, GPUs on each) of all even shares with whole replicas, fewest nodes first.

    >>> even_splits(12, 8), even_splits(12, 8, 4), even_splits(32, 8, 16)
    (((2, 6), (3, 4), (4, 3), (6, 2), (12, 1)), ((3, 4),), ((4, 8), (8, 4), (16, 2), (32, 1)))
    """
    if most <= 0:
        return ()
    return tuple(
        (gpus // share, share)
        for share in range(min(most, gpus), 0, -1)
        if gpus % share == 0 and (share % unit == 0 if unit <= most else unit % share == 0)
    )


def _room(
    demand: NodeDemand, gpu_type: str, resources: FreeResources, caps: Mapping[int, int]
) -> Ints:
    """Return the GPUs of a type that the job could have on each node."""
    room = np.where(demand.allowed, resources.room(demand.need), 0)
    for i, held in demand.own.items():
        if not demand.allowed[i]:
            room[i] = min(held, int(resources.room(demand.need)[i]))
    room *= resources.frame.of_type(gpu_type)
    if demand.most_on is not None:
        room = np.minimum(room, demand.most_on)
    if demand.whole_nodes:
        room = np.where(_idle(resources), room, 0)
    for i in demand.closed:
        room[i] = 0
    for i, cap in caps.items():
        room[i] = min(int(room[i]), cap)
    return room


def _near_enough(demand: NodeDemand, nodes: Iterable[int], resources: FreeResources) -> bool:
    """Return whether nodes, by index, are in as few racks as the job asks for."""
    if demand.most_racks is None:
        return True
    return len({int(resources.frame.rack[i]) for i in nodes}) <= demand.most_racks


def _grouped(demand: NodeDemand, room: Ints, group: int, resources: FreeResources) -> Ints:
    """Return the GPUs of each node that hold whole spatial groups of so many ranks."""
    links = resources.frame.links if demand.group_reach == "domain" else {}
    return group_room(links, room, resources.gpus, demand.held_indexes, group)


def _pick(
    demand: NodeDemand,
    fits: Mask,
    nodes: int,
    share: int,
    resources: FreeResources,
    *,
    replica: int,
) -> list[int] | None:
    """Choose `nodes` of the nodes that fit, by rules 2 and 3; `replica`: nodes of one replica."""
    candidates = np.flatnonzero(fits)
    if len(candidates) < nodes:
        return None
    if demand.required and (
        len(demand.required) > nodes or not all(fits[i] for i in demand.required)
    ):
        return None
    rack = resources.frame.rack[candidates]
    left_over = resources.gpus[candidates] - share
    foreign = np.ones(len(candidates), dtype=np.int64)
    named_nodes = [*demand.own, *demand.required]
    if named_nodes:
        foreign[np.isin(candidates, named_nodes)] = 0
    if resources.tenants:  # one of these costs more than all others together
        job_id = demand.need.job_id
        hurting = [resources.hurts(job_id, int(i), share) for i in candidates]
        foreign += (nodes + 1) * np.array(hurting, dtype=np.int64)
    apart = _apart(candidates, share, resources)
    if demand.required:
        foreign[np.isin(candidates, demand.required)] = -1
        home = resources.frame.rack[demand.required[0]]
        order = np.lexsort((candidates, apart, left_over, foreign, rack != home))
        chosen = [int(i) for i in candidates[order] if i not in demand.required]
        return sorted([*demand.required, *chosen[: nodes - len(demand.required)]])
    if nodes == 1:
        order = np.lexsort((candidates, apart, left_over, foreign))
        return [int(candidates[order[0]])]
    order = np.lexsort((candidates, apart, left_over, foreign, rack))
    ordered, racks = candidates[order], rack[order]
    starts = np.flatnonzero(np.r_[True, racks[1:] != racks[:-1]])
    counts = np.diff(np.r_[starts, len(racks)])
    enough = np.flatnonzero(counts >= nodes)
    if len(enough):
        cost = np.c_[
            np.zeros((1, 2), dtype=np.int64).T,
            np.cumsum(np.stack([foreign[order], left_over[order]]), axis=1),
        ]
        first = starts[enough]
        sums = cost[:, first + nodes] - cost[:, first]
        best = int(first[np.lexsort((first, sums[1], sums[0]))[0]])
        return sorted(int(i) for i in ordered[best : best + nodes])
    own = np.add.reduceat(1 - foreign[order], starts)
    best_first = np.lexsort((starts, -counts, -own))
    return _across_racks(np.split(ordered, starts[1:]), best_first, nodes, replica)


def _apart(candidates: Ints, share: int, resources: FreeResources) -> Mask:
    """Return the nodes whose free GPUs of one link domain are, as far as is known, too few."""
    together = resources.frame.together
    if together is None:
        return np.zeros(len(candidates), dtype=bool)
    # Domains are known for the present: valid on nodes that no job enters or leaves.
    still = resources.gpus[candidates] == resources.frame.free[candidates]
    return np.asarray(~(still & (together[candidates] >= share)))


def _across_racks(racks: list[Ints], best_first: Ints, nodes: int, replica: int) -> list[int]:
    """Choose nodes on the fewest racks: the job's own, then the emptiest; whole replicas first."""
    chosen: list[int] = []
    left_over: list[int] = []
    for r in best_first:
        members = racks[r].tolist()
        full = min(len(members), nodes - len(chosen)) // replica * replica
        chosen += members[:full]
        left_over += members[full:]
    return sorted(chosen + left_over[: nodes - len(chosen)])


def _uneven(
    demand: NodeDemand, room: Ints, gpus: int, unit: int, resources: FreeResources
) -> dict[int, int] | None:
    """Choose nodes whose free GPUs add up to the demand, in one rack if possible (rule 4)."""
    exact = np.flatnonzero((room > 0) & (room == resources.gpus) & (room % unit == 0))
    if not len(exact) or demand.required:
        return None
    racks = resources.frame.rack[exact]
    groups = [exact[racks == r] for r in np.unique(racks)] if len(np.unique(racks)) > 1 else []
    for group in (*groups, exact):
        chosen: dict[int, int] = {}
        missing = gpus
        own = np.isin(group, list(demand.own)) if demand.own else np.zeros(len(group), dtype=bool)
        for i in group[np.lexsort((group, -room[group], ~own))].tolist():
            if room[i] <= missing:
                chosen[i] = int(room[i])
                missing -= chosen[i]
            if not missing:
                break
        necessary = -(-gpus // int(room[group].max()))
        most = min(necessary + 1, demand.max_nodes or len(chosen))
        if not missing and demand.min_nodes <= len(chosen) <= most:
            return chosen
    return None
