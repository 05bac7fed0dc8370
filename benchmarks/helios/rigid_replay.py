"""Replay of jobs of fixed sizes in one partition: queue order, backfill, consolidating placement.

Event-driven; nodes have equal numbers of GPUs. A job within a node takes the fullest node with
room; a larger one whole free nodes, and its remainder the fullest other node.
"""

from __future__ import annotations

import heapq
import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slurm_elastic.core.prediction.duration_estimate import DurationEstimate

#: Pending jobs that backfill looks at, as Slurm's bf_max_job_test.
_TESTED = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """A job; `estimate_s` is a run time that somebody estimated."""

    submitted: float
    seconds: float
    gpus: int
    estimate_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOrder:
    """Order of a queue.

    Attributes:
        key: rank of a job that does not change while it waits, the least first; ties go by GPUs and
            submission.
        bound: run time that backfill counts with, given the job and how long it has run; None: the
            first job without room stops the queue.
        ended: called with each job that ends and with its end.
    """

    key: Callable[[ReplayedJob], float]
    bound: Callable[[ReplayedJob, float], float] | None = None
    ended: Callable[[ReplayedJob, float], None] = lambda _job, _at: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How long a job waited, and took in all."""

    gpus: int
    waited_s: float
    completion_s: float


@dataclass
class RigidReplay:
    """State of one replay: free GPUs of each node, pending and running jobs."""

    jobs: Sequence[ReplayedJob]
    per_node: int
    free: list[int]
    order: ReplayOrder
    outcomes: list[Outcome] = field(default_factory=list)
    _pending: list[tuple[float, int, float, int]] = field(default_factory=list)
    _running: dict[int, tuple[float, list[tuple[int, int]]]] = field(default_factory=dict)
    _ends: list[tuple[float, int]] = field(default_factory=list)
    _now: float = 0.0

    def run(self) -> list[Outcome]:
        """Replay all jobs, which are in order of submission."""
        arrived = 0
        while arrived < len(self.jobs) or self._pending:
            arrival = self.jobs[arrived].submitted if arrived < len(self.jobs) else math.inf
            self._now = min(arrival, self._ends[0][0] if self._ends else math.inf)
            while self._ends and self._ends[0][0] <= self._now:
                self._end(heapq.heappop(self._ends)[1])
            while arrived < len(self.jobs) and self.jobs[arrived].submitted <= self._now:
                job = self.jobs[arrived]
                insort(self._pending, (self.order.key(job), job.gpus, job.submitted, arrived))
                arrived += 1
            while self._pending and self._start(self._pending[0][-1]):
                del self._pending[0]
            if self.order.bound is not None and len(self._pending) > 1:
                self._backfill(self.order.bound)
        return self.outcomes

    def _end(self, number: int) -> None:
        for node, gpus in self._running.pop(number)[1]:
            self.free[node] += gpus
        self.order.ended(self.jobs[number], self._now)

    def _start(self, number: int) -> bool:
        job = self.jobs[number]
        place = _place(self.free, job.gpus, self.per_node)
        if place is None:
            return False
        for node, gpus in place:
            self.free[node] -= gpus
        self._running[number] = (self._now, place)
        heapq.heappush(self._ends, (self._now + job.seconds, number))
        waited_s = self._now - job.submitted
        self.outcomes.append(Outcome(job.gpus, waited_s, waited_s + job.seconds))
        return True

    def _backfill(self, bound: Callable[[ReplayedJob, float], float]) -> None:
        """Start jobs that do not delay the first one, by numbers of GPUs (EASY)."""
        free = sum(self.free)
        if not free:
            return
        needed = self.jobs[self._pending[0][-1]].gpus
        ends = sorted(
            (begin + bound(self.jobs[i], self._now - begin), self.jobs[i].gpus)
            for i, (begin, _) in self._running.items()
        )
        begins, available = self._now if free >= needed else math.inf, free
        for end, gpus in ends:
            if available >= needed:
                break
            available += gpus
            begins = end
        spare = max(0, available - needed)
        at = 1
        for _ in range(min(_TESTED, len(self._pending) - 1)):
            number = self._pending[at][-1]
            job = self.jobs[number]
            is_over = self._now + bound(job, 0.0) <= begins
            if (is_over or job.gpus <= spare) and self._start(number):
                spare -= 0 if is_over else job.gpus
                del self._pending[at]
                if not any(self.free):
                    return
            else:
                at += 1


def quantile_bound(
    estimates: Callable[[ReplayedJob], DurationEstimate], level: float
) -> Callable[[ReplayedJob, float], float]:
    """Return a `bound` from distributions: their quantile, given the age."""
    return lambda job, age_s: estimates(job).given(age_s).quantile(level)


def point_bound(job: ReplayedJob, age_s: float) -> float:
    """Return the `bound` of a stated run time: as long again, once a job has run for longer."""
    return job.estimate_s if job.estimate_s > age_s else max(1.0, 2 * age_s)


def _place(free: Sequence[int], gpus: int, per_node: int) -> list[tuple[int, int]] | None:
    """Return (node, GPUs) pairs; None: there is no room."""
    whole, rest = divmod(gpus, per_node) if gpus > per_node else (0, gpus)
    place = [(node, per_node) for node, left in enumerate(free) if left == per_node][:whole]
    if len(place) < whole:
        return None
    if rest:
        taken = {node for node, _ in place}
        fitting = [(n, i) for i, n in enumerate(free) if n >= rest and i not in taken]
        if not fitting:
            return None
        place.append((min(fitting)[1], rest))
    return place
