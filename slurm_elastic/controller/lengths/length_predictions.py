"""Predicted run times of the jobs in Slurm's list, renewed in the background."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.lengths import training_process
from slurm_elastic.controller.lengths.training_process import Trained
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations.finished_job import JobRequest
from slurm_elastic.placement.eligibility import Eligibility, eligibility_of
from slurm_elastic.placement.starts.start_estimates import StartEstimate, start_estimates

#: Time for new predictions in one round; jobs beyond it get theirs in the next.
_ROUND_S = 0.2
#: Starts are estimated anew no sooner, unless a job was submitted; and their time in one round.
_STARTS_S, _ESTIMATE_S = 20.0, 0.25
#: Seconds between a failed update of the predictions and the next one.
_RETRY_S = 600.0


class LengthPredictions:
    """Predictor of a controller, in use if `[durations] predict` is true.

    Args:
        config: of the site.
        log: structlog logger.
        train: trains a predictor; `training_process.train`, but in tests.

    Attributes:
        trained: result of the last training.
        problem: why the last one failed; "": it did not.
        starts: probable starts of pending elastic jobs, by id.
    """

    def __init__(
        self, config: Config, log: Any, train: Callable[..., Trained] = training_process.train
    ) -> None:
        self.config = config
        self._log, self._train = log, train
        self._thread: threading.Thread | None = None
        self._next = 0.0
        self.trained = Trained()
        self.problem = ""
        self.starts: Mapping[int, StartEstimate] = {}
        self._starts_at = 0.0
        self._estimated: set[int] = set()
        #: Estimate of each job, by its key, with the training that it is from.
        self._estimates: dict[str, tuple[float, DurationEstimate | None]] = {}

    @property
    def enabled(self) -> bool:
        """Whether the configuration enables predictions."""
        return self.config.durations.predict

    def tick(self) -> None:
        """Start a training if it is due; never waits."""
        is_running = self._thread is not None and self._thread.is_alive()
        if not self.enabled or is_running or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.config.durations.refresh_s
        self._thread = threading.Thread(target=self._work, name="durations", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        settings = self.config.durations
        try:
            self.trained = self._train(
                days=settings.history_days,
                most=settings.most_jobs,
                boosted=settings.boosted,
                timeout_s=settings.timeout_s,
            )
        except SlurmElasticError as error:
            self._next = min(self._next, time.monotonic() + _RETRY_S)
            if str(error) != self.problem:
                self._log.warning(f"{error}; run times are predicted as before")
            self.problem = str(error)
            return
        except Exception as error:  # noqa: BLE001 - a thread's traceback would reach nobody
            self._next = min(self._next, time.monotonic() + _RETRY_S)
            self.problem = f"internal error, please report: {error!r:.200}"
            self._log.error(self.problem)
            return
        self.problem = ""
        self._log.info(
            f"run times are predicted from Jobs={self.trained.jobs}"
            f" Boosted={'yes' if self.trained.predictor.boosted else 'no'}"
            f" Seconds={self.trained.seconds:.1f}"
        )

    def attached(
        self, records: Mapping[int, JobRecord], snapshot: Snapshot
    ) -> dict[int, JobRecord]:
        """Return the records with the predicted run time of each job, and renew `starts`."""
        if not self.enabled or not self.trained.jobs:
            self.starts = {}
            return dict(records)
        until = time.monotonic() + _ROUND_S
        keys = {job.key for job in snapshot.jobs}
        self._estimates = {k: v for k, v in self._estimates.items() if k in keys}
        attached = {
            job_id: dataclasses.replace(record, length=self._of(snapshot.job[job_id], until))
            for job_id, record in records.items()
        }
        self._estimate_starts(snapshot, attached, until)
        return attached

    def _estimate_starts(
        self, snapshot: Snapshot, records: Mapping[int, JobRecord], until: float
    ) -> None:
        """Estimate the starts of pending elastic jobs, now and then."""
        now = time.monotonic()
        pending = {
            job.job_id
            for job in snapshot.jobs
            if job.state is JobState.PENDING and job.submission is not None
        }
        if now - self._starts_at < _STARTS_S and pending <= self._estimated:
            self.starts = {i: start for i, start in self.starts.items() if i in pending}
            return
        self._starts_at, self._estimated = now, pending
        lengths = {
            job.job_id: estimate
            for job in snapshot.jobs
            if pending
            and job.state in (JobState.PENDING, JobState.RUNNING)
            and (estimate := self._of(job, until)) is not None
        }
        end = time.monotonic() + _ESTIMATE_S
        self.starts = start_estimates(
            snapshot,
            lengths,
            progress={i: r.progress for i, r in records.items() if r.progress},
            leased={i for i, r in records.items() if r.leased},
            gives=self._givers(snapshot, records) if pending else {},
            goes_on=lambda: time.monotonic() < end,
        )

    def _givers(self, snapshot: Snapshot, records: Mapping[int, JobRecord]) -> dict[int, int]:
        """Return the running elastic jobs that give way to pending ones, and what each keeps."""
        if self.config.controller.mode != "act":
            return {}
        givers = {}
        for job_id, record in records.items():
            job = snapshot.job[job_id]
            if job.state is not JobState.RUNNING or not job.directive or not job.allocation:
                continue
            eligibility, _ = eligibility_of(job, record, self.config, snapshot.time)
            sizes = job.directive.sizes(job.allocation.gpu_type)
            if eligibility in (Eligibility.FREE, Eligibility.YIELDS) and sizes:
                givers[job_id] = sizes[0]
        return givers

    def _of(self, job: Job, until: float) -> DurationEstimate | None:
        """Return the estimate of a job; renewed while it is pending, and then kept."""
        at, estimate = self._estimates.get(job.key, (0.0, None))
        is_current = at == self.trained.at or (estimate and job.state is not JobState.PENDING)
        if not is_current and time.monotonic() < until:
            estimate = self.trained.predictor.predict(request_of(job))
            self._estimates[job.key] = (self.trained.at, estimate)
        return estimate

    def for_round(self) -> Callable[[Job], float | None]:
        """Return a function that predicts the run time of a job of the last snapshot, in seconds.

        It returns None where nothing is known, or not yet: the time of a round is limited.
        """
        until = time.monotonic() + _ROUND_S

        def expected_s(job: Job) -> float | None:
            known = self.enabled and self.trained.jobs
            estimate = self._of(job, until) if known else None
            return estimate.mean if estimate else None

        return expected_s

    def predict(self, request: JobRequest) -> DurationEstimate | None:
        """Return the prediction for a job that is to be submitted; None: there is none."""
        return self.trained.predictor.predict(request) if self.enabled else None


def request_of(job: Job) -> JobRequest:
    """Return the data of a job that the prediction reads."""
    submitted = float(job.submission.submitted if job.submission else 0) or job.submit_time
    return JobRequest(
        user=job.user,
        name=job.name,
        gpus=max(1, job.gpus),
        group=job.partition,
        submitted=submitted,
        limit_s=job.time_limit_s,
    )
