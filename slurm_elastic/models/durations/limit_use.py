"""Use of time limits by jobs that have ended, and the limits that would do; our definition."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.models.durations import job_names
from slurm_elastic.models.durations.finished_job import FinishedJob
from slurm_elastic.models.durations.limit_advice import advised_limit_s

#: The latest jobs of a name that count, as for predictions.
_LATEST = 48
#: Most names of which the use of limits is kept, and shown.
MOST_NAMES = 5000
#: A run that has used this part of its limit was ended by it.
_REACHED = 0.99


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse:
    """Time limits and run times of one user's jobs whose names differ in numbers only.

    Attributes:
        name: with `#` in place of each number.
        jobs: number of jobs with a limit that have ended.
        limit_s: median of their limits.
        median_s: median of their run times, on the GPUs requested.
        p90_s: run time that a tenth of them exceed.
        reached: number of jobs that used at least 99 % of their limits.
        advised_s: limit that such jobs rarely exceed.
        gpu_hours: requested with the limits beyond the advised one; negative: the limits are less.
    """

    user: str
    name: str
    jobs: int
    limit_s: float
    median_s: float
    p90_s: float
    reached: int
    advised_s: float
    gpu_hours: float


def limit_uses(jobs: Iterable[FinishedJob], *, most: int = MOST_NAMES) -> list[LimitUse]:
    """Return the use of time limits by user and name, the largest `gpu_hours` first.

    Names of which too few jobs have ended for an advised limit are left out, and jobs without a
    limit.

    Args:
        jobs: that have ended.
        most: names at most, in all.
    """
    by_name: dict[tuple[str, str], list[FinishedJob]] = {}
    for job in sorted(jobs, key=lambda j: j.ended):
        if job.request.limit_s:
            key = job.request.user, job_names.family(job.request.short_name)
            by_name.setdefault(key, []).append(job)
    uses = [
        use
        for (user, name), ended in by_name.items()
        if (use := _use(user, name, ended[-_LATEST:])) is not None
    ]
    return heapq.nlargest(most, uses, key=lambda use: use.gpu_hours)


def _use(user: str, name: str, jobs: list[FinishedJob]) -> LimitUse | None:
    """Return the use of these jobs' limits; None: too few jobs."""
    seconds = [job.seconds for job in jobs]
    estimate = DurationEstimate.of_sample(seconds, basis="same-name", jobs=len(jobs))
    advised_s = advised_limit_s(estimate)
    if advised_s is None:
        return None
    limits = [job.request.limit_s or 0.0 for job in jobs]
    beyond = (
        job.request.gpus * (limit - advised_s) for job, limit in zip(jobs, limits, strict=True)
    )
    return LimitUse(
        user=user,
        name=name,
        jobs=len(jobs),
        limit_s=statistics.median(limits),
        median_s=statistics.median(seconds),
        p90_s=estimate.quantile(0.9),
        reached=sum(s >= _REACHED * limit for s, limit in zip(seconds, limits, strict=True)),
        advised_s=advised_s,
        gpu_hours=sum(beyond) / 3600,
    )
