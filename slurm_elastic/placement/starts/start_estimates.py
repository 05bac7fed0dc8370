"""When pending jobs will probably start, from predicted run times of the jobs before them.

The ends of running jobs, and the run times of pending ones, are drawn many times from their
predictions; in each draw, pending jobs start in Slurm's order as soon as enough GPUs are free on
nodes that they may use. A job waits for those before it that want the same partition and type;
jobs are not backfilled, running elastic jobs keep what they hold, and no further job is submitted:
so a job may start sooner because others give way, and later because others come before it.

Draws are the same in every call: estimates change only with the cluster, and with the number of
draws that are allowed.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np

from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.placement.free_resources import HOLDING
from slurm_elastic.placement.node_arrays import Ints, NodeArrays
from slurm_elastic.placement.pending_claims import WAITS_FOR_ROOM

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
    draws: int = DRAWS,
    goes_on: Callable[[], bool] = lambda: True,
) -> dict[int, StartEstimate]:
    """Return the estimate of each pending elastic job; those that nothing is known of are left out.

    Args:
        snapshot: the cluster.
        lengths: predicted run times, by job, from the start on; of running and pending jobs.
        progress: fraction done of running jobs that report it; it counts before a prediction.
        leased: elastic jobs that the controller starts, and that Slurm shows as waiting for a time.
        draws: how many.
        goes_on: asked before each further draw, so that the caller may bound their time.
    """
    frame = NodeArrays(snapshot)
    waiting = _waiting(snapshot, leased)
    if not any(job.submission for job in waiting):
        return {}
    rng = random.Random(0)  # noqa: S311 - no secret
    started: dict[int, list[float]] = {}
    count = 0
    for _ in range(draws):
        if count and not goes_on():
            break
        count += 1
        draw = _Draw(frame, waiting, lengths, progress or {}, rng)
        for job_id, at in draw.starts().items():
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


class _Draw:
    """One course of events."""

    def __init__(
        self,
        frame: NodeArrays,
        waiting: list[Job],
        lengths: Mapping[int, DurationEstimate],
        progress: Mapping[int, float],
        rng: random.Random,
    ) -> None:
        self._frame, self._lengths, self._rng = frame, lengths, rng
        self._now = frame.snapshot.time
        self._free: Ints = np.maximum(frame.free, 0)
        self._queues: dict[tuple[str, str], list[Job]] = {}
        for job in waiting:
            self._queues.setdefault((job.partition, job.gpu_type), []).append(job)
        #: (end, job id, GPUs by node index) of jobs that hold GPUs.
        self._ends: list[tuple[float, int, dict[int, int]]] = []
        for job in frame.snapshot.jobs:
            if job.state in HOLDING and job.allocation is not None:
                left_s = self._left_s(job, progress.get(job.job_id))
                if left_s is not None:
                    shares = frame.shares(job.allocation.shares)
                    self._ends.append((self._now + left_s, job.job_id, shares))
        heapq.heapify(self._ends)

    def starts(self) -> dict[int, float]:
        """Return when each pending job starts, as far as that is known."""
        starts: dict[int, float] = {}
        at = self._now
        self._start_all(at, starts)
        while self._ends and any(self._queues.values()):
            at, _, shares = heapq.heappop(self._ends)
            for i, gpus in shares.items():
                self._free[i] += gpus
            self._start_all(at, starts)
        return starts

    def _start_all(self, at: float, starts: dict[int, float]) -> None:
        """Start the first jobs of each queue as far as they fit."""
        for queue in self._queues.values():
            while queue and (shares := self._fit(queue[0])) is not None:
                job = queue.pop(0)
                starts[job.job_id] = at
                for i, gpus in shares.items():
                    self._free[i] -= gpus
                seconds = self._length_s(job)
                if seconds is not None:
                    heapq.heappush(self._ends, (at + seconds, job.job_id, shares))

    def _fit(self, job: Job) -> dict[int, int] | None:
        """Return nodes with even shares for a pending job; None: they are not free."""
        frame = self._frame
        usable = frame.allowed(job, planned=True, asleep=True) & frame.of_type(job.gpu_type)
        free = np.where(usable, self._free, 0)
        most = int(frame.gpus.max(initial=0))
        for nodes, share in even_splits(_wanted(job), most):
            if nodes < job.min_nodes:
                continue
            candidates = np.flatnonzero(free >= share)
            if len(candidates) >= nodes:
                order = np.argsort(free[candidates], kind="stable")
                return {int(i): share for i in candidates[order[:nodes]]}
        return None

    def _left_s(self, job: Job, progress: float | None) -> float | None:
        """Return the seconds that a running job goes on; None: that is not known."""
        if job.state is not JobState.RUNNING:
            return 0.0
        age_s = max(0.0, self._now - (job.start_time or self._now))
        limit_s = None if job.time_limit_s is None else max(0.0, job.time_limit_s - age_s)
        level = self._rng.random()
        left_s: float | None = None
        if progress and age_s > 0:
            # As fast as until now, within a fifth.
            left_s = age_s * (1 - progress) / progress * (0.8 + 0.4 * level)
        elif job.job_id in self._lengths:
            total_s = self._lengths[job.job_id].given(age_s).quantile(level)
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
