"""Probable starts of pending jobs, from predicted run times of the jobs before them.

The ends of running jobs, and the run times of pending ones, are drawn many times from their
predictions; in each draw pending jobs start as Slurm and the controller would start them
(`queue_course.py`): in Slurm's order, as backfill, and where elastic jobs give way. No further job
is submitted, and elastic jobs do not grow: so a job may start later because others come before it.

Draws are the same in every call: estimates change only with the cluster, and with the number of
draws that are allowed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.placement.free_resources import HOLDING
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import WAITS_FOR_ROOM
from slurm_elastic.placement.starts.queue_course import (
    HeldGpus,
    QueueCourse,
    StartOptions,
    WaitingJob,
)

#: Draws, and the fewest that make an estimate.
DRAWS, _FEWEST = 40, 15
#: Pending jobs of Slurm's order that are considered.
_MOST_PENDING = 100
#: A job that is late by its prediction ends within so much of its present age.
_LATE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartEstimate:
    """Probable start of a pending job (epoch s): in half, and in nine tenths of all draws."""

    median: float
    p90: float


def start_estimates(
    snapshot: Snapshot,
    lengths: Mapping[int, DurationEstimate],
    *,
    progress: Mapping[int, float] | None = None,
    leased: Collection[int] = (),
    gives: Mapping[int, int] | None = None,
    backfill: bool = True,
    draws: int = DRAWS,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[int, StartEstimate]:
    """Return the estimate of each pending elastic job; those that nothing is known of are left out.

    Args:
        snapshot: the cluster.
        lengths: predicted run times, by job, from the start on; of running and pending jobs.
        progress: fraction done of running jobs that report it; it counts before a prediction.
        leased: elastic jobs that the controller starts, and that Slurm shows as waiting for a time.
        gives: running elastic jobs that give way, and the GPUs that each keeps.
        backfill: False: each partition and type starts in order only.
        draws: how many.
        goes_on: asked before each further draw, so that the caller may bound their time.
    """
    frame = NodeArrays(snapshot)
    waiting = _waiting(snapshot, leased)
    if not any(job.submission for job in waiting):
        return {}
    options = _options(frame, waiting, leased)
    left = _lengths_left(snapshot, lengths)
    rng = random.Random(0)  # noqa: S311 - no secret
    started: dict[int, list[float]] = {}
    count = 0
    for _ in range(draws):
        if count and not goes_on():
            break
        count += 1
        draw = _Draw(frame, left, rng)
        course = QueueCourse(
            snapshot.time,
            np.maximum(frame.free, 0),
            draw.held(progress or {}, gives or {}),
            draw.waiting(waiting, options, leased),
            backfill=backfill,
        )
        for job_id, at in course.starts().items():
            started.setdefault(job_id, []).append(at)
    if count < min(draws, _FEWEST):
        return {}
    return {
        job.job_id: StartEstimate(
            median=_quantile(started.get(job.job_id, []), 0.5, count),
            p90=_quantile(started.get(job.job_id, []), 0.9, count),
        )
        for job in waiting
        # In the other draws it does not start within what is known.
        if job.submission and len(started.get(job.job_id, ())) >= 0.9 * count
    }


def _waiting(snapshot: Snapshot, leased: Collection[int]) -> list[Job]:
    """Return the pending jobs that wait only for GPUs and their turn, in Slurm's order."""
    waiting = [
        job
        for job in snapshot.jobs
        if job.state is JobState.PENDING
        and _wanted(job)
        and (job.reason in WAITS_FOR_ROOM or job.job_id in leased)
    ]
    waiting.sort(key=lambda job: (-job.priority, job.submit_time, job.job_id))
    return waiting[:_MOST_PENDING]


def _wanted(job: Job) -> int:
    """Return the GPUs with which a pending job starts."""
    return job.gpus or (job.directive.min_gpus if job.directive else 0)


def _options(
    frame: NodeArrays, waiting: Sequence[Job], leased: Collection[int]
) -> dict[int, StartOptions]:
    """Return the places in which each pending job may start; jobs alike have the same object.

    As in `placement/pending_claims.py`: one that the controller starts has its MIN, of any of its
    types; for others equal shares on the fewest nodes are assumed.
    """
    by_kind: dict[tuple[object, ...], StartOptions] = {}
    options = {}
    for job in waiting:
        sizes = {job.gpu_type: _wanted(job)}
        if is_leased := job.job_id in leased and job.directive is not None:
            of_types = {t: job.directive.sizes(t) for t in job.directive.types or frame.types}
            sizes = {t: s[0] for t, s in of_types.items() if s}
        usable = frame.allowed(job, planned=True, asleep=True)
        kind = (id(usable), job.min_nodes, is_leased, *sizes.items())
        if kind not in by_kind:
            rows = []
            for gpu_type, gpus in sizes.items():
                most = frame.per_node.get(gpu_type, int(frame.gpus.max(initial=0)))
                splits = [s for s in even_splits(gpus, most) if s[0] >= job.min_nodes]
                rows.append(
                    (usable & frame.of_type(gpu_type), tuple(splits if is_leased else splits[:1]))
                )
            by_kind[kind] = StartOptions(tuple(rows))
        options[job.job_id] = by_kind[kind]
    return options


def _lengths_left(
    snapshot: Snapshot, lengths: Mapping[int, DurationEstimate]
) -> dict[int, DurationEstimate]:
    """Return the run times, from the start on, given how long each job has run."""
    return {
        job.job_id: lengths[job.job_id].given(_age_s(job, snapshot.time))
        for job in snapshot.jobs
        if job.job_id in lengths
    }


def _age_s(job: Job, now: float) -> float:
    """Return how long a job has run; 0 while it is pending."""
    if job.state is not JobState.RUNNING:
        return 0.0
    return max(0.0, now - (job.start_time or now))


class _Draw:
    """Run times of one draw.

    Args:
        frame: the cluster.
        lengths: run times by job, from the start on, given how long it has run.
        rng: source of all that is drawn.
    """

    def __init__(
        self, frame: NodeArrays, lengths: Mapping[int, DurationEstimate], rng: random.Random
    ) -> None:
        self._frame, self._lengths, self._rng = frame, lengths, rng
        self._now = frame.snapshot.time

    def held(self, progress: Mapping[int, float], gives: Mapping[int, int]) -> dict[int, HeldGpus]:
        """Return the GPUs of all jobs that hold some, by id."""
        held = {}
        for job in self._frame.snapshot.jobs:
            if job.state in HOLDING and job.allocation is not None:
                left_s = self._left_s(job, progress.get(job.job_id))
                held[job.job_id] = HeldGpus(
                    shares=self._frame.shares(job.allocation.shares),
                    end=None if left_s is None else self._now + left_s,
                    latest=self._latest(job),
                    least=gives.get(job.job_id),
                )
        return held

    def waiting(
        self, jobs: Sequence[Job], options: Mapping[int, StartOptions], leased: Collection[int]
    ) -> list[WaitingJob]:
        """Return the pending jobs with their run times."""
        return [
            WaitingJob(
                job_id=job.job_id,
                queue=(job.partition, job.gpu_type),
                options=options[job.job_id],
                limit_s=math.inf if job.time_limit_s is None else job.time_limit_s,
                seconds=self._length_s(job),
                controller_starts=job.job_id in leased,
                awaited=job.submission is not None,
            )
            for job in jobs
        ]

    def _latest(self, job: Job) -> float:
        """Return the end of a running job by its time limit; infinity: none."""
        if job.state is not JobState.RUNNING:
            return self._now
        if job.time_limit_s is None:
            return math.inf
        return max(self._now, (job.start_time or self._now) + job.time_limit_s)

    def _left_s(self, job: Job, progress: float | None) -> float | None:
        """Return the seconds that a running job goes on; None: that is not known."""
        if job.state is not JobState.RUNNING:
            return 0.0
        age_s = _age_s(job, self._now)
        limit_s = None if job.time_limit_s is None else max(0.0, job.time_limit_s - age_s)
        level = self._rng.random()
        left_s: float | None = None
        if progress and age_s > 0:
            # As fast as until now, within a fifth.
            left_s = age_s * (1 - progress) / progress * (0.8 + 0.4 * level)
        elif job.job_id in self._lengths:
            total_s = self._lengths[job.job_id].quantile(level)
            left_s = max(total_s - age_s, _LATE * level * age_s)
        if left_s is None or limit_s is None:
            return limit_s if left_s is None else left_s
        return min(left_s, limit_s)

    def _length_s(self, job: Job) -> float | None:
        """Return how long a pending job runs; None: that is not known."""
        level = self._rng.random()
        known = self._lengths.get(job.job_id)
        if known is None:
            return job.time_limit_s
        seconds = known.quantile(level)
        return seconds if job.time_limit_s is None else min(seconds, job.time_limit_s)


def _quantile(values: list[float], level: float, count: int) -> float:
    """Return the value that this part of all draws does not exceed; those without one are last."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, int(np.ceil(level * count)) - 1))]
