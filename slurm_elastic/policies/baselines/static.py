"""Policy `static`: as plain Slurm: the requested size, by priority, with EASY backfill.

The ends that backfill counts with (easy_backfill.py) are those of the time limits. No job is
preempted or resized. Without time limits no end is known: then no job overtakes on the type that
the first one waits for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.easy_backfill import Backfill
from slurm_elastic.policies.baselines.rigid import Pool, arrival, proposal, requests
from slurm_elastic.policies.policy_protocol import Capabilities, Question


class Static:
    """The policy; it keeps no state."""

    capabilities = Capabilities(
        binding_proposals=True, allows_repacking=False, batch_chosen_by="user"
    )

    def __init__(self, config: Config) -> None:
        del config

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Keep running jobs; then start by priority and age, with backfill."""
        now = question.snapshot.time
        pool = Pool(question.capacity)
        all_requests = requests(question)
        ends = [
            (_end(job, now), job.allocation.gpu_type, job.allocation.gpus)
            for job in question.snapshot.jobs
            if job.allocation is not None
        ]
        for request in all_requests:
            if request.present:
                pool.take(request.present)
        backfill = Backfill(pool, ends)
        all_requests.sort(key=lambda r: (-r.job.priority, arrival(r.job), r.job.job_id))
        proposals: list[Proposal] = []
        for request in all_requests:
            if request.present:
                proposals.append(proposal(request, request.present, Reason("runs-until-end")))
                continue
            chosen, reason = backfill.start(request, now + _limit(request.job))
            proposals.append(proposal(request, chosen, reason))
        return tuple(proposals), state


def _limit(job: Job) -> float:
    return math.inf if job.time_limit_s is None else float(job.time_limit_s)


def _end(job: Job, now: float) -> float:
    """Return when a running job ends at the latest; infinity if that is not known."""
    if job.time_limit_s is None:
        return math.inf
    return (now if job.start_time is None else job.start_time) + job.time_limit_s
