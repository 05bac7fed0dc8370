"""`dally` as published: delay timers and network-sensitive preemption (arXiv 2401.16492).

Order: the lowest network sensitivity first, that is, the gang slowed down most
by communication; a gang that never ran has 0. With W the part of its work that is done,

    Nw_sens = W / (T_run / T_ideal)

ties: longest without an assignment, then the smaller id. A gang takes the first link
domain with room, else the first node; else it waits as the timers say
(placement/delay/timers.py), then takes the first rack, then anything. A gang that does not fit
is passed over, and nothing is kept for it. The faults that docs/dally-published.md lists are as
published; `own_dally` has none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurm_elastic.placement.delay.free_map import FreeMap, GangTier, Place
from slurm_elastic.placement.delay.timers import Timers, Waits
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs import published_order
from slurm_elastic.simulator.gangs.gang_policy import Answer, Grant, Offer


class PublishedDally:
    """Policy `dally` as published; its state: the tuner's waits."""

    renews = False

    def __init__(self, timers: Timers) -> None:
        self._timers = timers

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Rank by network sensitivity; see the module."""
        return gang.network_sensitivity, gang.since_s, gang.job_id

    def decide(self, offer: Offer, state: Mapping[str, Any]) -> Answer:
        """Offer the free GPUs to one gang after another; see the module."""
        waits: Waits = state
        search = FirstFit(offer.room.copy())
        grants = []
        for gang in offer.waiting:
            if gang.gpus > search.room.free_total:
                if not search.room.free_total:
                    break
                continue
            place, tier, waits = self._accepts(gang, search, offer.now_s, waits)
            if place:
                search.take(place)
                grants.append(Grant(gang.job_id, place, tier))
        return Answer(grants=tuple(grants), state=waits)

    def _accepts(
        self, gang: Gang, search: FirstFit, now_s: float, waits: Waits
    ) -> tuple[Place, GangTier, Waits]:
        gpus, waited_s, sites = gang.gpus, now_s - gang.since_s, search.room.sites
        place = search.near(gpus)
        if place:
            tier = GangTier.NODE if gpus > 1 else GangTier.SINGLE
            times = {"now_s": now_s, "waited_s": waited_s}
            return place, tier, self._timers.remember(waits, "node", gpus, **times)
        node_s, rack_s = self._timers.limits_s(gpus, waits)
        if waited_s >= node_s or gpus > sites.per_node:
            place = search.rack(gpus)
            if place:
                times = {"now_s": now_s, "waited_s": waited_s}
                return place, sites.tier(place), self._timers.remember(waits, "rack", gpus, **times)
        if waited_s >= rack_s or gpus > sites.per_rack:
            place = search.room.anywhere(gpus)
            return place, sites.tier(place), waits
        return (), GangTier.SINGLE, waits


class FirstFit:
    """Search for the first domain, node or rack with room, in the published order; cached.

    Attributes:
        room: what is still free.
    """

    def __init__(self, room: FreeMap) -> None:
        self.room = room
        self._places: dict[tuple[str, int], Place] = {}

    def take(self, place: Place) -> None:
        """Remove the GPUs of a place from the free ones."""
        self.room.take(place)
        self._places.clear()

    def near(self, gpus: int) -> Place:
        """Return a place in a link domain, else in a node; () if there is none."""
        return self._once("near", gpus, lambda: self._domain(gpus) or self.node(gpus))

    def node(self, gpus: int) -> Place:
        """Return a place in a node; () if there is none."""
        return self._once("node", gpus, lambda: self._node(gpus))

    def rack(self, gpus: int) -> Place:
        """Return a place in a rack, in order of index; () if there is none."""
        return self._once("rack", gpus, lambda: self._rack(gpus))

    def _once(self, kind: str, gpus: int, find: Callable[[], Place]) -> Place:
        key = kind, gpus
        if key not in self._places:
            self._places[key] = find()
        return self._places[key]

    def _domain(self, gpus: int) -> Place:
        free = self.room.free
        if max(free, default=0) < gpus:
            return ()
        domain = _first(published_order.domains(self.room), free, gpus)
        return ((domain, gpus),) if domain is not None else ()

    def _node(self, gpus: int) -> Place:
        if max(self.room.node, default=0) < gpus:
            return ()
        node = _first(published_order.nodes(self.room), self.room.node, gpus)
        return self.room.in_node(node, gpus) if node is not None else ()

    def _rack(self, gpus: int) -> Place:
        rack = _first(range(len(self.room.rack)), self.room.rack, gpus)
        return self.room.in_rack(rack, gpus) if rack is not None else ()


def _first(order: Iterable[int], free: list[int], gpus: int) -> int | None:
    return next((i for i in order if free[i] >= gpus), None)
