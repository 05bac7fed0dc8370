"""Predicted run times of simulated jobs, from those that are complete; rolling estimates only."""

from __future__ import annotations

import re

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.rolling_history import RollingHistory
from slurm_elastic.simulator.simulated_job import SimulatedJob

#: A prediction is renewed when so many times as many jobs are complete.
_RENEW = 1.1
#: Workloads of accounting are named by job ids: their applications are the names.
_JOB_ID = re.compile(r"\d+(_\d+)?")


class SimulatedLengths:
    """History of one simulation, and the predictions of its active jobs."""

    def __init__(self) -> None:
        self._history = RollingHistory()
        self._predicted: dict[int, tuple[int, DurationEstimate]] = {}

    def add(self, job: SimulatedJob) -> None:
        """Add a job that is complete."""
        assert job.completion_s is not None
        seconds = job.gpu_s / job.submitted.gpus
        self._history.add(
            FinishedJob(request=_request(job), seconds=seconds, ended=job.completion_s)
        )
        self._predicted.pop(job.job_id, None)

    def of(self, job: SimulatedJob) -> DurationEstimate | None:
        """Return the prediction for a job; the same object until it is renewed."""
        jobs, estimate = self._predicted.get(job.job_id, (0, None))
        if estimate is None or self._history.jobs > _RENEW * jobs:
            estimate = self._history.estimate(_request(job))
            if estimate is None:
                return None
            self._predicted[job.job_id] = (self._history.jobs, estimate)
        return estimate


def _request(job: SimulatedJob) -> JobRequest:
    submitted = job.submitted
    name = submitted.name
    if _JOB_ID.fullmatch(name):
        name = submitted.application.partition("#")[0]
    return JobRequest(
        user=submitted.user, name=name, gpus=submitted.gpus, submitted=submitted.time_s
    )
