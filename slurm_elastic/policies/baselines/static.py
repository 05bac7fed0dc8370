"""Policy `static`: as plain Slurm: the requested size, by priority, with EASY backfill.

EASY (Lifka, JSSPP 1995; the idea of Slurm's `sched/backfill`): the first job without room is
promised the earliest moment at which the time limits of running jobs leave enough GPUs of one
type; others may go before it if that does not delay it: they end before, or leave enough. No job
is preempted or resized. Without time limits no end is known: then no job overtakes on the type
that the first one waits for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import (
    Pool,
    RigidRequest,
    Shape,
    arrival,
    proposal,
    requests,
    waits,
)
from slurm_elastic.policies.policy_protocol import Capabilities, Question


@dataclass(slots=True)
class _Promise:
    """Promise to the first waiting job: `gpu_type` from `begins` on; `spare` GPUs are left over."""

    job_id: str
    gpu_type: str
    begins: float
    spare: int


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
        all_requests.sort(key=lambda r: (-r.job.priority, arrival(r.job), r.job.job_id))
        proposals: list[Proposal] = []
        promise: _Promise | None = None
        for request in all_requests:
            if request.present:
                proposals.append(proposal(request, request.present, Reason("runs-until-end")))
                continue
            end = now + _limit(request.job)
            fitting = [s for s in request.shapes if pool.room(s)]
            chosen = next((s for s in fitting if _harmless(s, end, promise)), None)
            if chosen:
                pool.take(chosen)
                ends.append((end, *chosen))
                if promise and chosen[0] == promise.gpu_type and end >= promise.begins:
                    promise.spare -= chosen[1]
                reason = Reason("its-turn")
                if promise:
                    reason = Reason("fills-gap", job=promise.job_id)
            else:
                reason = waits(request)
                if fitting and promise:
                    reason = Reason("would-delay-job", job=promise.job_id)
                if promise is None and request.shapes:
                    promise = _promise(request, pool, ends)
            proposals.append(proposal(request, chosen, reason))
        return tuple(proposals), state


def _limit(job: Job) -> float:
    return math.inf if job.time_limit_s is None else float(job.time_limit_s)


def _end(job: Job, now: float) -> float:
    """Return when a running job ends at the latest; infinity if that is not known."""
    if job.time_limit_s is None:
        return math.inf
    return (now if job.start_time is None else job.start_time) + job.time_limit_s


def _harmless(shape: Shape, end: float, promise: _Promise | None) -> bool:
    if promise is None or shape[0] != promise.gpu_type:
        return True
    return end < promise.begins or shape[1] <= promise.spare


def _promise(
    request: RigidRequest, pool: Pool, ends: Iterable[tuple[float, str, int]]
) -> _Promise | None:
    """Return the earliest time, as far as known, at which one of its shapes has room."""
    earliest: _Promise | None = None
    order = sorted(ends)
    for kind, gpus in request.shapes:
        free, begins = pool.free.get(kind, 0), math.inf
        for end, of_kind, given_back in order:
            if of_kind == kind:
                free += given_back
                if free >= gpus:
                    begins = end
                    break
        if earliest is None or begins < earliest.begins:
            spare = max(0, free - gpus) if math.isfinite(begins) else 0
            earliest = _Promise(request.job.display_id, kind, begins, spare)
    return earliest
