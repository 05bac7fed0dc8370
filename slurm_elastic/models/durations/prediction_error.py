"""Errors of predicted run times on jobs of the past, each predicted from those that had ended.

The measures: the median factor between prediction and outcome (1: exact), the part of the jobs that
ended within the predicted 90 % quantile, and rank correlation, as an order of jobs needs no more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations import boosted_durations
from slurm_elastic.models.durations.finished_job import FinishedJob

#: Part of the jobs, the latest, on which errors are measured; the others come before them.
TESTED = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionError:
    """Errors of one way to predict.

    Attributes:
        jobs: number of jobs predicted.
        factor_p50, factor_p90: factor between predicted median and outcome that half of the jobs,
            and 90 % of them, stay within.
        within_p90: part of the jobs within the predicted 90 % quantile; None: there is none.
        rank: Spearman's correlation of prediction and outcome.
    """

    jobs: int
    factor_p50: float
    factor_p90: float
    within_p90: float | None
    rank: float


def of_points(seconds: Sequence[float], predicted: Sequence[float]) -> PredictionError:
    """Return the errors of single values, such as time limits."""
    true = np.maximum(1.0, np.asarray(seconds, dtype=np.float64))
    guess = np.maximum(1.0, np.asarray(predicted, dtype=np.float64))
    factors = np.exp(np.abs(np.log(guess / true)))
    return PredictionError(
        jobs=len(true),
        factor_p50=float(np.median(factors)),
        factor_p90=float(np.quantile(factors, 0.9)),
        within_p90=None,
        rank=_rank_correlation(true, guess),
    )


def of_estimates(
    seconds: Sequence[float], estimates: Sequence[DurationEstimate]
) -> PredictionError:
    """Return the errors of distributions."""
    error = of_points(seconds, [e.median for e in estimates])
    within = [s <= e.quantile(0.9) for s, e in zip(seconds, estimates, strict=True)]
    return dataclasses.replace(error, within_p90=sum(within) / len(within))


def of_ways(jobs: Sequence[FinishedJob], *, boosted: bool) -> dict[str, PredictionError]:
    """Return the errors of each way to predict the latest jobs of a past.

    Rolling estimates learn job by job. The boosted model is fitted once, to the jobs that had
    ended before the first predicted one was submitted.

    Args:
        jobs: ended jobs.
        boosted: measure the boosted model, too, if scikit-learn is installed.
    """
    replayed = list(boosted_durations.replay(jobs))
    tested = replayed[len(replayed) - int(len(replayed) * TESTED) :]
    if not tested:
        return {}
    seconds = [job.seconds for job, _ in tested]
    rolling = [estimate for _, estimate in tested]
    errors = {"rolling": of_estimates(seconds, rolling)}
    if boosted:
        begins = tested[0][0].request.submitted
        model = boosted_durations.fit(job for job in jobs if job.ended <= begins)
        if model is not None:
            requests = [job.request for job, _ in tested]
            errors["boosted"] = of_estimates(seconds, model.estimates(requests, rolling))
    limits = [(job.seconds, job.request.limit_s) for job, _ in tested if job.request.limit_s]
    if limits:
        errors["time limit"] = of_points([s for s, _ in limits], [limit for _, limit in limits])
    return errors


def _rank_correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    ranks = [_ranks(first), _ranks(second)]
    if min(float(np.std(r)) for r in ranks) == 0.0:
        return 0.0
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks of values; equal ones share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return ((last - counts + last - 1) / 2)[inverse]
