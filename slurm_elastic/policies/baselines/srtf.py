"""Policy `srtf`: preemptive shortest remaining time first.

The textbook rule (Schrage 1968) needs remaining times, which are not known. They are estimated,
in this order:

- from the reported progress: `ran * (1 - progress) / progress`, with the seconds that the job
  has held GPUs (restarts included) since this policy first saw it;
- from its time limit: what is left of it;
- nothing known: as long again as it has run (our definition), so that new jobs are tried first.

A job that does not fit is passed over; one beyond the room is preempted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.plan import JobRecord, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import (
    Pool,
    arrival,
    elapsed,
    proposal,
    requests,
    waits,
)
from slurm_elastic.policies.policy_protocol import Capabilities, Question


class ShortestRemaining:
    """The policy; its state is the seconds for which each job has held GPUs."""

    capabilities = Capabilities(binding_proposals=True, batch_chosen_by="user")

    def __init__(self, config: Config) -> None:
        del config

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank jobs by remaining time; see the module."""
        ran = self._account(question, state)
        left = {
            r.job.job_id: remaining_s(r.job, r.record, ran[r.job.key], question.snapshot.time)
            for r in requests(question)
        }
        pool = Pool(question.capacity)
        proposals = []
        for request in sorted(
            requests(question),
            key=lambda r: (left[r.job.job_id], arrival(r.job), r.job.job_id),
        ):
            seconds = left[request.job.job_id]
            chosen = pool.first(request.staying_first)
            if chosen:
                pool.take(chosen)
                reason = Reason("short-remaining", left_s=seconds)
            else:
                reason = waits(request) if not request.held else Reason("others-shorter")
            proposals.append(proposal(request, chosen, reason, -seconds))
        return tuple(proposals), {"time": question.snapshot.time, "ran": ran}

    def _account(self, question: Question, state: Mapping[str, Any]) -> dict[str, float]:
        """Return the seconds with GPUs of each existing job; of a new one: of its present run."""
        earlier = state.get("ran", {})
        since_last, of_run = elapsed(question, state.get("time")), elapsed(question, None)
        return {
            job.key: earlier[job.key] + since_last.get(job.key, 0.0)
            if job.key in earlier
            else of_run.get(job.key, 0.0)
            for job in question.snapshot.jobs
            if job.submission is not None
        }


def remaining_s(job: Job, record: JobRecord, ran_s: float, now: float) -> float:
    """Return the estimated seconds until a job's end at its requested size."""
    if record.progress and ran_s > 0:
        return ran_s * max(0.0, 1 - record.progress) / record.progress
    if job.time_limit_s is not None:
        begin = now if job.start_time is None or job.allocation is None else job.start_time
        return max(0.0, begin + job.time_limit_s - now)
    return ran_s
