"""Simulated queue of jobs of which each is planned by time limits, as Slurm's sched/backfill does.

At each event every pending job, in Slurm's order, gets the earliest place that no job before it is
planned to have; those whose place is free now start. Where a job does not fit now, elastic jobs
give way as far as their MIN.

It shares no code with what it judges: `slurm_elastic.placement.starts`.
"""

from __future__ import annotations

import bisect
import math
import random
from dataclasses import dataclass

from slurm_elastic.core.cluster import Partition, Snapshot
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from tests.support.decisions.synthetic_clusters import NOW, Cluster, node

_PER_NODE = 4
#: Spread of the logarithm of run times around what is known of a job.
_SIGMA = 0.6
#: How many standard deviations the quantiles of a prediction reach.
_REACH = [(i - 20) / 8 for i in range(41)]


@dataclass(slots=True, kw_only=True)
class QueuedJob:
    """A job of the queue.

    Attributes:
        job_id: in Slurm's order.
        nodes: nodes that it may use, by number.
        gpus: GPUs in all, equal parts on the fewest nodes.
        median_s: what is known of its run time; it really runs for `seconds`.
        elastic: whether the controller may shape it.
        least: GPUs that it keeps where it gives way; `gpus` if it does not.
        begun: its start (epoch s); None: it is pending.
        shares: GPUs that it holds, by node.
    """

    job_id: int
    partition: str
    nodes: range
    gpus: int
    median_s: float
    seconds: float
    limit_s: int
    elastic: bool
    least: int
    begun: float | None = None
    shares: dict[int, int] | None = None


@dataclass(slots=True)
class PlannedQueue:
    """State of one queue at `now` (epoch s)."""

    count: int
    jobs: list[QueuedJob]
    now: float = NOW

    def run(self) -> dict[int, float]:
        """Return the starts of all jobs that are pending now."""
        starts = self.start_all()
        while ends := [self._end(j) for j in self.jobs if j.begun is not None]:
            self.now = min(ends)
            self.jobs = [j for j in self.jobs if j.begun is None or self._end(j) > self.now]
            starts |= self.start_all()
        return starts

    def start_all(self) -> dict[int, float]:
        """Start what can start now; return the starts."""
        starts = {}
        plan = _Plan(self.now, self.free())
        for job in self.jobs:
            if job.begun is not None:
                plan.hold(job.shares or {}, self.now, job.begun + job.limit_s)
        for job in self.jobs:
            if job.begun is not None:
                continue
            begin, shares = plan.earliest(job)
            if begin > self.now and (given := self._given_way(job)) is not None:
                # What was given is the job's own, and is not on the plan of others.
                begin, shares = self.now, given
            elif shares:
                plan.take(shares, begin, begin + job.limit_s)
            if begin == self.now:
                job.begun, job.shares = self.now, shares
                starts[job.job_id] = self.now
        return starts

    def _end(self, job: QueuedJob) -> float:
        assert job.begun is not None
        return job.begun + min(job.seconds, job.limit_s)

    def free(self) -> list[int]:
        """Return the free GPUs of each node."""
        free = [_PER_NODE] * self.count
        for job in self.jobs:
            for i, gpus in (job.shares or {}).items():
                free[i] -= gpus
        return free

    def _given_way(self, job: QueuedJob) -> dict[int, int] | None:
        """Shrink running jobs so that a job fits; return its shares, or None: they keep theirs."""
        saved = {j.job_id: dict(j.shares or {}) for j in self.jobs}
        nodes, share = _split(job)
        chosen: dict[int, int] = {}
        for i in sorted(job.nodes, key=lambda i: -self.free()[i]):
            before = {j.job_id: dict(j.shares or {}) for j in self.jobs}
            missing = share - self.free()[i]
            for giver in self.jobs:
                held = giver.shares or {}
                if missing > 0 and giver.begun is not None and held.get(i):
                    gpus = min(missing, held[i], sum(held.values()) - giver.least)
                    giver.shares = held | {i: held[i] - max(0, gpus)}
                    missing -= max(0, gpus)
            if missing <= 0:
                chosen[i] = share
            else:
                self._restore(before)
            if len(chosen) == nodes:
                return chosen
        self._restore(saved)
        return None

    def _restore(self, shares: dict[int, dict[int, int]]) -> None:
        for job in self.jobs:
            job.shares = shares[job.job_id]

    def snapshot(self) -> Snapshot:
        """Return the cluster as the controller would see it."""
        cluster = Cluster(
            [node(f"n{i}", partitions=_partitions(i, self.count)) for i in range(self.count)],
            partitions=(Partition(name="gpu"), Partition(name="short")),
            time=self.now,
        )
        for job in self.jobs:
            held = {f"n{i}": gpus for i, gpus in (job.shares or {}).items() if gpus}
            cluster.add(
                job.job_id,
                elastic=f"{job.least}-{2 * job.gpus}" if job.elastic else "",
                on=held or None,
                gpus=job.gpus,
                partition=job.partition,
                start_time=job.begun,
                time_limit_s=job.limit_s,
            )
        return cluster.snapshot()

    def lengths(self) -> dict[int, DurationEstimate]:
        """Return the distribution that the run time of each job is drawn from."""
        return {j.job_id: _estimate(j.median_s) for j in self.jobs}

    def givers(self) -> dict[int, int]:
        """Return the GPUs that running jobs keep when they give way, by job."""
        return {j.job_id: j.least for j in self.jobs if j.begun is not None and j.least < j.gpus}


class _Plan:
    """Free GPUs of each node from now on, in steps."""

    def __init__(self, now: float, free: list[int]) -> None:
        self._times, self._free = [now], [list(free)]

    def hold(self, shares: dict[int, int], begin: float, end: float) -> None:
        """Free the GPUs of a running job, which are taken already, at its end."""
        at = self._step(max(begin, end))
        for free in self._free[at:]:
            for i, gpus in shares.items():
                free[i] += gpus

    def take(self, shares: dict[int, int], begin: float, end: float) -> None:
        """Take GPUs for a while."""
        first, last = self._step(begin), self._step(end)
        for free in self._free[first:last]:
            for i, gpus in shares.items():
                free[i] -= gpus

    def earliest(self, job: QueuedJob) -> tuple[float, dict[int, int]]:
        """Return the earliest start of a job, and its shares."""
        nodes, share = _split(job)
        for at, begin in enumerate(self._times):
            last = bisect.bisect_left(self._times, begin + job.limit_s)
            steps = self._free[at : max(last, at + 1)]
            room = {i: min(free[i] for free in steps) for i in job.nodes}
            fitting = sorted((i for i in room if room[i] >= share), key=lambda i: room[i])
            if len(fitting) >= nodes:
                return begin, dict.fromkeys(fitting[:nodes], share)
        return math.inf, {}

    def _step(self, time: float) -> int:
        at = bisect.bisect_left(self._times, time)
        if at == len(self._times) or self._times[at] != time:
            self._times.insert(at, time)
            self._free.insert(at, list(self._free[at - 1]))
        return at


def drawn(rng: random.Random, *, elastic: bool) -> PlannedQueue:
    """Return a full cluster with a queue, of which nothing can start now.

    Nodes of four GPUs in the partition `gpu`; the first third also in `short`. Run times are known
    as their distributions, time limits are 1.2 to 6 times the run time or a day.

    Args:
        rng: source of all that is drawn.
        elastic: whether half of the running jobs are elastic and give way.
    """
    count = rng.randint(4, 12)
    queue = PlannedQueue(count, [])
    for job_id in range(1, count * 3):
        job = _drawn_job(job_id, count, rng)
        free = queue.free()
        nodes, share = _split(job)
        fitting = [i for i in job.nodes if free[i] >= share]
        if len(fitting) >= nodes:
            job.begun = NOW - rng.random() * min(job.seconds, job.limit_s)
            job.shares = dict.fromkeys(rng.sample(fitting, nodes), share)
            job.elastic = elastic and rng.random() < 0.5
            job.least = max(1, job.gpus // 2) if job.elastic else job.gpus
        queue.jobs.append(job)
    queue.start_all()
    return queue


def _drawn_job(job_id: int, count: int, rng: random.Random) -> QueuedJob:
    partition = "short" if rng.random() < 0.25 else "gpu"
    nodes = range(max(2, count // 3)) if partition == "short" else range(count)
    gpus = rng.choice([1, 1, 1, 2, 2, 4, 4, 8])
    median_s = math.exp(rng.uniform(math.log(600), math.log(36_000)))
    seconds = median_s * math.exp(rng.gauss(0, _SIGMA))
    limit_s = 86_400 if rng.random() < 0.2 else seconds * rng.uniform(1.2, 6)
    return QueuedJob(
        job_id=job_id,
        partition=partition,
        nodes=nodes,
        gpus=gpus,
        median_s=median_s,
        seconds=seconds,
        limit_s=300 * math.ceil(min(limit_s, 86_400 * 3) / 300),
        elastic=rng.random() < 0.5,
        least=gpus,
    )


def _split(job: QueuedJob) -> tuple[int, int]:
    """Return the fewest nodes of a job, and its GPUs on each."""
    return max(1, job.gpus // _PER_NODE), min(job.gpus, _PER_NODE)


def _partitions(i: int, count: int) -> frozenset[str]:
    return frozenset({"gpu", "short"} if i < max(2, count // 3) else {"gpu"})


def _estimate(median_s: float) -> DurationEstimate:
    weights = [math.exp(-(z**2) / 2) for z in _REACH]
    return DurationEstimate.of_sample([median_s * math.exp(_SIGMA * z) for z in _REACH], weights)
