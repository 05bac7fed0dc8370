"""Free GPUs, CPUs, memory and limits while a round is decided.

A round keeps two views (`ResourceViews`). `later` is the cluster once all that is decided or under
way has happened; targets are chosen there. `now` is what is free at present: no job starts on, or
grows into, GPUs that Slurm does not yet show as free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from slurm_elastic.core.cluster import Allocation, Job, JobState, Limit
from slurm_elastic.core.plan import FreeCapacity
from slurm_elastic.placement.neighbours.neighbour_table import Tenant
from slurm_elastic.placement.node_arrays import Ints, NodeArrays

#: States in which a job holds resources in Slurm.
HOLDING = frozenset({JobState.RUNNING, JobState.COMPLETING, JobState.SUSPENDED})


@dataclass(frozen=True, slots=True)
class ResourceNeed:
    """CPUs and memory (MB) of a job for each of its GPUs."""

    job_id: int
    cpus_per_gpu: float = 0.0
    memory_per_gpu_mb: float = 0.0

    @classmethod
    def of(cls, job: Job) -> ResourceNeed:
        """Return the needs of a job; a pending rigid one asks for at least its CPUs."""
        cpus = job.cpus_per_gpu
        if job.submission is None and job.gpus:
            cpus = max(cpus, job.cpus / job.gpus)
        return cls(job.job_id, cpus, job.memory_per_gpu_mb)

    def cpus(self, gpus: int) -> int:
        """Return the CPUs for this many GPUs on one node."""
        return math.ceil(self.cpus_per_gpu * gpus - 1e-6)

    def memory(self, gpus: int) -> int:
        """Return the MB for this many GPUs on one node."""
        return math.ceil(self.memory_per_gpu_mb * gpus - 1e-6)


class FreeResources:
    """Free resources by node index, and the rest under each limit. Mutable; `copy` is cheap.

    Attributes:
        gpus, cpus, memory: free; negative where more is promised than is there.
        tenants: (job id, GPUs) of each job on a node, by node index; {} where neighbours do not
            count.
    """

    def __init__(self, frame: NodeArrays) -> None:
        nodes = frame.snapshot.nodes
        self.frame = frame
        self.gpus: Ints = frame.free.copy()
        self.cpus: Ints = frame.cpus - np.array([n.used_cpus for n in nodes], dtype=np.int64)
        self.memory: Ints = frame.memory - np.array(
            [n.used_memory_mb for n in nodes], dtype=np.int64
        )
        self.limits: tuple[Limit, ...] = frame.snapshot.limits
        self._limits_of: dict[int, list[int]] = {}
        for i, limit in enumerate(self.limits):
            for job_id in limit.jobs:
                self._limits_of.setdefault(job_id, []).append(i)
        self.left: list[float] = [float(limit.cap) for limit in self.limits]
        for job_id in self._limits_of:
            job = frame.snapshot.job.get(job_id)
            if job is not None and job.state in HOLDING:
                self._charge(ResourceNeed.of(job), _holding(job), 1)
        self.tenants: dict[int, frozenset[Tenant]] = {}
        for job in frame.snapshot.jobs if frame.neighbours else ():
            if job.state in HOLDING:
                self._settle(job.job_id, _holding(job), 1)

    @classmethod
    def of(cls, frame: NodeArrays, capacity: FreeCapacity) -> FreeResources:
        """Return resources with this capacity free on the nodes of the frame."""
        resources = cls(frame)
        resources.gpus = np.array(capacity.gpus, dtype=np.int64)
        resources.cpus = np.array(capacity.cpus, dtype=np.int64)
        resources.memory = np.array(capacity.memory_mb, dtype=np.int64)
        resources.left = list(capacity.limits)
        return resources

    def capacity(self) -> FreeCapacity:
        """Return the free resources as an immutable value."""
        return FreeCapacity(
            gpus=tuple(self.gpus.tolist()),
            cpus=tuple(self.cpus.tolist()),
            memory_mb=tuple(self.memory.tolist()),
            limits=tuple(self.left),
        )

    def copy(self) -> FreeResources:
        """Return independent resources with the same contents."""
        duplicate = object.__new__(FreeResources)
        duplicate.__dict__.update(self.__dict__)
        duplicate.gpus, duplicate.cpus, duplicate.memory = (
            self.gpus.copy(),
            self.cpus.copy(),
            self.memory.copy(),
        )
        duplicate.left = list(self.left)
        duplicate.tenants = dict(self.tenants)
        return duplicate

    def meet(self, other: FreeResources) -> FreeResources:
        """Return the resources that are free in both."""
        common = self.copy()
        common.gpus = np.minimum(self.gpus, other.gpus)
        common.cpus = np.minimum(self.cpus, other.cpus)
        common.memory = np.minimum(self.memory, other.memory)
        common.left = [min(a, b) for a, b in zip(self.left, other.left, strict=True)]
        return common

    def take(self, need: ResourceNeed, allocation: Allocation | None) -> None:
        """Allocate to a job, unchecked."""
        self._move(need, allocation, 1)

    def give(self, need: ResourceNeed, allocation: Allocation | None) -> None:
        """Free an allocation of a job."""
        self._move(need, allocation, -1)

    def take_beside(
        self, need: ResourceNeed, current: Allocation | None, target: Allocation | None
    ) -> None:
        """Allocate a target to a job that still holds its present allocation, which is booked."""
        if current is not None and current.half:
            self.take(need, target)
            return
        self.give(need, current)
        self.take(need, union(current, target))

    def room(self, need: ResourceNeed) -> Ints:
        """Return the GPUs that a job could have on each node, CPUs and memory allowing."""
        room = self.gpus
        if need.cpus_per_gpu > 0:
            room = np.minimum(room, _floor(self.cpus, need.cpus_per_gpu))
        if need.memory_per_gpu_mb > 0:
            room = np.minimum(room, _floor(self.memory, need.memory_per_gpu_mb))
        return np.maximum(room, 0)

    def limits_of(self, job_id: int) -> tuple[int, ...]:
        """Return the indices of the limits that count a job."""
        return tuple(self._limits_of.get(job_id, ()))

    def exceeds_limits(self, need: ResourceNeed, allocation: Allocation) -> bool:
        """Return whether this allocation would exceed a limit."""
        for i in self._limits_of.get(need.job_id, ()):
            used = limit_use(self.limits[i], need, allocation)
            if used and used > self.left[i] + 1e-6:
                return True
        return False

    def most_gpus(self, job_id: int, gpu_type: str) -> float:
        """Return the GPUs of a type that the limits leave to a job that holds none now."""
        left = math.inf
        for i in self._limits_of.get(job_id, ()):
            if self.limits[i].resource in ("gpu", f"gpu:{gpu_type}"):
                left = min(left, max(0.0, self.left[i]) + self.limits[i].spared.get(job_id, 0))
        return left

    def _move(self, need: ResourceNeed, allocation: Allocation | None, sign: int) -> None:
        """Book CPUs, memory and GPUs; that of a half stays in use by the job beside it."""
        if allocation is None:
            return
        for name, gpus in allocation.shares:
            i = self.frame.index.get(name)
            if i is not None:
                self.gpus[i] -= 0 if allocation.half else sign * gpus
                self.cpus[i] -= sign * need.cpus(gpus)
                self.memory[i] -= sign * need.memory(gpus)
        self._charge(need, allocation, sign)
        if self.frame.neighbours:
            self._settle(need.job_id, allocation, sign)

    def _settle(self, job_id: int, allocation: Allocation, sign: int) -> None:
        """Let a job stand on the nodes of an allocation, or leave them."""
        for i, gpus in self.frame.shares(allocation.shares).items():
            others = frozenset(t for t in self.tenants.get(i, ()) if t[0] != job_id)
            self.tenants[i] = others | {(job_id, gpus)} if sign > 0 else others

    def hurts(self, job_id: int, i: int, gpus: int) -> bool:
        """Return whether a job with so many GPUs on a node and a neighbour hurt each other."""
        others = self.tenants.get(i)
        if not others or self.frame.neighbours is None:
            return False
        others = frozenset(t for t in others if t[0] != job_id)
        return self.frame.neighbours.hurts(self.frame.names[i], (job_id, gpus), others)

    def _charge(self, need: ResourceNeed, allocation: Allocation, sign: int) -> None:
        for i in self._limits_of.get(need.job_id, ()):
            self.left[i] -= sign * limit_use(self.limits[i], need, allocation)


@dataclass(frozen=True, slots=True)
class ResourceViews:
    """Free resources of a round: `later`, when all changes are done, and `now`."""

    later: FreeResources
    now: FreeResources

    def copy(self) -> ResourceViews:
        """Return independent views with the same contents."""
        return ResourceViews(self.later.copy(), self.now.copy())

    def take(self, need: ResourceNeed, allocation: Allocation | None) -> None:
        """Allocate to a job, on both."""
        self.later.take(need, allocation)
        self.now.take(need, allocation)

    def give(self, need: ResourceNeed, allocation: Allocation | None) -> None:
        """Free an allocation of a job, on both."""
        self.later.give(need, allocation)
        self.now.give(need, allocation)

    def change(
        self, need: ResourceNeed, current: Allocation | None, target: Allocation | None
    ) -> None:
        """Book a change under way: the job holds both allocations now and its target later."""
        self.later.give(need, current)
        self.later.take(need, target)
        self.now.take_beside(need, current, target)


def union(first: Allocation | None, second: Allocation | None) -> Allocation | None:
    """Return the larger share of each node: what a job may hold during a change."""
    if first is None or second is None:
        return first or second
    shares = dict(first.shares)
    for name, gpus in second.shares:
        shares[name] = max(gpus, shares.get(name, 0))
    return Allocation.of(second.gpu_type, shares)


def _holding(job: Job) -> Allocation:
    """Return the allocation of a job that holds resources, empty where it is not known."""
    return job.allocation or Allocation("", ())


def limit_use(limit: Limit, need: ResourceNeed, allocation: Allocation) -> float:
    """Return the use of a limit by an allocation of a job that it counts."""
    resource = limit.resource
    if resource == "gpu":
        return max(0, allocation.gpus - limit.spared.get(need.job_id, 0))
    if resource == "node":
        return len(allocation.shares)
    if resource == "cpu":
        return sum(need.cpus(g) for _, g in allocation.shares)
    if resource == "mem":
        return sum(need.memory(g) for _, g in allocation.shares)
    return allocation.gpus if resource == f"gpu:{allocation.gpu_type}" else 0


def _floor(free: Ints, each: float) -> Ints:
    return np.floor(free / each + 1e-6).astype(np.int64)
