"""Policy `qssf`: quasi-shortest-service-first, by predicted GPU seconds, with backfill and ageing.

After Helios (Hu et al., SC'21). The requested size, no preemption. Pending jobs go by

    GPUs x predicted run time - ageing x seconds waited

the least first. With `[qssf] ageing = 0` and `backfill = false` that is the published order, which
lets large jobs starve and stops at the first job without room. Backfill (easy_backfill.py) counts
with the `quantile` of the predicted run time of running jobs, given how long they have run, and
of those that fill a gap; a predicted end reserves nothing.

A job without a prediction counts with its time limit, else with `ASSUMED_S`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.plan import JobRecord, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.easy_backfill import Backfill
from slurm_elastic.policies.baselines.rigid import (
    Pool,
    RigidRequest,
    arrival,
    elapsed,
    proposal,
    requests,
    waits,
)
from slurm_elastic.policies.policy_protocol import Capabilities, Question

#: Run time of a job of which nothing is known; our choice.
ASSUMED_S = 3600.0


class QuasiShortestService:
    """The policy; its state is the seconds for which each running job has run."""

    capabilities = Capabilities(
        binding_proposals=True,
        allows_repacking=False,
        batch_chosen_by="user",
        predicted_lengths=True,
    )

    def __init__(self, config: Config) -> None:
        self._settings = config.qssf

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Keep running jobs; then start by predicted service; see the module."""
        now = question.snapshot.time
        ran = _account(question, state)
        pool = Pool(question.capacity)
        all_requests = requests(question)
        proposals = []
        for request in all_requests:
            if request.present:
                pool.take(request.present)
                proposals.append(proposal(request, request.present, Reason("runs-until-end")))
        ends = [
            (now + self._left_s(job, question, ran), job.allocation.gpu_type, job.allocation.gpus)
            for job in question.snapshot.jobs
            if job.allocation is not None
        ]
        backfill = Backfill(pool, ends)
        blocked = False
        pending = [request for request in all_requests if not request.present]
        for request in sorted(pending, key=lambda r: self._order(r, now, ran)):
            job = request.job
            if blocked and not self._settings.backfill:
                chosen, reason = None, waits(request)
            else:
                end = now + self._left_s(job, question, ran)
                chosen, reason = backfill.start(request, end)
                blocked |= chosen is None and bool(request.shapes)
            if chosen:
                service_s = _gpus(request) * mean_s(job, request.record)
                reason = Reason("least-service", service_s=service_s, reason=reason)
            proposals.append(proposal(request, chosen, reason))
        return tuple(proposals), {"time": now, "ran": ran}

    def _order(
        self, request: RigidRequest, now: float, ran: Mapping[str, float]
    ) -> tuple[float, int, float, int]:
        """Return the place of a pending job; ties go by GPUs, then by submission."""
        gpus, since = _gpus(request), arrival(request.job)
        left_s = max(1.0, mean_s(request.job, request.record) - ran.get(request.job.key, 0.0))
        service = aged_service(gpus, left_s, now - since, self._settings.ageing)
        return service, gpus, since, request.job.job_id

    def _left_s(self, job: Job, question: Question, ran: Mapping[str, float]) -> float:
        """Return the `quantile` of a job's remaining time; its time limit is a bound."""
        record = question.records.get(job.job_id) or JobRecord(job_id=job.job_id)
        age_s = ran.get(job.key, 0.0)
        bound_s = limit_left_s(job, question.snapshot.time)
        if record.length is None:
            return max(age_s, ASSUMED_S - age_s) if bound_s is None else bound_s
        left_s = record.length.given(age_s).quantile(self._settings.quantile) - age_s
        return left_s if bound_s is None else min(left_s, bound_s)


def aged_service(gpus: int, seconds: float, waited_s: float, ageing: float) -> float:
    """Return the GPU seconds by which a pending job is ranked, the least first."""
    return gpus * seconds - ageing * waited_s


def mean_s(job: Job, record: JobRecord) -> float:
    """Return the expected run time of a job at its requested size."""
    if record.length is not None:
        return record.length.mean
    return ASSUMED_S if job.time_limit_s is None else float(job.time_limit_s)


def limit_left_s(job: Job, now: float) -> float | None:
    """Return the rest of a job's time limit; None: it has none."""
    if job.time_limit_s is None:
        return None
    begin = now if job.start_time is None or job.allocation is None else job.start_time
    return max(0.0, begin + job.time_limit_s - now)


def _gpus(request: RigidRequest) -> int:
    return request.shapes[0][1] if request.shapes else request.job.gpus


def _account(question: Question, state: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds for which each existing elastic job has run, over all its runs."""
    earlier = state.get("ran", {})
    since_last, of_run = elapsed(question, state.get("time")), elapsed(question, None)
    ran = {
        job.key: earlier[job.key] + since_last.get(job.key, 0.0)
        if job.key in earlier
        else of_run.get(job.key, 0.0)
        for job in question.snapshot.jobs
        if job.submission is not None
    }
    return {key: seconds for key, seconds in ran.items() if seconds > 0}
