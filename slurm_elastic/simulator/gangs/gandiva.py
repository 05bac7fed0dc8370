"""`gandiva` for gangs, as Dally's author compares with it: no waits for a place, later moves.

After Xiao et al., OSDI'18, in the form that Dally compares with: first come, first served,
nothing is kept for gangs that do not fit. A gang takes the node with the most free GPUs, else
anything. One that ran over a rack or the network moves into a node when it finds one at the end
of its lease. Our reading: the author's code tests the wrong node, moves between batches, and
binds sizes to nodes, so that its figures say little but "much worse".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs.gang_policy import Answer, Grant, Offer


class Gandiva:
    """Policy `gandiva`; without state."""

    renews = True

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Rank by arrival."""
        return gang.arrival_s, gang.job_id

    def decide(self, offer: Offer, state: Mapping[str, Any]) -> Answer:
        """Offer the free GPUs to one gang after another."""
        room, grants = offer.room.copy(), []
        for gang in offer.waiting:
            if gang.gpus > room.free_total:
                continue
            node = max(range(len(room.node)), key=lambda n: (room.node[n], -n))
            stays = gang.last and room.holds(gang.last) and gang.since_s == offer.now_s
            in_one_node = room.sites.span(gang.last)[1] == 1 if stays else False
            place = gang.last if in_one_node else room.in_node(node, gang.gpus)
            place = place or (gang.last if stays else room.anywhere(gang.gpus))
            room.take(place)
            grants.append(Grant(gang.job_id, place, room.sites.tier(place)))
        return Answer(grants=tuple(grants), state=state)
