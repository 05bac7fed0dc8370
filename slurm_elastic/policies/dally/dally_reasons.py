"""The decisions of the policy `dally` in words, for `selastic explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.models.communication import Span
from slurm_elastic.placement.delay.free_map import GangTier
from slurm_elastic.placement.eligibility import clock
from slurm_elastic.policies.dally.bid_order import Order
from slurm_elastic.policies.dally.job_state import GangState
from slurm_elastic.policies.dally.shrink_selection import ShrinkCandidate
from slurm_elastic.policies.gangs.gang_policy import Gang

_UNITS = ("rack", "node", "link domain")


@dataclass(frozen=True, slots=True)
class DallyReasons:
    """At one time, with the timers as they are set then."""

    order: Order
    now: float

    def leased(self, bidder: GangState) -> str:
        """It runs, and is not asked."""
        if bidder.until_s > bidder.firm_s:
            return f"keeps its GPUs: its lease ends at {clock(bidder.until_s)}"
        return f"keeps its GPUs: nobody takes them before {clock(bidder.firm_s)}"

    def renewed(self) -> str:
        """Its lease is over, and begins again."""
        return "keeps its GPUs for another lease: nobody before it in the order wants them"

    def until(self, awaiting: GangState) -> str:
        """Its lease is over, and the nodes are promised."""
        return f"keeps its GPUs until job {awaiting.name}, which waited long, can have the nodes"

    def waits(self, bidder: GangState, shape: tuple[str, int] | None) -> str:
        """Nothing is free."""
        if not bidder.shapes:
            return "no GPUs of this cluster suit it"
        shapes = [shape] if shape else list(bidder.shapes)
        wants = " or ".join(f"{gpus} {kind or 'GPUs'}" for kind, gpus in shapes)
        return f"waits for {wants}; they are held, or go to jobs before it ({self.order.words})"

    def nowhere(self, gpu_type: str, gpus: int) -> str:
        """The cluster never has such a place."""
        kind = gpu_type or "GPUs"
        return f"waits: nowhere that it may run are {gpus} {kind} in even shares on their nodes"

    def picky(self, bidder: GangState, best: Span, place: Span, share: float) -> str:
        """There is a place, but too far apart."""
        waited = max(0.0, self.now - bidder.gang.since_s)
        tier = GangTier.NETWORK if place[0] > best[0] else GangTier.RACK
        level = next((i for i in range(3) if place[i] > best[i]), 1)
        limit = self.order.limit_s(bidder.gang.gpus, tier)
        most = f" of at most {limit:.0f} s" if limit < 1e9 and waited < limit else ""
        return (
            f"waits for {_count(best[level], level)}: over {_count(place[level], level)} it would"
            f" compute {share:.2f} of its time; waited {waited:.0f} s{most}"
        )

    def starts(
        self, bidder: GangState, found: Allocation, tier: GangTier, gave: Sequence[ShrinkCandidate]
    ) -> str:
        """A place was found."""
        where = ("on one GPU", "on one node", "in one rack", "across racks")[tier]
        if bidder.held is not None:
            return f"moves to {', '.join(found.nodes)}: a job before it takes its GPUs"
        waited = max(0.0, self.now - bidder.gang.since_s)
        asked = dict(bidder.shapes).get(found.gpu_type, found.gpus)
        if gave:
            names = " and ".join(g.bidder.name for g in gave)
            return f"starts {where}: job {names} shrinks for it"
        if found.gpus < asked:
            return f"starts {where} with {found.gpus} of {asked}: no place that it accepts has more"
        if tier >= GangTier.RACK and waited < 1:
            return f"starts at once, {where}: distance costs it nothing"
        return f"starts {where} after {waited:.0f} s" if waited >= 1 else f"starts {where}"

    def gives(self, giver: ShrinkCandidate, left: Allocation, taker: GangState) -> str:
        """It shrinks."""
        count = giver.has.gpus - left.gpus
        gpus = "1 GPU" if count == 1 else f"{count} GPUs"
        what = "runs on" if taker.held else "starts on"
        if giver.bidder.held is None:
            return f"starts on {left.gpus} GPUs, so that job {taker.name} is not preempted"
        return f"gives {gpus}, which job {taker.name} {what}, so that nobody is preempted"

    def kept(self, gave: Sequence[GangState]) -> str:
        """It would have lost its GPUs."""
        if not gave:
            return "keeps its GPUs for another lease"
        names = " and ".join(b.name for b in gave)
        return f"keeps its GPUs: job {names} takes fewer instead"

    def preempted(self, taker: GangState | None) -> str:
        """It loses all its GPUs."""
        if taker is None:
            return "waits: its GPUs went to jobs before it in the order"
        return f"gives way to job {taker.name} ({self.order.words}{self._value(taker.gang)})"

    def improves(self, bidder: GangState, held: Allocation, found: Allocation, gain: float) -> str:
        """It grows or moves."""
        if found.gpu_type != held.gpu_type:
            return f"{found.gpus} {found.gpu_type} are idle: {gain:.0%} faster"
        if found.gpus > held.gpus:
            return f"idle GPUs bring it nearer to the {bidder.gang.gpus} that it asked for"
        return f"its GPUs come together: {gain:.0%} faster"

    def _value(self, gang: Gang) -> str:
        value = self.order.rank(gang)[0]
        if self.order.reserves:
            return f", {value / 3600:.1f} h"
        return f", {value:.2f}"


def _count(number: int, level: int) -> str:
    return f"one {_UNITS[level]}" if number == 1 else f"{number} {_UNITS[level]}s"
