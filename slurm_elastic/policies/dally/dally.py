"""Policy `dally`: gangs wait for a near place, and elastic ones shrink first.

Delay timers of Dally (arXiv 2401.16492) for elastic jobs, live and simulated. Each elastic job is a
gang at the size that it asked for. A gang runs for a lease, then bids again; a waiting one bids in
every round. The value of a place follows from the gang's own speed model; its target is a finished
place (`Alternative.shares`). Order and timers: bid_order.py; steps of a round: bidding.py; state:
job_state.py; docs/dally.md.

Beyond the published system, our definition: no gang is preempted, moved or shrunk before it has
run `floor_s`; elastic gangs give GPUs before any is preempted; they start smaller where no
acceptable place has the requested size, and grow to it when GPUs are idle and that pays. With
`queue = "slurm"` Slurm starts pending jobs, and none is preempted.
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
from slurm_elastic.policies.policy_protocol import Capabilities, Question


class Dally:
    """The policy; its state is that of each gang, and past waits."""

    capabilities = Capabilities(
        binding_proposals=True,
        allows_repacking=False,
        batch_chosen_by="user",
        measured_speeds=True,
    )

    def __init__(self, config: Config) -> None:
        """Prepare.

        Raises:
            ConfigError: the timers are invalid.
        """
        self._config = config
        self._order = order_of(config.dally)

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Run the bids of one round; see the module."""
        snapshot, config = question.snapshot, self._config
        frame = NodeArrays(snapshot)
        resources = (
            FreeResources.of(frame, question.free) if question.free else FreeResources(frame)
        )
        states = GangStates(question, state, frame)
        bidders = list(states.bidders(config))
        bidding = [
            b for b in bidders if b.held and snapshot.time >= (b.until_s if b.legal else b.firm_s)
        ]
        waiting = [b.gang for b in bidders if b.held is None]
        waits = state.get("waits", {})
        self._order.begin(snapshot.time, waiting=waiting, waits=waits, starts=states.starts)
        candidates = RoundCandidates(
            resources,
            Fabric.of(snapshot, config.topology),
            bidders,
            bidding,
            live=states.live,
        )
        bids = BiddingRound(
            candidates=candidates,
            order=self._order,
            lease_s=config.dally.lease_s,
            preempts=config.controller.queue == "controller",
            min_gain=config.resize.min_gain,
        )
        bids.run(bidders, bidding)
        proposals = []
        for bidder in bidders:
            result = bids.results[bidder.job_id]
            if result.renewed and bidder.held is not None:
                states.renew(bidder)
            proposals.append(_proposal(result))
        return tuple(proposals), {
            "time": snapshot.time,
            "jobs": states.entries,
            "waits": self._order.waits,
        }


def _proposal(result: BiddingResult) -> Proposal:
    """Rank exactly this place, else the present one, else waiting."""
    bidder, target = result.bidder, result.target
    ranked = [_exactly(target, result.reason)] if target else []
    if target is None:
        ranked.append(_wait(result.reason))
    if bidder.held is not None and bidder.held != target:
        ranked.append(_exactly(bidder.held, Reason("keeps-until-free")))
    if target is not None:
        ranked.append(_wait(Reason("waits-for-nodes", nodes=target.nodes, reason=result.reason)))
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
