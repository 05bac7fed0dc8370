"""Candidate places of a round: one layout per GPU type, one free map per kind of need.

Nodes differ in size, jobs in the nodes that they may use. Jobs that may use the same nodes and need
the same CPUs and memory with each GPU share `TypeCandidates`. These have two free maps: `idle`,
GPUs that no job holds, and `open`, with those of gangs whose lease is over. An allocation is taken
from all candidates of its type.

A place is an even share, as Slurm is asked for one (placement/best_fit.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from slurm_elastic.core.cluster import Allocation, Node
from slurm_elastic.core.nodelist import expand
from slurm_elastic.fabric import Fabric
from slurm_elastic.models.communication import Communication, Span
from slurm_elastic.models.live_communication import LiveCommunication, key_of
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement.best_fit import evenly
from slurm_elastic.placement.delay.free_map import FreeMap, GangTier, NodeLayout, Place
from slurm_elastic.placement.delay.place_choice import PlaceChoice
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.node_arrays import Ints, Mask, NodeArrays
from slurm_elastic.policies.dally.job_state import GangState


@dataclass(frozen=True, slots=True)
class NeedKind:
    """Properties of a job on which the value of a place depends, beside its GPUs.

    Attributes:
        job_id: one of its jobs.
        farthest: the highest tier that is accepted.
    """

    job_id: int
    model: SpeedModel
    gpu_type: str
    unit: int
    max_nodes: int | None
    farthest: GangTier


#: (gang, what it has, what it keeps, whether it was served in this round).
Change = tuple[GangState, Allocation, Allocation, bool]


class NeedKinds:
    """Kinds of needs by name; answers `Communication` for them."""

    def __init__(self, live: LiveCommunication) -> None:
        self._live = live
        self._names: dict[tuple[object, ...], str] = {}
        self._kinds: dict[str, NeedKind] = {}
        self._known: dict[tuple[str, int, Span], float] = {}

    def name(self, kind: NeedKind) -> str:
        """Return the name of a kind; equal jobs share a model, hence its identity is the key."""
        key = (id(kind.model), kind.gpu_type, kind.unit, kind.max_nodes, kind.farthest)
        name = self._names.setdefault(key, str(len(self._names)))
        self._kinds.setdefault(name, kind)
        return name

    def kind(self, name: str) -> NeedKind:
        """Return the kind of a name."""
        return self._kinds[name]

    def part(self, model: str, gpus: int, span: Span) -> float:
        """See `Communication`."""
        key = model, gpus, span
        if key not in self._known:
            kind = self._kinds[model]
            job = key_of(kind.job_id, kind.gpu_type)
            self._known[key] = self._live.part(job, gpus, span)
        return self._known[key]


class Places(PlaceChoice):
    """Choice among places that Slurm allocates exactly as requested; others count as no place."""

    def __init__(
        self, room: FreeMap, kinds: NeedKinds, communication: Communication, most: int
    ) -> None:
        super().__init__(room, communication)
        self._kinds = kinds
        self._most = most

    def part(self, model: str, gpus: int, place: Place) -> float:
        """Return the part of time that a gang computes there; 0.0 where it cannot run."""
        kind, sites = self._kinds.kind(model), self.room.sites
        shares: dict[int, int] = {}
        for domain, count in place:
            node = sites.node_of[domain]
            shares[node] = shares.get(node, 0) + count
        if not shares or (kind.max_nodes and len(shares) > kind.max_nodes):
            return 0.0
        if sites.tier(place) > kind.farthest:
            return 0.0
        if not evenly(shares.values(), self._most, kind.unit):
            return 0.0
        return super().part(model, gpus, place)


@dataclass(slots=True)
class TypeCandidates:
    """Candidate places of one GPU type for gangs of one kind of need.

    Attributes:
        empty: all nodes that they may ever use, as if nothing ran there.
    """

    idle: Places
    open: Places
    empty: Places


class _Layout:
    """Nodes of one type, rack by rack."""

    def __init__(self, frame: NodeArrays, fabric: Fabric, gpu_type: str) -> None:
        members = np.flatnonzero(frame.of_type(gpu_type))
        order = members[np.lexsort((members, frame.rack[members]))].tolist()
        self.nodes: list[int] = order
        nodes = frame.snapshot.nodes
        _, racks = np.unique(frame.rack[order], return_inverse=True)
        size: list[int] = []
        node_of: list[int] = []
        for at, i in enumerate(order):
            sizes = _domain_sizes(nodes[i], fabric)
            size += sizes
            node_of += [at] * len(sizes)
        self.sites = NodeLayout(tuple(size), tuple(node_of), tuple(racks.tolist()))
        self.at = {i: at for at, i in enumerate(order)}
        self.names = [frame.names[i] for i in order]
        self.most = frame.per_node.get(gpu_type, 0)
        self._taken = _used_per_domain(frame, fabric, order)

    def room(self, free: Ints) -> FreeMap:
        """Return a free map with this many GPUs free on each node of the frame."""
        free_by_domain: list[int] = []
        domains = self.sites.domains_of
        for at, count in enumerate(free[self.nodes].tolist()):
            of_node = domains[at]
            if len(of_node) == 1:
                free_by_domain.append(max(0, count))
                continue
            left = [
                max(0, self.sites.size[d] - used)
                for d, used in zip(of_node, self._taken[at], strict=True)
            ]
            free_by_domain += _fitted(left, [self.sites.size[d] for d in of_node], max(0, count))
        return FreeMap(self.sites, free_by_domain)


class RoundCandidates:
    """Candidate places of a round for all GPU types and needs; `take` updates all of them."""

    def __init__(
        self,
        resources: FreeResources,
        fabric: Fabric,
        everyone: Iterable[GangState],
        bidding: Iterable[GangState],
        *,
        live: LiveCommunication,
    ) -> None:
        """Prepare.

        Args:
            resources: free resources for these jobs; not to be used by the caller afterwards.
            fabric: link domains.
            everyone: all gangs of the round.
            bidding: gangs whose lease is over; their GPUs can be given to any gang.
            live: speed of the gangs by the distance of their GPUs.
        """
        self.frame = resources.frame
        self.kinds = NeedKinds(live)
        self._fabric = fabric
        self._idle = resources
        self._layouts: dict[str, _Layout] = {}
        self._by_need: dict[tuple[object, ...], tuple[str, TypeCandidates, Mask]] = {}
        self.resources = resources.copy()
        for bidder in bidding:
            self.resources.give(bidder.need, bidder.held)
        # All at once: later allocations are taken from all that exist.
        for bidder in everyone:
            for gpu_type, _ in bidder.shapes:
                self.of_type(bidder, gpu_type)

    def of_type(self, bidder: GangState, gpu_type: str) -> TypeCandidates:
        """Return the candidates of a type for a gang."""
        allowed = self.frame.allowed(bidder.job)
        need = bidder.need
        required, *_ = self.frame.own_constraints(bidder.job)
        key = (gpu_type, id(allowed), need.cpus_per_gpu, need.memory_per_gpu_mb, required)
        cached = self._by_need.get(key)
        if cached is not None:
            return cached[1]
        if required:
            # Slurm gives all nodes that the job requires: a place on some of them is impossible.
            allowed = allowed & np.isin(np.array(self.frame.names), required)
        layout = self._layout(gpu_type)
        ever = self.frame.allowed(bidder.job, planned=True)
        ever = ever & allowed if required else ever
        candidates = TypeCandidates(
            *(
                Places(layout.room(free), self.kinds, self.kinds, layout.most)
                for free in (
                    np.where(allowed, self._idle.room(need), 0),
                    np.where(allowed, self.resources.room(need), 0),
                    np.where(ever, self.frame.gpus, 0),
                )
            )
        )
        self._by_need[key] = gpu_type, candidates, allowed
        return candidates

    def name(self, bidder: GangState, gpu_type: str, farthest: GangTier) -> str:
        """Return the name of the kind of a gang on a type."""
        partition = self.frame.partition(bidder.job.partition)
        return self.kinds.name(
            NeedKind(
                bidder.job_id, bidder.model, gpu_type, bidder.directive.unit_for(gpu_type),
                partition.max_nodes if partition else None, farthest,
            )
        )  # fmt: skip

    def allocation(self, gpu_type: str, place: Place) -> Allocation:
        """Return a place as an allocation, by node names."""
        layout = self._layout(gpu_type)
        shares: dict[str, int] = {}
        for domain, gpus in place:
            name = layout.names[layout.sites.node_of[domain]]
            shares[name] = shares.get(name, 0) + gpus
        return Allocation.of(gpu_type, shares)

    def holds(self, bidder: GangState, allocation: Allocation) -> bool:
        """Return whether GPUs, CPUs, memory and limits allow an allocation on allowed nodes."""
        room = self.resources.room(bidder.need)
        shares = self.frame.shares(allocation.shares)
        if len(shares) != len(allocation.shares) or any(room[i] < g for i, g in shares.items()):
            return False
        return not self.resources.exceeds_limits(bidder.need, allocation)

    def take(self, bidder: GangState, allocation: Allocation) -> None:
        """Allocate to a gang; no other one is offered it."""
        self.resources.take(bidder.need, allocation)
        self._remove(allocation.gpu_type, dict(allocation.shares))

    def stay(self, bidder: GangState, allocation: Allocation) -> None:
        """Let a gang whose lease is over keep (some of) its GPUs; idle GPUs stay idle."""
        self.resources.take(bidder.need, allocation)
        self._remove(allocation.gpu_type, dict(allocation.shares), idle=False)

    def improve(self, bidder: GangState, old: Allocation, new: Allocation) -> None:
        """Give a served gang another place; its old GPUs count as free already."""
        self.resources.take(bidder.need, new)
        more = {n: g - old.on(n) for n, g in new.shares if g > old.on(n)}
        self._remove(new.gpu_type, more)

    def exchange(
        self,
        bidder: GangState,
        place: Allocation,
        changes: Sequence[Change],
        idle: Mapping[str, int],
    ) -> bool:
        """Give a gang a place of `idle` GPUs and of those that others give; False: impossible."""
        saved = self.resources.copy()
        for giver, allocation, left, served in changes:
            if served:
                self.resources.give(giver.need, allocation)
            elif not self.holds(giver, left):
                self.resources = saved
                return False
            self.resources.take(giver.need, left)
        if not self.holds(bidder, place):
            self.resources = saved
            return False
        self.resources.take(bidder.need, place)
        for _, allocation, _, served in changes:
            if not served:
                # All of it was open to all gangs until now.
                self._remove(allocation.gpu_type, dict(allocation.shares), idle=False)
        self._remove(place.gpu_type, idle)
        surplus = {n: idle.get(n, 0) - gpus for n, gpus in place.shares}
        for _, allocation, left, _ in changes:
            for name, gpus in allocation.shares:
                surplus[name] = surplus.get(name, 0) + gpus - left.on(name)
        self._add(place.gpu_type, {n: gpus for n, gpus in surplus.items() if gpus > 0})
        return True

    def keep(self, gpu_type: str, idle: Mapping[str, int]) -> None:
        """Keep these idle GPUs: offer them to no gang."""
        for name, gpus in idle.items():
            self.resources.gpus[self.frame.index[name]] -= gpus
        self._remove(gpu_type, idle)

    def potential(
        self, bidder: GangState, gpu_type: str, more: Mapping[str, int], *, idle: bool
    ) -> Places:
        """Return a gang's free map, copied, with further GPUs on some nodes."""
        candidates, layout = self.of_type(bidder, gpu_type), self._layout(gpu_type)
        room = (candidates.idle if idle else candidates.open).room.copy()
        allowed = self.frame.allowed(bidder.job)
        own = bidder.held.nodes if bidder.held else ()
        for name, gpus in more.items():
            i = self.frame.index.get(name, -1)
            at = layout.at.get(i)
            if at is not None and (allowed[i] or name in own):
                _add(room, layout.sites.domains_of[at], gpus)
        return Places(room, self.kinds, self.kinds, layout.most)

    def free_on(self, places: Places, gpu_type: str, name: str) -> int:
        """Return the free GPUs of a map on a node."""
        at = self._layout(gpu_type).at.get(self.frame.index.get(name, -1))
        return places.room.node[at] if at is not None else 0

    def nodes(self, gpu_type: str) -> tuple[NodeLayout, Sequence[str]]:
        """Return layout and names of the nodes of a type."""
        layout = self._layout(gpu_type)
        return layout.sites, layout.names

    def _layout(self, gpu_type: str) -> _Layout:
        layout = self._layouts.get(gpu_type)
        if layout is None:
            layout = self._layouts[gpu_type] = _Layout(self.frame, self._fabric, gpu_type)
        return layout

    def _add(self, gpu_type: str, shares: Mapping[str, int]) -> None:
        """Offer further idle GPUs to all gangs that may use their nodes."""
        layout = self._layout(gpu_type)
        for kind, candidates, allowed in self._by_need.values():
            if kind != gpu_type:
                continue
            for name, gpus in shares.items():
                i = self.frame.index.get(name, -1)
                at = layout.at.get(i)
                if at is not None and allowed[i]:
                    for room in (candidates.idle.room, candidates.open.room):
                        _add(room, layout.sites.domains_of[at], gpus)

    def _remove(self, gpu_type: str, shares: Mapping[str, int], *, idle: bool = True) -> None:
        layout = self._layout(gpu_type)
        for kind, candidates, _ in self._by_need.values():
            if kind != gpu_type:
                continue
            for room in (
                (candidates.idle.room, candidates.open.room) if idle else (candidates.open.room,)
            ):
                for name, gpus in shares.items():
                    at = layout.at.get(self.frame.index.get(name, -1))
                    if at is not None:
                        _remove(room, layout.sites.domains_of[at], gpus)


def _add(room: FreeMap, domains: Sequence[int], gpus: int) -> None:
    """Free up to this many GPUs, as many as the domains have."""
    for domain in domains:
        share = min(gpus, room.sites.size[domain] - room.free[domain])
        if share > 0:
            room.give(((domain, share),))
            gpus -= share


def _remove(room: FreeMap, domains: Sequence[int], gpus: int) -> None:
    """Take up to this many GPUs, of a domain with exactly as many, else of the one with most."""
    exact = next((d for d in domains if room.free[d] == gpus), None)
    order = [exact] if exact is not None else sorted(domains, key=lambda d: (-room.free[d], d))
    for domain in order:
        share = min(gpus, room.free[domain])
        if share > 0:
            room.take(((domain, share),))
            gpus -= share


def _domain_sizes(node: Node, fabric: Fabric) -> list[int]:
    domains = fabric.domains(node.name)
    sizes = [len(d) for d in domains]
    return sizes if sizes and sum(sizes) == node.gpus else [node.gpus]


def _used_per_domain(frame: NodeArrays, fabric: Fabric, order: Sequence[int]) -> list[list[int]]:
    """Return the GPUs in use of each domain of each node, as far as known."""
    used: dict[str, set[int]] = {}
    for job in frame.snapshot.jobs:
        for name, text in job.devices if job.allocation else ():
            used.setdefault(name, set()).update(_indexes(text))
    used_per_domain = []
    for i in order:
        node = frame.snapshot.nodes[i]
        domains = fabric.domains(node.name)
        used_here = used.get(node.name, set()).union(node.shared_gpus)
        counts = [len(used_here & set(d)) for d in domains]
        used_per_domain.append(counts or [0])
    return used_per_domain


@lru_cache(maxsize=4096)
def _indexes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name[1:]) for name in expand(f"g[{text}]"))
    except ValueError:
        return ()


def _fitted(left: Sequence[int], sizes: Sequence[int], count: int) -> list[int]:
    """Return free GPUs of each domain, near `left`, with the known sum."""
    free = list(left)
    while sum(free) > count:
        at = max((i for i, f in enumerate(free) if f), key=lambda i: (-free[i], i))
        free[at] -= 1
    while sum(free) < count:
        at = max((i for i, f in enumerate(free) if f < sizes[i]), key=lambda i: (free[i], -i))
        free[at] += 1
    return free
