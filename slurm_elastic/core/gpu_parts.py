"""GPUs of which jobs hold parts (shards): the jobs on each, the GPUs in use, possible halves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_elastic.core.cluster import Job

#: A GPU: its node and its index there.
GpuName = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class HalfOptions:
    """Jobs of one round that may share GPUs.

    Attributes:
        hosts: type of the GPU that a running job has alone, by id of the job.
        guests: types of which a waiting job may have half a GPU, by id of the job.
        joinable: ids of jobs on half of a GPU whose other half is free, by type. The policy is not
            asked about these jobs.
        speeds: speed of a job beside another one, by (type, job, other); only of allowed pairs, of
            which at least one job waits.
    """

    hosts: Mapping[int, str] = field(default_factory=dict)
    guests: Mapping[int, frozenset[str]] = field(default_factory=dict)
    joinable: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    speeds: Mapping[tuple[str, int, int], float] = field(default_factory=dict)

    def speed(self, gpu_type: str, job_id: int, others: Iterable[int]) -> float:
        """Return the mean speed of a job beside those others that it may meet; 0: none."""
        known = [self.speeds.get((gpu_type, job_id, other)) for other in others]
        possible = [speed for speed in known if speed is not None]
        return sum(possible) / len(possible) if possible else 0.0


def jobs_by_gpu(jobs: Iterable[Job]) -> dict[GpuName, tuple[Job, ...]]:
    """Return the jobs that hold parts of each GPU whose index is known."""
    holders: dict[GpuName, tuple[Job, ...]] = {}
    for job in jobs:
        for gpu in job.parts:
            if gpu[1] >= 0:
                holders[gpu] = (*holders.get(gpu, ()), job)
    return holders


def partners(jobs: Iterable[Job]) -> dict[int, tuple[Job, ...]]:
    """Return the other jobs on the GPU of each job that holds half of one, by the id of the job."""
    holders = jobs_by_gpu(jobs)
    return {
        job.job_id: tuple(other for other in present if other.job_id != job.job_id)
        for present in holders.values()
        for job in present
        if job.allocation is not None and job.allocation.half
    }


def held_gpus(jobs: Iterable[Job]) -> Counter[str]:
    """Return the number of GPUs in use on each node; a GPU in parts counts once."""
    held, divided = Counter[str](), set[GpuName]()
    for job in jobs:
        divided.update(job.parts)
        if job.allocation is not None and not job.allocation.half:
            held.update(dict(job.allocation.shares))
    held.update(node for node, _ in divided)
    return held


def vacated_gpus(job: Job | None, jobs: Iterable[Job]) -> Mapping[str, int]:
    """Return the number of GPUs on each node that a job has alone, and would leave free."""
    if job is None or job.allocation is None:
        return {}
    if not job.allocation.half:
        return dict(job.allocation.shares)
    others = {gpu for other in jobs if other.job_id != job.job_id for gpu in other.parts}
    return Counter(node for gpu in job.parts if gpu not in others for node in [gpu[0]])


def has_free_half(node: str, jobs: Iterable[Job], job_id: int) -> bool:
    """Return whether another job holds half of a GPU of a node, and none the other half.

    Args:
        node: name of the node.
        jobs: all jobs.
        job_id: the job that would take the other half.
    """
    others = (other for other in jobs if other.job_id != job_id)
    return any(
        gpu[0] == node and len(present) == 1 and present[0].allocation is not None
        for gpu, present in jobs_by_gpu(others).items()
        if all(one.allocation is not None and one.allocation.half for one in present)
    )
