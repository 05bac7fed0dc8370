"""One round of bids: places, shrinks and preemptions.

1. A gang that has waited long enough is *due*: it takes a place that it accepts, else the nodes
   where its GPUs come free first are kept for it. Gangs keep what they hold there, without a new
   lease.
2. In order, gangs that wait and gangs whose lease is over: the latter keep what they have unless a
   gang before them took it; the others search idle GPUs, then those that elastic gangs can give,
   then those of gangs whose lease is over; at last at smaller sizes.
3. A gang that lost all its GPUs in step 2 gets them back, if elastic gangs shrink enough, or is
   preempted.
4. Gangs that hold less than they asked for, or are spread, take idle GPUs if that pays.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.delay.free_map import GangTier, Place
from slurm_elastic.policies.dally.bid_order import Order
from slurm_elastic.policies.dally.candidates import Places, RoundCandidates, TypeCandidates
from slurm_elastic.policies.dally.dally_reasons import DallyReasons
from slurm_elastic.policies.dally.job_state import GangState, tier_of
from slurm_elastic.policies.dally.reserved_nodes import Awaited
from slurm_elastic.policies.dally.shrink_selection import (
    ShrinkCandidate,
    ShrinkCandidates,
    collect,
    potential,
)

#: Gangs for which nodes are kept at once.
_MOST_KEPT = 8
#: Least gain for which a running gang moves or grows.
_LEAST_GAIN = 0.05


@dataclass(slots=True)
class BiddingResult:
    """Target of one gang, and the reason.

    Attributes:
        target: its allocation; None: it waits.
        renewed: another lease begins.
    """

    bidder: GangState
    target: Allocation | None
    reason: Reason
    renewed: bool = False


@dataclass
class BiddingRound:
    """Bids of one round; `results` when it is done."""

    candidates: RoundCandidates
    order: Order
    lease_s: float
    preempts: bool
    min_gain: float = _LEAST_GAIN
    results: dict[int, BiddingResult] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.now = self.candidates.frame.snapshot.time
        self._awaited = Awaited(self.candidates, (), self.lease_s)
        self._givers = ShrinkCandidates(self.now)
        self.reasons = DallyReasons(self.order, self.now)

    def run(self, bidders: Sequence[GangState], bidding: Sequence[GangState]) -> None:
        """Run all steps.

        Args:
            bidders: all gangs.
            bidding: those of them whose lease is over.
        """
        self._awaited = Awaited(self.candidates, bidders, self.lease_s)
        over = {b.job_id for b in bidding}
        for b in bidding:
            self._givers.put(b, b.held)
        for b in bidders:
            if b.held is not None and b.job_id not in over:
                self._settle(BiddingResult(b, b.held, self.reasons.leased(b)))
        queue = [b for b in bidders if b.held is None or b.job_id in over]
        queue.sort(key=lambda b: self.order.rank(b.gang))
        if self.order.reserves:
            self._due([b for b in queue if b.held is None])
        for bidder in queue:
            if bidder.job_id not in self.results:
                self._bid(bidder)
        for bidder in queue:
            if bidder.held is not None and bidder.job_id not in self.results:
                self._rescue(bidder)
        for bidder in bidders:
            result = self.results[bidder.job_id]
            if bidder.held and result.target == bidder.held and self.now >= bidder.firm_s:
                self._improve(result, over=bidder.job_id in over)

    def _due(self, waiting: Sequence[GangState]) -> None:
        """Run step 1."""
        awaited = self._awaited
        due = [b for b in waiting if b.shapes and self._waited(b) >= self._limit(b)]
        due.sort(key=lambda b: (b.gang.since_s, b.job_id))
        for bidder in due[:_MOST_KEPT]:
            if self._start(bidder, bidder.shapes):
                continue
            reserved = [awaited.keep(bidder, *shape) for shape in bidder.shapes]
            if not any(reserved):
                # Nothing comes free in time: any place is better than none.
                self._start(bidder, bidder.shapes, anything=True)

    def _bid(self, bidder: GangState) -> None:
        """Run step 2 for one gang; a running one without a place is decided in step 3."""
        held = bidder.held
        if held is not None and bidder.legal and self.candidates.holds(bidder, held):
            self.candidates.stay(bidder, held)
            awaiting = self._awaited.on(held.nodes)
            reason = self.reasons.until(awaiting) if awaiting else self.reasons.renewed()
            self._settle(BiddingResult(bidder, held, reason, renewed=awaiting is None))
            return
        if held is None and not self.preempts:
            self._settle(BiddingResult(bidder, None, self.reasons.waits(bidder, None)))
            return
        if self._start(bidder, bidder.shapes):
            return
        for size in self._smaller(bidder):
            if self._start(bidder, (size,)):
                return
        if held is None:
            self._settle(BiddingResult(bidder, None, self._waiting_reason(bidder)))
        else:
            self._givers.put(bidder, None)

    def _smaller(self, bidder: GangState) -> list[tuple[str, int]]:
        shapes = [(kind, s) for kind, _ in bidder.shapes for s in self._sizes(bidder, kind)[1:]]
        return sorted(shapes, key=lambda shape: -shape[1])

    def _sizes(self, bidder: GangState, kind: str) -> tuple[int, ...]:
        return bidder.sizes(kind, self.candidates.frame.per_node.get(kind, 0))

    def _start(
        self, bidder: GangState, shapes: Iterable[tuple[str, int]], *, anything: bool = False
    ) -> bool:
        """Give a gang the first of these shapes with a place that it accepts."""
        for gpu_type, gpus in shapes:
            candidates = self.candidates.of_type(bidder, gpu_type)
            place = self._acceptable(bidder, candidates.idle, gpu_type, gpus, anything=anything)
            if place is not None:
                self.candidates.take(bidder, place)
                self._started(bidder, place)
                return True
            if candidates.open.room.free_total <= candidates.idle.room.free_total:
                continue
            place = self._acceptable(bidder, candidates.open, gpu_type, gpus, anything=anything)
            if place is None:
                continue
            if not self._start_by_shrinks(bidder, gpu_type, gpus):
                self.candidates.take(bidder, place)
                self._started(bidder, place)
            return True
        return False

    def _started(
        self, bidder: GangState, place: Allocation, givers: Sequence[ShrinkCandidate] = ()
    ) -> None:
        tier = tier_of(self.candidates.frame, place)
        reason = self.reasons.starts(bidder, place, tier, givers)
        self._settle(BiddingResult(bidder, place, reason, renewed=True))

    def _acceptable(
        self,
        bidder: GangState,
        places: Places,
        gpu_type: str,
        gpus: int,
        *,
        anything: bool = False,
        booked: bool = True,
    ) -> Allocation | None:
        """Return the best place of a room if the gang accepts it; `booked`: it must be free."""
        if places.room.free_total < gpus or not gpus:
            return None
        waited = self._waited(bidder)
        sites = places.room.sites
        farthest = self.order.farthest(gpus, sites, waited)
        name = self.candidates.name(bidder, gpu_type, GangTier.NETWORK if anything else farthest)
        best = self._best(bidder, gpu_type, gpus)
        place, share = places.best(name, gpus, enough=best)
        if not place or not (anything or self.order.accepts(share, best)):
            return None
        allocation = self.candidates.allocation(gpu_type, place)
        return allocation if not booked or self.candidates.holds(bidder, allocation) else None

    def _best(self, bidder: GangState, gpu_type: str, gpus: int) -> float:
        """Return the part of time that a gang computes on the best place of the empty cluster."""
        name = self.candidates.name(bidder, gpu_type, GangTier.NETWORK)
        return self.candidates.of_type(bidder, gpu_type).empty.best(name, gpus, enough=1.0)[1]

    def _start_by_shrinks(self, bidder: GangState, gpu_type: str, gpus: int) -> bool:
        """Start a gang on what elastic gangs can give, so that none is preempted."""
        shrinkable = self._givers.of(gpu_type, bidder)
        if not shrinkable:
            return False
        places = self.candidates.potential(bidder, gpu_type, potential(shrinkable), idle=True)
        place = self._acceptable(bidder, places, gpu_type, gpus, booked=False)
        if place is None:
            return False
        idle = self.candidates.of_type(bidder, gpu_type).idle
        return self._collected(bidder, place, idle, shrinkable)

    def _collected(
        self,
        bidder: GangState,
        place: Allocation,
        free: Places,
        shrinkable: Sequence[ShrinkCandidate],
    ) -> bool:
        """Let other gangs give what a place lacks, and book all changes."""
        kind = place.gpu_type
        idle = {n: min(g, self.candidates.free_on(free, kind, n)) for n, g in place.shares}
        missing = {n: g - idle[n] for n, g in place.shares if g > idle[n]}
        shrunk = collect(shrinkable, missing, self.candidates.frame.per_node.get(kind, 0))
        if shrunk is None:
            return False
        changes = [
            (g.bidder, g.allocation, left, g.bidder.job_id in self.results) for g, left in shrunk
        ]
        if not self.candidates.exchange(
            bidder, place, changes, {n: g for n, g in idle.items() if g}
        ):
            return False
        for giver, left in shrunk:
            reason = self.reasons.gives(giver, left, bidder)
            self._settle(BiddingResult(giver.bidder, left, reason, renewed=True))
        if place == bidder.held:
            reason = self.reasons.renewed_by_shrinks([g.bidder for g, _ in shrunk])
            self._settle(BiddingResult(bidder, place, reason, renewed=True))
        else:
            self._started(bidder, place, [g for g, _ in shrunk])
        return True

    def _settle(self, result: BiddingResult) -> None:
        self.results[result.bidder.job_id] = result
        self._givers.put(result.bidder, result.target)

    def _rescue(self, bidder: GangState) -> None:
        """Run step 3 for one gang."""
        held = bidder.held
        assert held is not None
        kind = held.gpu_type
        shrinkable = self._givers.of(kind, bidder)
        free = self.candidates.of_type(bidder, kind).open
        for own in (*([held] if bidder.legal else []), *_parts(bidder, held)):
            if self._collected(bidder, own, free, shrinkable):
                return
        sizes: tuple[int, ...] = self._sizes(bidder, kind)
        if bidder.legal:
            sizes = (held.gpus, *(s for s in sizes if s < held.gpus))
        for size in sizes:
            places = self.candidates.potential(bidder, kind, potential(shrinkable), idle=False)
            place = self._acceptable(bidder, places, kind, size, anything=True, booked=False)
            if place is not None and self._collected(bidder, place, free, shrinkable):
                return
        taker = next(
            (
                d.bidder
                for d in self.results.values()
                if d.target is not None
                and d.target != d.bidder.held
                and set(d.target.nodes) & set(held.nodes)
            ),
            None,
        )
        if not self.preempts or (not bidder.legal and self.candidates.holds(bidder, held)):
            self.candidates.stay(bidder, held)
            self._settle(BiddingResult(bidder, held, self.reasons.renewed()))
            return
        self._settle(BiddingResult(bidder, None, self.reasons.preempted(taker)))

    def _improve(self, result: BiddingResult, *, over: bool) -> None:
        """Run step 4: grow to the requested size, or come together, if that pays."""
        bidder, held = result.bidder, result.target
        assert held is not None
        window_s = min(self.lease_s, bidder.gang.left_s or self.lease_s)
        old_speed = self._speed(bidder, held)
        self.candidates.resources.give(bidder.need, held)
        target = held
        for kind, size in self._better(bidder, held, over=over):
            own = dict(held.shares) if kind == held.gpu_type else {}
            places = self.candidates.potential(bidder, kind, own, idle=False)
            place = self._acceptable(bidder, places, kind, size)
            if place is None or place == held:
                continue
            gain = self._speed(bidder, place) / old_speed - 1
            if gain < self.min_gain or gain * window_s <= bidder.change_s(place):
                continue
            reason = self.reasons.improves(bidder, held, place, gain)
            self._settle(BiddingResult(bidder, place, reason, renewed=True))
            target = place
            break
        self.candidates.improve(bidder, held, target)

    def _better(self, bidder: GangState, held: Allocation, *, over: bool) -> list[tuple[str, int]]:
        """Return shapes that might be better than the present one, with enough idle GPUs.

        Another type only with too few GPUs, or at the end of a lease.
        """
        shapes = []
        short = held.gpus < dict(bidder.shapes).get(held.gpu_type, held.gpus)
        for kind, _ in bidder.shapes:
            same_type = kind == held.gpu_type
            free = self.candidates.of_type(bidder, kind).open.room.free_total
            if not free or not (same_type or short or over):
                continue
            apart = len(held.nodes) > 1 and over
            for size in self._sizes(bidder, kind):
                more = size > held.gpus or (apart and size == held.gpus)
                if more if same_type else held.gpus <= size <= free:
                    shapes.append((kind, size))
        speed = bidder.model.base
        return sorted(shapes, key=lambda s: (-s[1] * speed(s[0]), s[0] != held.gpu_type, s[0]))

    def _waiting_reason(self, bidder: GangState) -> Reason:
        """Return why a waiting gang gets nothing."""
        shape = next(iter(bidder.shapes), None)
        if shape is None:
            return self.reasons.waits(bidder, None)
        kind, gpus = shape
        candidates = self.candidates.of_type(bidder, kind)
        name = self.candidates.name(bidder, kind, GangTier.NETWORK)
        best, most = candidates.empty.best(name, gpus, enough=1.0)
        if not best:
            return self.reasons.nowhere(kind, gpus)
        place, share = candidates.open.best(name, gpus, enough=most)
        if not place:
            return self.reasons.waits(bidder, shape)
        return self.reasons.too_far(
            bidder, _span(candidates, best), _span(candidates, place), share
        )

    def _speed(self, bidder: GangState, held: Allocation) -> float:
        frame = self.candidates.frame
        nodes, racks = frame.topology.spread(n for n in held.nodes if n in frame.index)
        return bidder.model.speed(held.gpu_type, held.gpus, max(1, nodes), max(1, racks)) or 1e-12

    def _waited(self, bidder: GangState) -> float:
        return max(0.0, self.now - bidder.gang.since_s) if bidder.held is None else 0.0

    def _limit(self, bidder: GangState) -> float:
        return self.order.limit_s(bidder.gang.gpus, GangTier.NETWORK)


def _span(candidates: TypeCandidates, place: Place) -> tuple[int, int, int]:
    return candidates.open.room.sites.span(place)


def _parts(bidder: GangState, held: Allocation) -> list[Allocation]:
    """Return parts of its place that a gang could keep, the largest first."""
    sizes = [s for s in bidder.directive.sizes(held.gpu_type) if s < held.gpus]
    each = held.shares[0][1]
    nodes = [node for node, gpus in held.shares if gpus >= each]  # shares may be uneven
    parts = []
    for size in reversed(sizes):
        if len(held.shares) == 1:
            parts.append(Allocation.of(held.gpu_type, {nodes[0]: size}))
        elif size % each == 0 and size // each <= len(nodes):
            parts.append(Allocation.of(held.gpu_type, dict.fromkeys(nodes[: size // each], each)))
    return parts
