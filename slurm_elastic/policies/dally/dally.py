"""`dally` in rounds, live and simulated: gangs wait for a near place, elastic ones shrink first.

The idea of dally.py and dally_own.py for the rounds of all policies. Each elastic job is a gang
at the size that it asked for. A gang runs for a lease, then bids again; who waits bids in every
round. What a place is worth to it follows from its own speed model; what it gets is a finished
place (`Alternative.shares`). What the order and the timers are: dally_order.py; how a round
goes: dally_deal.py; what is remembered: dally_book.py; docs/dally.md.

Beyond the published system, our definition: nobody is preempted, moved or shrunk before it has
run `floor_s`; elastic gangs give GPUs before anybody is preempted; they start smaller where no
place that they accept has all that they asked for, and grow to it when GPUs are idle and that
pays. With `queue = "slurm"` pending jobs are Slurm's, and nobody is preempted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.fabric import Fabric
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.policies.dally.bid_order import order_of
from slurm_elastic.policies.dally.bidding import BiddingResult, BiddingRound
from slurm_elastic.policies.dally.candidates import RoundCandidates
from slurm_elastic.policies.dally.job_state import GangStates
from slurm_elastic.policies.policy_protocol import Question


class Dally:
    """The policy; it remembers its book and how long gangs waited."""

    decisive = True
    tunes = False
    moves = False
    measures = True

    def __init__(self, config: Config) -> None:
        """Prepare.

        Raises:
            ConfigError: the timers cannot be.
        """
        self._config = config
        self._order = order_of(config.dally)

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Bids; see the module."""
        snapshot, config = question.snapshot, self._config
        ledger = question.later.copy() if question.later else FreeResources(NodeArrays(snapshot))
        book = GangStates(question, state, ledger.frame)
        bidders = list(book.bidders(config))
        bidding = [
            b for b in bidders if b.held and snapshot.time >= (b.until_s if b.legal else b.firm_s)
        ]
        waiting = [b.gang for b in bidders if b.held is None]
        waits = state.get("waits", {})
        self._order.begin(snapshot.time, waiting=waiting, waits=waits, starts=book.starts)
        rooms = RoundCandidates(
            ledger,
            Fabric.of(snapshot, config.topology),
            bidders,
            bidding,
            live=book.live,
        )
        deal = BiddingRound(
            rooms=rooms,
            order=self._order,
            lease_s=config.dally.lease_s,
            preempts=config.controller.queue == "controller",
            min_gain=config.resize.min_gain,
        )
        deal.run(bidders, bidding)
        proposals = []
        for bidder in bidders:
            dealt = deal.results[bidder.job_id]
            if dealt.renewed and bidder.held is not None:
                book.renew(bidder)
            proposals.append(_proposal(dealt))
        return tuple(proposals), {
            "time": snapshot.time,
            "jobs": book.entries,
            "waits": self._order.waits,
        }


def _proposal(dealt: BiddingResult) -> Proposal:
    """Exactly this place, else what it has, else waiting."""
    bidder, target = dealt.bidder, dealt.target
    ranked = [_exactly(target, dealt.reason)] if target else []
    if target is None:
        ranked.append(_wait(dealt.reason))
    if bidder.held is not None and bidder.held != target:
        ranked.append(_exactly(bidder.held, Reason("keeps-until-free")))
    if target is not None:
        ranked.append(_wait(Reason("waits-for-nodes", nodes=target.nodes, reason=dealt.reason)))
    return Proposal(job_id=bidder.job_id, alternatives=tuple(ranked))


def _exactly(place: Allocation, reason: Reason) -> Alternative:
    return Alternative(
        gpu_type=place.gpu_type,
        gpus=place.gpus,
        value=float(place.gpus),
        reason=reason,
        shares=place.shares,
    )


def _wait(reason: Reason) -> Alternative:
    return Alternative(gpu_type="", gpus=0, value=-math.inf, reason=reason)
