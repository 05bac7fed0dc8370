"""Run times of a site's past jobs, as the prediction of run times reads them."""

from __future__ import annotations

from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.simulator.workloads.accounting_trace import AccountingTrace, PastJob


def finished(trace: AccountingTrace) -> list[FinishedJob]:
    """Return the jobs of a trace that have ended, in its order."""
    return [_finished(job) for job in trace.jobs if job.ended]


def _finished(job: PastJob) -> FinishedJob:
    gpus = job.main.gpus
    request = JobRequest(
        user=job.user,
        name=job.name,
        gpus=gpus,
        group=job.partition,
        submitted=job.submit,
        limit_s=job.limit_s,
    )
    seconds = sum(run.seconds * run.gpus for run in job.runs) / gpus
    return FinishedJob(request=request, seconds=seconds, ended=job.end)
