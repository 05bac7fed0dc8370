"""Simulation of gangs by offers: leases, batches of iterations, offers of free GPUs.

After the simulator of Dally (arXiv 2401.16492); with Dally's policies the results are equal job by
job (docs/dally-published.md). Work proceeds in batches of 1,000 iterations on each GPU of a gang;
one takes `iteration_s * 1000 / s` seconds, s by the place (models/communication.py). A gang returns
its GPUs at the end of the batch in which its lease ends, or before a batch that would outlast the
lease; then it waits again. An offer is made when a gang arrives while GPUs are free, and when GPUs
were returned.

Times and work are summed batch by batch, as in Dally's simulator: ties depend on the last bit.
"""

from __future__ import annotations

import bisect
import heapq
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from slurm_elastic.models.communication import Communication, CommunicationError
from slurm_elastic.placement.delay.free_map import FreeMap, GangTier, NodeLayout, Place
from slurm_elastic.policies.dally.gang import Gang
from slurm_elastic.simulator.gangs.gang_files import GangWorkload, SubmittedGang
from slurm_elastic.simulator.gangs.gang_policy import GangPolicy, Grant, Held, Offer
from slurm_elastic.simulator.gangs.gang_results import GangJobResult, GangResult
from slurm_elastic.simulator.workloads.workload import WorkloadError

#: Iterations per GPU between two moments at which a gang can stop.
BATCH = 1000
#: Seconds per GPU of a gang for saving and loading.
CHECKPOINT_S = 1.0
#: Seconds after which free GPUs are offered again without another event.
_AGAIN_S = 60.0
#: Offers in a row without effect, while no gang runs, until an error.
_MOST_IDLE = 100_000
_ARRIVAL, _END, _OFFER = 0, 2, 3
_TELL_EVERY = 200

Progress = Callable[[int, int, float], None]


class _Run(Gang):
    """A gang and its progress."""

    __slots__ = (
        "batches", "compute_s", "finish_s", "iteration_s", "iterations", "left", "lost", "queue_s",
        "restart_s", "start_s", "tier_grants", "tier_s",
    )  # fmt: skip

    def __init__(self, row: SubmittedGang) -> None:
        super().__init__(
            job_id=row.job_id,
            model=row.model,
            gpus=row.gpus,
            arrival_s=row.arrival_s,
            since_s=row.arrival_s,
            ideal_s=1.0 * row.iteration_s * row.iterations / row.gpus,
        )
        self.iteration_s = row.iteration_s
        self.iterations = row.iterations
        self.left = row.iterations
        self.batches = math.ceil(row.iterations / (BATCH * row.gpus))
        self.compute_s = 0.0
        self.restart_s = 0.0
        self.queue_s = 0.0
        self.lost = 0
        self.start_s = math.nan
        self.finish_s = math.nan
        self.tier_grants = [0] * len(GangTier)
        self.tier_s = [0.0] * len(GangTier)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lease:
    """Outcome of one lease.

    Attributes:
        end_s: when the GPUs are returned.
        ran_s, served_gpu_s: running time and service of the gang by then.
        batches: batches of iterations done in it.
        late: whether the lease or the gang's work was over.
    """

    end_s: float
    ran_s: float
    served_gpu_s: float
    batches: int
    late: bool


def simulate_gangs(
    workload: GangWorkload,
    sites: NodeLayout,
    communication: Communication,
    policy: GangPolicy,
    *,
    name: str,
    lease_s: float = 3600.0,
    progress: Progress | None = None,
) -> GangResult:
    """Run a workload to its end.

    Args:
        workload: gangs and their arrivals.
        sites: cluster.
        communication: cost of distance.
        policy: policy under which it runs.
        name: name of the policy in the result.
        lease_s: seconds of a lease.
        progress: called every few offers with (jobs complete, jobs in all, simulated seconds).

    Raises:
        WorkloadError: a gang is larger than the cluster, or never gets its GPUs.
        CommunicationError: the slowdown of a gang's model at its place is unknown.
    """
    began = time.process_time()
    for row in workload.gangs:
        if row.gpus > sites.gpus:
            raise WorkloadError(
                f"{row.source}: job {row.job_id} requests {row.gpus} GPUs, the cluster has"
                f" {sites.gpus}; use a larger --cluster"
            )
        if row.gpus > 1:
            try:
                communication.part(
                    row.model, row.gpus, sites.span(FreeMap(sites).anywhere(row.gpus))
                )
            except CommunicationError as error:
                raise CommunicationError(f"{row.source}: {error}") from None
    simulation = _GangSimulation(workload, sites, communication, policy, lease_s)
    simulation.run(progress)
    return GangResult(
        workload=workload.name,
        policy=name,
        gpus=sites.gpus,
        jobs=tuple(_result(job) for job in simulation.jobs),
        offers=simulation.offers,
        decide_s=simulation.decide_s,
        cpu_s=time.process_time() - began,
    )


class _GangSimulation:
    """State of one simulation."""

    def __init__(
        self,
        workload: GangWorkload,
        sites: NodeLayout,
        communication: Communication,
        policy: GangPolicy,
        lease_s: float,
    ) -> None:
        self.jobs = [_Run(row) for row in workload.gangs]
        self.room = FreeMap(sites)
        self.offers = 0
        self.decide_s = 0.0
        self._communication = communication
        self._policy = policy
        self._lease_s = lease_s
        self._by_id = {job.job_id: job for job in self.jobs}
        self._waiting: list[tuple[tuple[float, ...], _Run]] = []
        self._running: dict[int, Held] = {}
        self._state: Mapping[str, Any] = {}
        self._events: list[tuple[float, int, int, Callable[[float], None]]] = []
        self._count = 0
        self._wake_s = math.inf
        self._idle = 0
        self._done = 0

    def run(self, progress: Progress | None) -> None:
        """Process events until no gang is left."""
        for job in self.jobs:
            self._schedule(job.arrival_s, _ARRIVAL, self._arrival(job))
        while self._events:
            now, _, _, event = heapq.heappop(self._events)
            event(now)
            if not self._events and self._waiting:
                self._schedule(now + _AGAIN_S, _OFFER, self._offer)
                self._check_progress()
            if progress is not None and self.offers % _TELL_EVERY == 0:
                progress(self._done, len(self.jobs), now)

    def _schedule(self, at_s: float, kind: int, event: Callable[[float], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (at_s, kind, self._count, event))

    def _arrival(self, job: _Run) -> Callable[[float], None]:
        def arrives(now: float) -> None:
            self._enqueue(job)
            if self.room.free_total:
                self._schedule(now, _OFFER, self._offer)

        return arrives

    def _enqueue(self, job: _Run) -> None:
        bisect.insort(self._waiting, (self._policy.rank(job), job), key=lambda entry: entry[0])

    def _offer(self, now: float) -> None:
        if not self._waiting or not self.room.free_total:
            return
        if now >= self._wake_s:
            self._wake_s = math.inf
        begin = time.perf_counter()
        answer = self._policy.decide(
            Offer(
                now_s=now,
                waiting=[job for _, job in self._waiting],
                room=self.room,
                running=self._running,
            ),
            self._state,
        )
        self.decide_s += time.perf_counter() - begin
        self.offers += 1
        self._state = answer.state
        if answer.grants:
            granted = {grant.job_id for grant in answer.grants}
            self._waiting = [entry for entry in self._waiting if entry[1].job_id not in granted]
            for grant in answer.grants:
                self._start(grant, now)
        if answer.wake_s is not None and now < answer.wake_s < self._wake_s:
            self._wake_s = answer.wake_s
            self._schedule(answer.wake_s, _OFFER, self._offer)

    def _start(self, grant: Grant, now: float) -> None:
        job, place = self._by_id[grant.job_id], grant.place
        assert sum(g for _, g in place) == job.gpus, "a gang never starts in part"
        self.room.take(place)
        waited_s, renewed = now - job.since_s, place == job.last and now == job.since_s
        if math.isnan(job.start_s):
            job.start_s = now
        else:
            job.lost += waited_s > CHECKPOINT_S * job.gpus
        job.queue_s += waited_s
        moved_s = 0.0
        if self._policy.renews and job.last and not renewed:
            moved_s = CHECKPOINT_S * job.gpus
            job.restart_s += moved_s
        job.since_s, job.last = now, place
        part = self._communication.part(job.model, job.gpus, self.room.sites.span(place))
        lease = self._lease(job, now + moved_s, part)
        tier = self.room.sites.tier(place)
        job.tier_grants[tier] += 1
        job.tier_s[tier] += lease.ran_s - job.ran_s
        self._running[job.job_id] = Held(job, place, lease.end_s)
        self._schedule(lease.end_s, _END, self._ends(job, place, lease))

    def _lease(self, job: _Run, now: float, part: float) -> _Lease:
        """Return the outcome of a lease that begins now."""
        batch_s = job.iteration_s / part * BATCH
        # In the author's code the next batch is shorter by the number of GPUs.
        next_s = job.iteration_s * BATCH / part / job.gpus
        most = min(job.batches, int(self._lease_s / batch_s) + 3)
        ends = np.full(most + 1, batch_s)
        ends[0] = now
        np.add.accumulate(ends, out=ends)
        limit = now + self._lease_s
        after_limit = ends[1:] >= limit
        stops = np.flatnonzero(after_limit | (ends[1:] + next_s > limit))
        batches = int(stops[0]) + 1 if len(stops) else most
        return _Lease(
            end_s=float(ends[batches]),
            ran_s=_sum(job.ran_s, batch_s, batches),
            served_gpu_s=_sum(
                job.service_gpu_s, job.gpus * (job.iteration_s / part) * BATCH, batches
            ),
            batches=batches,
            late=bool(after_limit[batches - 1]) or batches == job.batches,
        )

    def _ends(self, job: _Run, place: Place, lease: _Lease) -> Callable[[float], None]:
        def ends(now: float) -> None:
            del self._running[job.job_id]
            self.room.give(place)
            job.service_gpu_s, job.ran_s = lease.served_gpu_s, lease.ran_s
            job.compute_s += lease.batches * job.iteration_s * BATCH
            job.batches -= lease.batches
            job.left = max(0, job.left - lease.batches * BATCH * job.gpus)
            job.done = 1 - job.left / job.iterations
            # The author's code leaves out the cost of GPUs returned before their lease ended.
            costs = lease.late and not (self._policy.renews and job.batches)
            offer_s = now + (CHECKPOINT_S * job.gpus if costs else 0.0)
            self._schedule(offer_s, _OFFER, self._offer)
            if job.batches:
                job.since_s = now
                self._enqueue(job)
            else:
                job.finish_s = now
                self._done += 1

        return ends

    def _check_progress(self) -> None:
        self._idle = 0 if self._running else self._idle + 1
        if self._idle > _MOST_IDLE:
            job = self._waiting[0][1]
            raise WorkloadError(
                f"job {job.job_id} ({job.gpus} GPUs) never accepts a place although the cluster"
                " is idle; try other --timers"
            )


def _sum(start: float, increment: float, count: int) -> float:
    """Return `start` plus `count` times `increment`, added one by one."""
    terms = np.full(count + 1, increment)
    terms[0] = start
    return float(np.add.accumulate(terms)[-1])


def _result(job: _Run) -> GangJobResult:
    return GangJobResult(
        name=str(job.job_id),
        model=job.model,
        gpus=job.gpus,
        arrival_s=job.arrival_s,
        start_s=job.start_s,
        finish_s=job.finish_s,
        run_s=job.ran_s,
        compute_s=job.compute_s,
        restart_s=job.restart_s,
        queue_s=job.queue_s,
        preemptions=job.lost,
        grants=tuple(job.tier_grants),
        tier_s=tuple(job.tier_s),
    )
