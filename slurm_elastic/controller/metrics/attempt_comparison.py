"""Each attempt of a job compared with the one before: lost steps, and speed after a change.

Only what this process has seen is compared; steps and speeds are those that jobs report.

>>> counts = ActivityCounts()
>>> attempts = AttemptComparison(counts)
>>> attempts.record(Report(job_id=7, run=0, phase="training", step=120), None, by_change=False)
>>> attempts.record(Report(job_id=7, run=1, phase="training", step=101, resumed_from=100),
...                 None, by_change=False)
>>> counts.values(metric_definitions.LOST_STEPS)[("other",)]
20
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass

from slurm_elastic.controller.metrics import metric_definitions  # noqa: F401 - for the doctest
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Decision
from slurm_elastic.core.report import LEAST_STEPS, Report


@dataclass(slots=True)
class _Attempt:
    """Newest reported values of one attempt.

    Attributes:
        last_step: of the attempt before, until it was compared; None: nothing to compare.
        prediction: predicted speed over `last_rate`, and on which GPUs.
    """

    run: int
    step: int | None = None
    rate: float | None = None
    last_step: int | None = None
    last_rate: float | None = None
    prediction: tuple[float, Allocation] | None = None


class AttemptComparison:
    """Present attempts of all jobs. Thread-safe.

    Args:
        counts: receives the results.
    """

    def __init__(self, counts: ActivityCounts) -> None:
        self._counts = counts
        self._attempts: dict[int, _Attempt] = {}
        self._lock = threading.Lock()

    def record_prediction(self, decision: Decision) -> None:
        """Record the speed that is predicted for a change which begins now."""
        with self._lock:
            attempt = self._attempts.get(decision.job_id)
            if attempt is not None and decision.current and decision.target:
                attempt.prediction = (1 + decision.gain, decision.target)

    def drop_prediction(self, job_id: int) -> None:
        """Drop the predicted speed of a change that was not carried out."""
        with self._lock:
            attempt = self._attempts.get(job_id)
            if attempt is not None:
                attempt.prediction = None

    def record(self, report: Report, held: Allocation | None, *, by_change: bool) -> None:
        """Record a report of the present attempt of its job.

        Args:
            report: as it arrived.
            held: by the job.
            by_change: whether a change of the controller began the attempt.
        """
        if report.kind != "library":
            return  # a script counts checkpoints, not steps
        with self._lock:
            attempt = self._attempts.setdefault(report.job_id, _Attempt(report.run))
            if report.run < attempt.run:
                return
            if report.run > attempt.run:
                attempt = self._attempts[report.job_id] = _Attempt(
                    report.run,
                    last_step=attempt.last_step if attempt.step is None else attempt.step,
                    last_rate=attempt.rate or attempt.last_rate,
                    prediction=attempt.prediction,
                )
            self._compare_steps(attempt, report, by_change=by_change)
            self._compare_speeds(attempt, report, held)

    def _compare_steps(self, attempt: _Attempt, report: Report, *, by_change: bool) -> None:
        if report.step is None:
            return
        if attempt.last_step is not None:
            lost = attempt.last_step - (report.resumed_from or 0)
            if lost > 0:
                self._counts.steps_lost(lost, by_change=by_change)
            attempt.last_step = None
        attempt.step = max(report.step, attempt.step or 0)

    def _compare_speeds(self, attempt: _Attempt, report: Report, held: Allocation | None) -> None:
        enough = report.steps_measured >= LEAST_STEPS
        if not enough or not report.step_time_s or not report.global_batch:
            return
        attempt.rate = report.global_batch / report.step_time_s
        if attempt.prediction is None or not attempt.last_rate:
            return
        ratio, target = attempt.prediction
        if held == target:
            self._counts.speed_changed(promised=ratio, delivered=attempt.rate / attempt.last_rate)
        attempt.prediction = attempt.last_rate = None

    def forget(self, alive: Collection[int]) -> None:
        """Drop the data of jobs that are gone."""
        with self._lock:
            self._attempts = {k: a for k, a in self._attempts.items() if k in alive}
