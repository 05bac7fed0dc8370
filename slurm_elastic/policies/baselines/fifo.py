"""Policy `fifo`: first come, first served; without preemption and backfill.

The order of Hadoop's and Slurm's oldest schedulers (`SchedulerType=sched/builtin`): the first job
that does not fit blocks all that came after it. A job that this cluster can never run blocks none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import Pool, proposal, requests, waits
from slurm_elastic.policies.policy_protocol import Capabilities, Question


class Fifo:
    """The policy; it keeps no state."""

    capabilities = Capabilities(
        binding_proposals=True, allows_repacking=False, batch_chosen_by="user"
    )

    def __init__(self, config: Config) -> None:
        del config

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Keep running jobs; then start in order of submission, up to the first without room."""
        pool = Pool(question.capacity)
        all_requests = requests(question)
        for request in all_requests:
            if request.present:
                pool.take(request.present)
        proposals, head = [], ""
        for request in all_requests:
            chosen = request.present or (None if head else pool.first(request.shapes))
            if request.present:
                reason = Reason("runs-until-end")
            elif chosen:
                pool.take(chosen)
                reason = Reason("its-turn")
            elif head:
                reason = Reason("job-came-first", job=head)
            else:
                reason = waits(request)
                head = request.job.display_id if request.shapes else ""
            proposals.append(proposal(request, chosen, reason))
        return tuple(proposals), state
