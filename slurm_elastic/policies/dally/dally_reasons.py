"""The reasons of the policy `dally`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason
from slurm_elastic.models.communication import Span
from slurm_elastic.placement.delay.free_map import GangTier
from slurm_elastic.policies.dally.bid_order import Order
from slurm_elastic.policies.dally.job_state import GangState
from slurm_elastic.policies.dally.shrink_selection import ShrinkCandidate

_UNITS = ("rack", "node", "link-domain")
_TIERS = ("gpu", "node", "rack", "network")
#: Waits from here on have no end that is worth a number.
_ENDLESS_S = 1e9
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class DallyReasons:
    """Reasons at one time, with the timers as they are set then."""

    order: Order
    now: float

    def leased(self, bidder: GangState) -> Reason:
        """Return why a running gang does not bid."""
        if bidder.until_s > bidder.firm_s:
            return Reason("lease-running", until=bidder.until_s)
        return Reason("protected", until=bidder.firm_s)

    def renewed(self) -> Reason:
        """Return why the lease begins again."""
        return Reason("lease-renewed")

    def until(self, awaiting: GangState) -> Reason:
        """Return why the lease is over: the nodes are promised."""
        return Reason("lease-until-job", job=awaiting.name)

    def waits(self, bidder: GangState, shape: tuple[str, int] | None) -> Reason:
        """Return why a gang waits when nothing is free."""
        if not bidder.shapes:
            return Reason("no-suitable-gpus")
        shapes = [shape] if shape else list(bidder.shapes)
        return Reason("waits-in-order", shapes=shapes, order=self.order.name)

    def nowhere(self, gpu_type: str, gpus: int) -> Reason:
        """Return why a gang waits when the cluster never has such a place."""
        return Reason("no-even-place", gpus=gpus, gpu_type=gpu_type)

    def too_far(self, bidder: GangState, best: Span, place: Span, share: float) -> Reason:
        """Return why a gang waits although there is a place: it is spread too far."""
        waited = max(0.0, self.now - bidder.gang.since_s)
        tier = GangTier.NETWORK if place[0] > best[0] else GangTier.RACK
        level = next((i for i in range(3) if place[i] > best[i]), 1)
        limit = self.order.limit_s(bidder.gang.gpus, tier)
        return Reason(
            "waits-for-place",
            unit=_UNITS[level],
            nearest=best[level],
            spread=place[level],
            speed=share,
            waited_s=waited,
            limit_s=limit if limit < _ENDLESS_S and waited < limit else None,
        )

    def starts(
        self, bidder: GangState, target: Allocation, tier: GangTier, gave: Sequence[ShrinkCandidate]
    ) -> Reason:
        """Return why a gang starts on its target."""
        tier_name = _TIERS[tier]
        if bidder.held is not None:
            return Reason("moves-for-earlier", nodes=target.nodes)
        waited = max(0.0, self.now - bidder.gang.since_s)
        requested_gpus = dict(bidder.shapes).get(target.gpu_type, target.gpus)
        if gave:
            return Reason("starts-by-shrink", tier=tier_name, jobs=[g.bidder.name for g in gave])
        if target.gpus < requested_gpus:
            return Reason("starts-smaller", tier=tier_name, gpus=target.gpus, wanted=requested_gpus)
        if tier >= GangTier.RACK and waited < 1:
            return Reason("starts-anywhere", tier=tier_name)
        if waited >= 1:
            return Reason("starts-after", tier=tier_name, waited_s=waited)
        return Reason("starts-there", tier=tier_name)

    def gives(self, giver: ShrinkCandidate, left: Allocation, taker: GangState) -> Reason:
        """Return why a gang shrinks."""
        if giver.bidder.held is None:
            return Reason("starts-smaller-for", gpus=left.gpus, job=taker.name)
        return Reason(
            "gives-to-job",
            gpus=giver.allocation.gpus - left.gpus,
            job=taker.name,
            running=taker.held is not None,
        )

    def renewed_by_shrinks(self, gave: Sequence[GangState]) -> Reason:
        """Return why a gang keeps the GPUs that it would have lost."""
        if not gave:
            return Reason("lease-kept")
        return Reason("lease-kept-by-shrink", jobs=[b.name for b in gave])

    def preempted(self, taker: GangState | None) -> Reason:
        """Return why a gang loses all its GPUs."""
        if taker is None:
            return Reason("gpus-to-earlier")
        value = self.order.rank(taker.gang)[0]
        return Reason(
            "preempted-by",
            job=taker.name,
            order=self.order.name,
            value=value / _HOUR_S if self.order.reserves else value,
        )

    def improves(
        self, bidder: GangState, held: Allocation, target: Allocation, gain: float
    ) -> Reason:
        """Return why a gang grows or moves."""
        if target.gpu_type != held.gpu_type:
            return Reason("idle-type-faster", gpus=target.gpus, gpu_type=target.gpu_type, gain=gain)
        if target.gpus > held.gpus:
            return Reason("grows-to-wanted", gpus=bidder.gang.gpus)
        return Reason("comes-together", gain=gain)
