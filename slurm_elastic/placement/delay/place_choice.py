"""Choice of a gang's place: the best of a few candidates, not the first one with room.

A gang's speed depends on the number of racks, nodes and link domains that it covers, and on whether
its GPUs divide evenly among them. So for each even division the tightest nodes are candidates
(best-fit: those that leave the fewest GPUs over), then whatever is free, fullest nodes first.
Which of them is best depends on the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slurm_elastic.models.communication import Communication
from slurm_elastic.placement.delay.free_map import FreeMap, NodeLayout, Place

#: Compute shares that differ by less are equal; then the tighter place wins.
_EQUAL = 1e-3


class PlaceChoice:
    """Best places for gangs in a free map that only shrinks; answers are kept.

    Attributes:
        room: what is free; only `take` may change it.
    """

    def __init__(self, room: FreeMap, communication: Communication) -> None:
        self.room = room
        self._communication = communication
        self._answers: dict[tuple[str, int], tuple[Place, float]] = {}

    def take(self, place: Place) -> None:
        """Allocate a place."""
        self.room.take(place)

    def best(
        self, model: str, gpus: int, *, enough: float, last: Place = ()
    ) -> tuple[Place, float]:
        """Return (place, part of time spent computing there); () and 0.0 when there is no room.

        Args:
            model: name of the model that communicates.
            gpus: all at once.
            enough: the search ends at a place with this part; the same in all calls for this
                model and size.
            last: its last place, taken again unless another one is better.
        """
        key = model, gpus
        answer = self._answers.get(key)
        # The free map only shrinks: an answer stays the best as long as its place is free.
        if answer is None or (answer[0] and not self.room.holds(answer[0])):
            answer = self._answers[key] = self._search(model, gpus, enough)
        place, part = answer
        if last and self.room.holds(last):
            last_part = self.part(model, gpus, last)
            if last_part >= part - _EQUAL:
                return last, last_part
        return place, part

    def part(self, model: str, gpus: int, place: Place) -> float:
        """Return the part of time that a gang computes on a place."""
        return self._communication.part(model, gpus, self.room.sites.span(place))

    def _search(self, model: str, gpus: int, enough: float) -> tuple[Place, float]:
        best: Place = ()
        most = 0.0
        for place in places(self.room, gpus):
            part = self.part(model, gpus, place)
            if part > most + _EQUAL:
                best, most = place, part
                if most >= enough - _EQUAL:
                    break
        return best, most


def ideal(sites: NodeLayout, communication: Communication, model: str, gpus: int) -> float:
    """Return the part of time that a gang computes on the best place of the empty cluster."""
    return PlaceChoice(FreeMap(sites), communication).best(model, gpus, enough=1.0)[1]


def places(room: FreeMap, gpus: int) -> Iterator[Place]:
    """Return candidate places, tightest first among equals."""
    if room.free_total < gpus:
        return
    yield from _in_domain(room, gpus)
    yield from _in_node(room, gpus)
    if gpus == 1:
        return
    for nodes in range(2, gpus + 1):
        if gpus % nodes == 0 and gpus // nodes <= room.sites.per_node:
            yield from _even(room, gpus, nodes)
    racks = [r for r, free in enumerate(room.rack) if free >= gpus]
    if racks:
        rack = min(racks, key=lambda r: (room.rack[r], r))
        yield _fullest(room, gpus, room.sites.nodes_of[rack])
    yield _fullest(room, gpus, range(len(room.node)))


def _in_domain(room: FreeMap, gpus: int) -> Iterator[Place]:
    fits = [d for d, free in enumerate(room.free) if free >= gpus]
    if fits:
        node_of = room.sites.node_of
        yield ((min(fits, key=lambda d: (room.free[d], room.node[node_of[d]], d)), gpus),)


def _in_node(room: FreeMap, gpus: int) -> Iterator[Place]:
    fits = [n for n, free in enumerate(room.node) if free >= gpus]
    if not fits:
        return
    fits.sort(key=lambda n: (room.node[n], n))
    even = next((p for n in fits if (p := _evenly(room, n, gpus))), ())
    if even:
        yield even
    yield room.in_node(fits[0], gpus)


def _evenly(room: FreeMap, node: int, gpus: int) -> Place:
    """Return the same number of GPUs on each link domain of a node; () when impossible."""
    domains = room.sites.domains_of[node]
    each, remainder = divmod(gpus, len(domains))
    if remainder or not each or len(domains) == 1 or any(room.free[d] < each for d in domains):
        return ()
    return tuple((d, each) for d in domains)


def _even(room: FreeMap, gpus: int, nodes: int) -> Iterator[Place]:
    """Return the same number of GPUs on each of some nodes: in one rack, else evenly over racks."""
    each = gpus // nodes
    # Stable: among equals the lowest index is first.
    free = room.node.__getitem__
    fits = [sorted([n for n in ns if room.node[n] >= each], key=free) for ns in room.sites.nodes_of]
    single_racks = [r for r, ns in enumerate(fits) if len(ns) >= nodes]
    if single_racks:
        rack = min(single_racks, key=lambda r: (sum(room.node[n] for n in fits[r][:nodes]), r))
        yield _shares(room, fits[rack][:nodes], each)
        return
    for racks in range(2, len(fits) + 1):
        if nodes % racks:
            continue
        per_rack = nodes // racks
        racks_with_room = [r for r, ns in enumerate(fits) if len(ns) >= per_rack]
        if len(racks_with_room) >= racks:
            chosen = sorted(racks_with_room, key=lambda r: (room.rack[r], r))[:racks]
            yield _shares(room, [n for r in chosen for n in fits[r][:per_rack]], each)
            return


def _shares(room: FreeMap, nodes: Sequence[int], each: int) -> Place:
    shares: list[tuple[int, int]] = []
    for node in nodes:
        domain = next(
            (d for d in room.sites.domains_of[node] if room.free[d] == each),
            next((d for d in room.sites.domains_of[node] if room.free[d] > each), None),
        )
        shares += ((domain, each),) if domain is not None else room.in_node(node, each)
    return tuple(sorted(shares))


def _fullest(room: FreeMap, gpus: int, nodes: Sequence[int]) -> Place:
    order = sorted(nodes, key=room.node.__getitem__, reverse=True)
    return room.fill((d for n in order for d in room.sites.domains_of[n]), gpus)
