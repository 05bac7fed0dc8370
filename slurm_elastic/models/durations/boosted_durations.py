"""Boosted trees over the rolling estimates: corrections by size, user, hour and limit of a job.

Three quantiles of the logarithm of the run time are learned by scikit-learn's histogram gradient
boosting, on the older jobs; on the newest fifth their coverage is corrected (conformalised quantile
regression, Romano et al., NeurIPS'19). Between the three the distribution is a normal one of the
logarithm, with its own width on each side.

scikit-learn is optional (the extra `durations`): `fit` returns None without it, and where there are
too few jobs, and rolling estimates count alone.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.prediction.duration_estimate import LEVELS, DurationEstimate
from slurm_elastic.models.durations.finished_job import FinishedJob, JobRequest
from slurm_elastic.models.durations.rolling_history import RollingHistory

Floats = NDArray[np.float64]

#: Fewest jobs to learn from, and most: the latest count.
LEAST_JOBS, MOST_JOBS = 300, 20_000
#: Quantiles that are learned, and the scores of the normal distribution there.
_QUANTILES = (0.1, 0.5, 0.9)
_SCORES = (-1.2815515655446004, 0.0, 1.2815515655446004)
#: Scores at `LEVELS`.
_LEVEL_SCORES = (
    *(-1.6448536269514722, -1.2815515655446004, -0.8416212335729143, -0.5244005127080407),
    *(-0.2533471031357997, 0.0, 0.2533471031357997, 0.5244005127080407),
    *(0.8416212335729143, 1.2815515655446004, 1.6448536269514722),
)
#: Part of the jobs, the newest, on which coverage is corrected.
_CALIBRATION = 0.2
_TREES, _LEAVES, _LEAST_LEAF = 120, 31, 20
_UNKNOWN = -1.0


@dataclass(frozen=True, eq=False, slots=True)
class BoostedDurations:
    """Three fitted regressors, the corrections of their coverage, and codes of users and groups."""

    regressors: tuple[Any, ...]
    corrections: tuple[float, ...]
    users: dict[str, int]
    groups: dict[str, int]

    def estimates(
        self, requests: Sequence[JobRequest], rolling: Sequence[DurationEstimate]
    ) -> list[DurationEstimate]:
        """Return the distributions for requests, from their rolling estimates."""
        if not requests:
            return []
        rows = np.array(
            [
                _features(r, e, self.users, self.groups)
                for r, e in zip(requests, rolling, strict=True)
            ]
        )
        from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with scikit-learn

        with threadpool_limits(limits=1):
            columns = [
                regressor.predict(rows) + correction
                for regressor, correction in zip(self.regressors, self.corrections, strict=True)
            ]
        logs = np.sort(np.stack(columns, axis=1), axis=1)
        return [
            _between(row, estimate) for row, estimate in zip(logs.tolist(), rolling, strict=True)
        ]


def is_available() -> bool:
    """Return whether scikit-learn is installed."""
    return importlib.util.find_spec("sklearn") is not None


def fit(jobs: Iterable[FinishedJob]) -> BoostedDurations | None:
    """Learn from the latest jobs; None: too few, or scikit-learn is missing."""
    replayed = list(replay(jobs))[-MOST_JOBS:]
    if len(replayed) < LEAST_JOBS or not is_available():
        return None
    from sklearn.ensemble import (  # noqa: PLC0415 - optional, and takes a second
        HistGradientBoostingRegressor,
    )
    from threadpoolctl import threadpool_limits  # noqa: PLC0415 - comes with it

    users = _codes(job.request.user for job, _ in replayed)
    groups = _codes(job.request.group for job, _ in replayed)
    rows = np.array([_features(job.request, e, users, groups) for job, e in replayed])
    logs = np.log([max(1.0, job.seconds) for job, _ in replayed])
    older = int(len(replayed) * (1 - _CALIBRATION))
    regressors, corrections = [], []
    for level in _QUANTILES:
        regressor = HistGradientBoostingRegressor(
            loss="quantile",
            quantile=level,
            max_iter=_TREES,
            max_leaf_nodes=_LEAVES,
            min_samples_leaf=_LEAST_LEAF,
            early_stopping=False,
            random_state=0,
        )
        # The other cores are not this program's.
        with threadpool_limits(limits=1):
            regressor.fit(rows[:older], logs[:older])
            left_over = logs[older:] - regressor.predict(rows[older:])
        regressors.append(regressor)
        corrections.append(float(np.quantile(left_over, level)))
    return BoostedDurations(tuple(regressors), tuple(corrections), users, groups)


def replay(
    jobs: Iterable[FinishedJob],
) -> Iterator[tuple[FinishedJob, DurationEstimate]]:
    """Yield jobs in order of submission, with the rolling estimate of that moment.

    A job counts for others from its end on. The first jobs, for which there is none, are left out.
    """
    jobs = list(jobs)
    history = RollingHistory()
    by_end = sorted(jobs, key=lambda j: j.ended)
    ended = 0
    for job in sorted(jobs, key=lambda j: j.request.submitted):
        while ended < len(by_end) and by_end[ended].ended <= job.request.submitted:
            history.add(by_end[ended])
            ended += 1
        estimate = history.estimate(job.request)
        if estimate is not None:
            yield job, estimate


def _features(
    request: JobRequest, rolling: DurationEstimate, users: dict[str, int], groups: dict[str, int]
) -> tuple[float, ...]:
    moment = time.gmtime(min(max(request.submitted, 0.0), 3e10))
    basis = ("same-name", "similar-name", "user", "shape", "all").index(rolling.basis)
    return (
        math.log(rolling.median),
        math.log(rolling.quantile(0.1)),
        math.log(rolling.quantile(0.9)),
        math.log(rolling.mean),
        float(basis),
        math.log1p(rolling.jobs),
        math.log(max(1, request.gpus)),
        float(moment.tm_hour),
        float(moment.tm_wday),
        float(users.get(request.user, _UNKNOWN)),
        float(groups.get(request.group, _UNKNOWN)),
        math.log(request.limit_s) if request.limit_s else _UNKNOWN,
        float(len(request.short_name)),
    )


def _codes(texts: Iterable[str]) -> dict[str, int]:
    """Return a number for each text, in order of the first occurrence."""
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def _between(logs: Sequence[float], rolling: DurationEstimate) -> DurationEstimate:
    """Return the distribution with these logarithms of the learned quantiles."""
    low, middle, high = logs
    widths = (middle - low) / -_SCORES[0], (high - middle) / _SCORES[2]
    seconds = tuple(
        math.exp(min(max(middle + score * widths[score > 0], 0.0), 21.0)) for score in _LEVEL_SCORES
    )
    assert len(seconds) == len(LEVELS)
    return DurationEstimate(seconds=seconds, basis=rolling.basis, jobs=rolling.jobs)
