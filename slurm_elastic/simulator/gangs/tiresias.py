"""`tiresias` for gangs, as Dally's author compares with it: least attained service, consolidated.

After Gu et al., NSDI'19, in the form of Dally's simulator: the gang with the fewest GPU seconds
received goes first (no queues), ties as in `dally`. It takes the first node with room. Models
that do not suffer (`UNSKEWED`) otherwise take a rack, or anything; the others wait, unless they
are larger than a node (then a rack) or a rack (then anything).

`published`: the author's code asks whether as many GPUs as a node has are *offered* instead of
wanted, so that skewed gangs spread over a rack as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.placement.delay.free_map import Place
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs.gang_policy import Answer, Grant, Offer
from slurm_elastic.simulator.gangs.published_dally import FirstFit

#: Models whose parameters are evenly spread over tensors, in the author's code.
UNSKEWED = frozenset({"ResNet50", "ResNet18", "BERT"})


class Tiresias:
    """Policy `tiresias`; without state."""

    renews = False

    def __init__(self, *, published: bool = False) -> None:
        self._published = published

    def rank(self, gang: Gang) -> tuple[float, ...]:
        """Rank by attained service."""
        return gang.service_gpu_s, gang.since_s, gang.job_id

    def decide(self, offer: Offer, state: Mapping[str, Any]) -> Answer:
        """Offer the free GPUs to one gang after another."""
        search = FirstFit(offer.room.copy())
        grants = []
        for gang in offer.waiting:
            free = search.room.free_total
            if not free:
                break
            place = self._accepts(gang, search) if gang.gpus <= free else ()
            if place:
                search.take(place)
                grants.append(Grant(gang.job_id, place, search.room.sites.tier(place)))
        return Answer(grants=tuple(grants), state=state)

    def _accepts(self, gang: Gang, search: FirstFit) -> Place:
        place = search.node(gang.gpus)
        if place:
            return place
        sites, unskewed = search.room.sites, gang.model in UNSKEWED
        enough_for_node = search.room.free_total >= sites.per_node if self._published else False
        if unskewed or enough_for_node or gang.gpus > sites.per_node:
            place = search.rack(gang.gpus)
        if not place and (unskewed or gang.gpus > sites.per_rack):
            place = search.room.anywhere(gang.gpus)
        return place
