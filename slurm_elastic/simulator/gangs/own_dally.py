"""`dally` by default: Dally's idea, without the faults that its author's runs show.

Our definition throughout; docs/dally-published.md has the figures.

*Order*: least GPU time left first (ideal seconds left times GPUs). Lowest network sensitivity
first, as published, lets long gangs that communicate much hold back all others for good.

*Place*: the best for the gang's model among few (placement/delay/place_choice.py): where it
computes the largest part of its time; among equals the tightest. It accepts one that is at most
`_TOLERANCE` worse than the best that the empty cluster has: gangs that do not suffer from
distance start at once, the others wait, while those behind them are served.

*Timer*: a gang that has waited T is *due*. No gang is made to spread: the nodes on which its GPUs
become free first are kept for it (reserve.py). T is tuned,

    T = min(96, max(3, mean + 2 std)) leases

over the waits of at least one lease that ended within the last 24 leases, and those that still go
on, of all gangs together; so it grows when all gangs wait, and reservations stay the exception.

*Longest wait* (checked by a property test). With k gangs that are due before it, lease L, longest
batch of iterations B and restart R, a waiting gang gets its GPUs within

    96 L + (k + 1) (L + B + R)

*Leases*: at the end of its lease a gang bids again, and keeps its GPUs unless another gang goes
before it, or a place is better. It never moves, nor is it preempted, before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from slurm_elastic.models.communication import Communication
from slurm_elastic.placement.delay.free_map import NodeLayout, Place
from slurm_elastic.placement.delay.place_choice import PlaceChoice, ideal
from slurm_elastic.policies.dally.bid_order import MOST, tuned_s
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs.gang_policy import Answer, Grant, Offer
from slurm_elastic.simulator.gangs.reserve import NodeReserve

#: A place may be this much worse than the best there is.
_TOLERANCE = 0.02
#: Leases that the timer counts; shorter waits are left out.
_HISTORY = 24.0
_NO_WAIT = 1.0
#: Gangs for which nodes are kept at once.
_MOST_KEPT = 8


class OwnDally:
    """Policy `dally` with our timer; its state: ends and lengths of waits."""

    renews = True

    def __init__(self, communication: Communication, *, lease_s: float, most: float = MOST) -> None:
        """Prepare.

        Args:
            communication: what distance costs.
            lease_s: seconds of a lease.
            most: the longest timer, in leases; 96 in the module's formulas.
        """
        self._most = most
        self._communication = communication
        self._lease_s = lease_s
        self._ideal: dict[tuple[NodeLayout, str, int], float] = {}

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Rank by GPU time left."""
        return gang.left_s * gang.gpus, gang.since_s, gang.job_id

    def decide(self, offer: Offer, state: Mapping[str, Any]) -> Answer:
        """Serve the gangs that are due, then all others in order; see the module."""
        now = offer.now_s
        waits = [w for w in state.get("waits", []) if w[0] >= now - _HISTORY * self._lease_s]
        timer_s = self._timer_s(waits, offer.waiting, now)
        choice = PlaceChoice(offer.room.copy(), self._communication)
        grants = self._due(offer, choice, timer_s)
        served = {grant.job_id for grant in grants}
        for gang in offer.waiting:
            if not choice.room.free_total:
                break
            if gang.gpus > choice.room.free_total or gang.job_id in served:
                continue
            place = self._accepts(gang, choice, now)
            if place:
                choice.take(place)
                grants.append(Grant(gang.job_id, place, choice.room.sites.tier(place)))
                served.add(gang.job_id)
        waited_leases = (
            (now - g.since_s) / self._lease_s for g in offer.waiting if g.job_id in served
        )
        waits += [[now, leases] for leases in waited_leases if leases >= _NO_WAIT]
        timer_ends = (g.since_s + timer_s for g in offer.waiting if g.job_id not in served)
        wake_s = min((end_s for end_s in timer_ends if end_s > now), default=None)
        return Answer(grants=tuple(grants), state={"waits": waits}, wake_s=wake_s)

    def _timer_s(
        self, waits: Sequence[Sequence[float]], waiting: Sequence[Gang], now: float
    ) -> float:
        leases = [w[1] for w in waits]
        leases += [w for g in waiting if (w := (now - g.since_s) / self._lease_s) >= _NO_WAIT]
        return tuned_s(leases, lease_s=self._lease_s, most=self._most)

    def _due(self, offer: Offer, choice: PlaceChoice, timer_s: float) -> list[Grant]:
        """Return grants to gangs that are due; the nodes kept for them leave the choice."""
        due = [g for g in offer.waiting if offer.now_s - g.since_s >= timer_s]
        if not due:
            return []
        due.sort(key=lambda g: (g.since_s, g.job_id))
        ends = ((running.until_s, running.place) for running in offer.running.values())
        reserve = NodeReserve(choice.room, ends, offer.now_s)
        grants = []
        for gang in due[:_MOST_KEPT]:
            place = reserve.keep(gang.gpus)
            if place:
                choice.take(place)
                grants.append(Grant(gang.job_id, place, choice.room.sites.tier(place)))
        return grants

    def _accepts(self, gang: Gang, choice: PlaceChoice, now: float) -> Place:
        sites, model, gpus = choice.room.sites, gang.model, gang.gpus
        key = sites, model, gpus
        if key not in self._ideal:
            self._ideal[key] = ideal(sites, self._communication, model, gpus)
        last = gang.last if gang.since_s == now else ()
        place, part = choice.best(model, gpus, enough=self._ideal[key], last=last)
        return place if part >= (1 - _TOLERANCE) * self._ideal[key] else ()
