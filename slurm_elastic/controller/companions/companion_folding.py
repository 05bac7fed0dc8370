"""Jobs joined with their companions, for decisions: one job with all GPUs. Pure.

A companion counts as a part of its base while both run, with the same owner, and the controller
has placed it itself: a comment alone is no proof (docs/adr/0018-in-place-changes.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from slurm_elastic.core.cluster import Allocation, Companion, Job, JobState


class FoldedJobs(NamedTuple):
    """Result of `fold`.

    Attributes:
        jobs: by id, each running job with its companions, these no longer beside it.
        companions: all jobs whose comment marks them as companions, by id, as Slurm shows them.
    """

    jobs: dict[int, Job]
    companions: dict[int, Job]


def fold(
    jobs: Mapping[int, Job],
    *,
    placed: Callable[[Job], Collection[int]],
    awaited: Callable[[Job], bool] = lambda _: False,
) -> FoldedJobs:
    """Return jobs with the GPUs of their companions.

    Args:
        jobs: as Slurm shows them, by id.
        placed: returns the ids that the controller has placed for a base in its present attempt.
        awaited: returns whether a companion is that of a change under way: while it waits it is not
            shown to decisions, as the change has its GPUs already.
    """
    companions = {i: j for i, j in jobs.items() if j.companion is not None and not j.elastic}
    if not companions:
        return FoldedJobs(dict(jobs), {})
    folded = dict(jobs)
    parts: dict[int, list[Job]] = {}
    for job_id, job in companions.items():
        base = base_of(job, jobs)
        if base is not None and job.state is JobState.RUNNING and _fits(job, base):
            if job_id in placed(base):
                parts.setdefault(base.job_id, []).append(job)
                del folded[job_id]
        elif job.state is JobState.PENDING and awaited(job):
            del folded[job_id]
    for base_id, held in parts.items():
        folded[base_id] = _with_companions(jobs[base_id], held)
    return FoldedJobs(folded, companions)


def base_of(companion: Job, jobs: Mapping[int, Job]) -> Job | None:
    """Return the running job to which a companion belongs; None: that attempt is over.

    Also where the job may not be changed now, as its owner has held it.
    """
    mark = companion.companion
    base = jobs.get(mark.base) if mark is not None else None
    if (
        base is None
        or mark is None
        or base.submission is None
        or base.state is not JobState.RUNNING
        or (base.run, base.uid) != (mark.run, companion.uid)
    ):
        return None
    return base


def _fits(job: Job, base: Job) -> bool:
    """Return whether the GPUs of a companion can be added to those of its base."""
    held, own = job.allocation, base.allocation
    if held is None or own is None:
        return False
    return held.gpu_type == own.gpu_type and len(held.shares) == 1


def _with_companions(base: Job, parts: list[Job]) -> Job:
    """Return a job with the GPUs of its companions."""
    parts.sort(key=lambda job: job.job_id)
    assert base.allocation is not None
    shares = dict(base.allocation.shares)
    devices = dict(base.devices)
    companions = []
    for part in parts:
        held = part.allocation
        assert held is not None
        companions.append(Companion(part.job_id, held, part.start_time or 0.0))
        ((node, gpus),) = held.shares
        shares[node] = shares.get(node, 0) + gpus
        for on_node, indexes in part.devices:
            present = devices.get(on_node)
            devices[on_node] = f"{present},{indexes}" if present else indexes
    allocation = Allocation.of(base.allocation.gpu_type, shares)
    return dataclasses.replace(
        base,
        allocation=allocation,
        companions=tuple(companions),
        gpus=allocation.gpus,
        cpus=base.cpus + sum(part.cpus for part in parts),
        devices=tuple(devices.items()),
    )
