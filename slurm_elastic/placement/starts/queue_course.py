"""Course of events in a queue: jobs end, and pending ones start, in order or as backfill.

Slurm plans with time limits. The first job of each partition and type without room gets the
earliest moment at which jobs leave enough GPUs by their limits. A job behind it starts sooner where
it ends before that moment by its own limit, or leaves enough GPUs (EASY backfill; Lifka, JSSPP
1995), whichever partition reserved these. Jobs really end when the caller says.

Jobs that the controller starts are held back by no such plan: it starts them in Slurm's order as
soon as their MIN fits, as `placement/pending_claims.py` does. Elastic jobs that may give way lend
GPUs above their MIN to a job that does not fit. Only GPUs are counted.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from slurm_elastic.placement.node_arrays import Ints, Mask

#: Pending jobs for which GPUs are reserved at once, each the first of its partition and type.
_MOST_RESERVED = 8


@dataclass(frozen=True, slots=True, eq=False)
class StartOptions:
    """Places in which jobs of one kind start: usable nodes, and (nodes, GPUs on each) there."""

    options: tuple[tuple[Mask, tuple[tuple[int, int], ...]], ...]

    def fit(self, free: Ints) -> dict[int, int] | None:
        """Return even shares by node index, on the nodes with the fewest free GPUs; or None."""
        for usable, splits in self.options:
            for nodes, share in splits:
                candidates = (usable & (free >= share)).nonzero()[0]
                if len(candidates) >= nodes:
                    order = free[candidates].argsort(kind="stable")
                    return dict.fromkeys(candidates[order[:nodes]].tolist(), share)
        return None

    def fits(self, free: Ints) -> bool:
        """Return whether `fit` returns a place."""
        return any(
            np.count_nonzero(usable & (free >= share)) >= nodes
            for usable, splits in self.options
            for nodes, share in splits
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingJob:
    """Pending job that waits only for GPUs and its turn.

    Attributes:
        queue: partition and type; the first without room of each gets a reservation.
        limit_s: time limit; infinity: none.
        seconds: run time in this course; None: that is not known.
        controller_starts: the controller starts it, not Slurm.
        awaited: the caller asks when it starts.
    """

    job_id: int
    queue: tuple[str, str]
    options: StartOptions
    limit_s: float
    seconds: float | None
    controller_starts: bool = False
    awaited: bool = True


@dataclass(slots=True, kw_only=True)
class HeldGpus:
    """GPUs of a job that runs.

    Attributes:
        shares: by node index.
        end: in this course (epoch s); None: that is not known.
        latest: end by its time limit; infinity: none.
        least: GPUs that it keeps when it gives way; None: it does not.
    """

    shares: dict[int, int]
    end: float | None
    latest: float = math.inf
    least: int | None = None

    @property
    def lendable(self) -> int:
        """GPUs that it can give away."""
        return 0 if self.least is None else max(0, sum(self.shares.values()) - self.least)


@dataclass(slots=True)
class _Reserved:
    """Plan for a job without room: its begin, and the GPUs that are free then beside its own.

    `begin` is infinity, which keeps nobody back, where that is not known.
    """

    job_id: int
    begin: float
    shares: dict[int, int]
    spare: Ints


class QueueCourse:
    """One course of events.

    Args:
        now: its begin (epoch s).
        free: GPUs by node index.
        held: by the running jobs, by id.
        waiting: in Slurm's order.
        backfill: False: each queue starts in order, as with Slurm's sched/builtin.
    """

    def __init__(
        self,
        now: float,
        free: Ints,
        held: Mapping[int, HeldGpus],
        waiting: Sequence[WaitingJob],
        *,
        backfill: bool = True,
    ) -> None:
        self._now, self._backfill = now, backfill
        self._free: Ints = free.copy()
        self._held = dict(held)
        self._waiting = list(waiting)
        self._ends = [(h.end, job_id) for job_id, h in self._held.items() if h.end is not None]
        heapq.heapify(self._ends)
        #: Ends by time limits, ascending, of jobs that have one.
        self._latest = sorted((h.latest, i) for i, h in self._held.items() if h.latest < math.inf)
        #: Jobs that can give GPUs away, and how many at most by node index.
        self._givers = {job_id: h for job_id, h in self._held.items() if h.lendable}
        self._lendable: Ints = np.zeros(len(free), dtype=np.int64)
        for giver in self._givers.values():
            self._count_giver(giver, 1)

    def starts(self) -> dict[int, float]:
        """Return when each pending job starts, until all awaited ones have, as far as known."""
        starts: dict[int, float] = {}
        self._start_all(self._now, starts)
        while self._ends and any(job.awaited for job in self._waiting):
            at = self._ends[0][0]
            while self._ends and self._ends[0][0] <= at:
                self._end(heapq.heappop(self._ends)[1])
            self._start_all(at, starts)
        return starts

    def _end(self, job_id: int) -> None:
        held = self._held.pop(job_id)
        for i, gpus in held.shares.items():
            self._free[i] += gpus
        if held.latest < math.inf:
            del self._latest[bisect_left(self._latest, (held.latest, job_id))]
        if giver := self._givers.pop(job_id, None):
            self._count_giver(giver, -1)

    def _count_giver(self, giver: HeldGpus, sign: int) -> None:
        for i, gpus in giver.shares.items():
            self._lendable[i] += sign * min(gpus, giver.lendable)

    def _start_all(self, at: float, starts: dict[int, float]) -> None:
        """Start all pending jobs that Slurm or the controller would start now."""
        # What can be given now is decided by the round itself, which then keeps it for the job.
        gives = at > self._now and bool(self._givers)
        reach = self._free + self._lendable if gives else self._free
        kinds = {job.options for job in self._waiting}
        fitting = {options for options in kinds if options.fits(reach)}
        if not fitting:
            return
        blocked: dict[tuple[str, str], WaitingJob] = {}
        reserved: list[_Reserved] = []
        in_vain: set[tuple[StartOptions, tuple[int, ...]]] = set()
        waiting, self._waiting = self._waiting, []
        for place, job in enumerate(waiting):
            shares = None
            if job.options in fitting and (self._backfill or job.queue not in blocked):
                if not job.controller_starts:
                    self._reserve_for(blocked, reserved, at)
                plans = [] if job.controller_starts else _outlasted(job, at, reserved)
                # A job alike that outlasts the same plans is kept back as well.
                alike = (job.options, tuple(plan.job_id for plan in plans))
                if alike not in in_vain:
                    shares = self._place(job, plans, gives=gives)
                    in_vain |= set() if shares else {alike}
            if shares is None:
                self._waiting.append(job)
                blocked.setdefault(job.queue, job)
                continue
            starts[job.job_id] = at
            self._start(job, at, shares, reserved)
            reach = self._free + self._lendable if gives else self._free
            fitting = {options for options in fitting if options.fits(reach)}
            if not fitting:
                self._waiting += waiting[place + 1 :]
                return

    def _place(
        self, job: WaitingJob, plans: Sequence[_Reserved], *, gives: bool
    ) -> dict[int, int] | None:
        """Return the shares with which a job starts now beside these plans; None: it waits."""
        room = self._free
        for plan in plans:
            room = np.minimum(room, plan.spare)
        shares = job.options.fit(room)
        return self._given_way(job.options) if shares is None and gives else shares

    def _start(
        self, job: WaitingJob, at: float, shares: dict[int, int], reserved: Sequence[_Reserved]
    ) -> None:
        for i, gpus in shares.items():
            self._free[i] -= gpus
        for plan in _outlasted(job, at, reserved):
            for i, gpus in shares.items():
                plan.spare[i] -= gpus
        end = None if job.seconds is None else at + min(job.seconds, job.limit_s)
        self._held[job.job_id] = HeldGpus(shares=shares, end=end, latest=at + job.limit_s)
        if end is not None:
            heapq.heappush(self._ends, (end, job.job_id))
        if job.limit_s < math.inf:
            insort(self._latest, (at + job.limit_s, job.job_id))

    def _reserve_for(
        self,
        blocked: Mapping[tuple[str, str], WaitingJob],
        reserved: list[_Reserved],
        at: float,
    ) -> None:
        """Plan the first job without room of each queue, where that is not done."""
        if not self._backfill:
            return
        planned = {plan.job_id for plan in reserved}
        for job in [*blocked.values()][:_MOST_RESERVED]:
            if job.job_id not in planned:
                reserved.append(self._reserve(job, at, reserved))

    def _reserve(self, job: WaitingJob, at: float, reserved: Sequence[_Reserved]) -> _Reserved:
        """Return the earliest start of a job by the limits of the running ones."""
        later = self._free.tolist()
        for plan in reserved:
            for i, gpus in plan.shares.items():
                later[i] -= gpus
        # For each split the nodes that are still to have enough free GPUs.
        splits = [
            [usable.tolist(), share, nodes - np.count_nonzero(usable & (np.array(later) >= share))]
            for usable, of_nodes in job.options.options
            for nodes, share in of_nodes
        ]
        begin = at if any(missing <= 0 for _, _, missing in splits) else math.inf
        for latest, job_id in self._latest:
            if latest > begin:  # jobs with the same end leave together
                break
            for i, gpus in self._held[job_id].shares.items():
                before, later[i] = later[i], later[i] + gpus
                for split in splits:
                    if before < split[1] <= later[i] and split[0][i]:
                        split[2] -= 1
                        if split[2] <= 0:
                            begin = min(begin, max(at, latest))
        spare = np.array(later)
        shares = (job.options.fit(spare) or {}) if begin < math.inf else {}
        for i, gpus in shares.items():
            spare[i] -= gpus
        return _Reserved(job.job_id, begin, shares, spare)

    def _given_way(self, options: StartOptions) -> dict[int, int] | None:
        """Let elastic jobs give GPUs away so that a job starts; return its shares, or None."""
        reach = self._free + self._lendable
        for usable, splits in options.options:
            for nodes, share in splits:
                candidates = np.flatnonzero(usable & (reach >= share))
                if len(candidates) < nodes:
                    continue
                left = {job_id: giver.lendable for job_id, giver in self._givers.items()}
                lent: list[tuple[int, int, int]] = []
                chosen: list[int] = []
                order = candidates[np.argsort(-self._free[candidates], kind="stable")]
                for i in map(int, order):
                    taken = _lent(i, share - int(self._free[i]), self._givers, left)
                    if taken is not None:
                        chosen.append(i)
                        lent += [(job_id, i, gpus) for job_id, gpus in taken.items()]
                        for job_id, gpus in taken.items():
                            left[job_id] -= gpus
                    if len(chosen) == nodes:
                        for row in lent:
                            self._lend(*row)
                        return dict.fromkeys(chosen, share)
        return None

    def _lend(self, job_id: int, i: int, gpus: int) -> None:
        self._count_giver(self._givers[job_id], -1)
        # The old object belongs to the caller.
        shares = self._held[job_id].shares
        held = replace(self._held[job_id], shares=shares | {i: shares[i] - gpus})
        self._held[job_id] = self._givers[job_id] = held
        self._count_giver(held, 1)
        self._free[i] += gpus


def _outlasted(job: WaitingJob, at: float, reserved: Sequence[_Reserved]) -> list[_Reserved]:
    """Return the reservations that begin before a job ends by its limit."""
    return [plan for plan in reserved if at + job.limit_s > plan.begin]


def _lent(
    i: int, missing: int, givers: Mapping[int, HeldGpus], left: Mapping[int, int]
) -> dict[int, int] | None:
    """Return the GPUs that jobs lend on a node, by job; None: fewer than are missing."""
    taken: dict[int, int] = {}
    for job_id, held in givers.items():
        if missing <= 0:
            break
        gpus = min(missing, held.shares.get(i, 0), left[job_id])
        if gpus > 0:
            taken[job_id] = gpus
            missing -= gpus
    return taken if missing <= 0 else None
