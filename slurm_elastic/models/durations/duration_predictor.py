"""Predicted run times: boosted where there is a fit, else rolling estimates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations import boosted_durations
from slurm_elastic.models.durations.boosted_durations import BoostedDurations
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.rolling_history import RollingHistory


@dataclass(eq=False)
class DurationPredictor:
    """Predictions from the jobs that have ended.

    Attributes:
        history: all of these jobs.
        boosted: fit to them; None: rolling estimates count alone.
    """

    history: RollingHistory = field(default_factory=RollingHistory)
    boosted: BoostedDurations | None = None

    @classmethod
    def trained(cls, jobs: Iterable[FinishedJob], *, boosted: bool = True) -> DurationPredictor:
        """Return the predictor that has learned from these jobs."""
        jobs = list(jobs)
        predictor = cls(boosted=boosted_durations.fit(jobs) if boosted else None)
        predictor.history.add_all(jobs)
        return predictor

    def predict(self, request: JobRequest) -> DurationEstimate | None:
        """Return the distribution of a job's run time; None without any earlier job."""
        (estimate,) = self.predict_all([request])
        return estimate

    def predict_all(self, requests: Sequence[JobRequest]) -> list[DurationEstimate | None]:
        """Return the distribution of each job's run time; None without any earlier job."""
        rolling = [self.history.estimate(request) for request in requests]
        if self.boosted is None or not self.history.jobs:
            return list(rolling)
        return list(self.boosted.estimates(requests, [e for e in rolling if e is not None]))
