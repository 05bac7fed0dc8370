"""Pending jobs that would start in the place of a job that is requeued. Pure.

A requeued job gives up its GPUs, which a reservation keeps for it, and its part of limits, which
nothing keeps: running tasks of an array (`--array=0-9%2`), jobs and resources of a QOS, account or
user, licenses. A pending job that waits only for such a limit, a *rival*, starts in that
moment, and the requeued job waits until the rival ends. So a job that has a rival is requeued only
to give way to others. Our definition, by Slurm's reasons of pending jobs, the free GPUs and the
known limits: a pending job for which no GPUs are free is no rival.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.core.cluster import Job, JobState, Snapshot

_ARRAY = "JobArrayTaskLimit"
_LICENSES = "Licenses"
#: Limits of a QOS on the sum over the jobs of each user, or of each account.
_PER_OWNER = re.compile(r"(?:QOS)?Max\w*Per(User|Account)(?:Limit)?")
#: Limits on what has been used up: a requeue frees nothing of them.
_USED_UP = re.compile(r"\w*(?:(?<!Run)Minutes|Wall)\w*")
#: Properties (QOS, account, user, array) that all jobs under one limit have in common.
_Group = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LimitRival:
    """Pending job that waits only for a limit.

    Attributes:
        job: the pending job, for which enough GPUs are free.
        gpus_left: GPUs that its limits leave it now, as far as they are known.
    """

    job: Job
    gpus_left: float


def limit_rivals(snapshot: Snapshot) -> Mapping[_Group, LimitRival]:
    """Return the pending jobs that wait only for a limit, the smallest one of each group."""
    rivals: dict[_Group, LimitRival] = {}
    free = _free_gpus(snapshot)
    for job in snapshot.jobs:
        if job.state is not JobState.PENDING or job.companion is not None:
            continue  # a companion waits in a change of its own base
        group = _group_of_reason(job)
        if group is None or job.gpus > free.get(job.gpu_type, 0):
            continue
        if group not in rivals or job.gpus < rivals[group].job.gpus:
            rivals[group] = LimitRival(job, _gpus_left(job, snapshot))
    return rivals


def rival_reason(job: Job, rivals: Mapping[_Group, LimitRival]) -> str:
    """Return the limit that a rival of a job waits for, as Slurm names it; "": it has none.

    Args:
        job: running.
        rivals: from `limit_rivals`.
    """
    if not rivals:
        return ""
    groups: list[_Group] = [
        ("array", _array(job)),
        ("qos", job.qos),
        ("qos", job.qos, "User", job.user),
        ("qos", job.qos, "Account", job.account),
        ("account", job.account),
        ("user", job.account, job.user),
    ]
    if job.submission is not None and job.submission.shape.get("licenses"):
        groups.append((_LICENSES,))
    for rival in (rivals[group] for group in groups if group in rivals):
        if rival.job.gpus <= rival.gpus_left + job.gpus:
            return rival.job.reason
    return ""


def _free_gpus(snapshot: Snapshot) -> Mapping[str, int]:
    """Return the free GPUs by type, and of all types as ""."""
    free: dict[str, int] = {"": 0}
    for node in snapshot.nodes:
        free[node.gpu_type] = free.get(node.gpu_type, 0) + node.free_gpus
        if node.gpu_type:
            free[""] += node.free_gpus
    return free


def _gpus_left(job: Job, snapshot: Snapshot) -> float:
    left = math.inf
    for limit in snapshot.limits:
        if limit.resource == "gpu" and not limit.scope and job.job_id in limit.jobs:
            held = (snapshot.job[i].allocation for i in limit.jobs if i in snapshot.job)
            left = min(left, limit.cap - sum(a.gpus for a in held if a))
    return left


def _group_of_reason(job: Job) -> _Group | None:
    """Return the group whose limit a pending job waits for; None: it waits for something else."""
    reason = job.reason
    if reason == _ARRAY:
        return ("array", _array(job))
    if reason == _LICENSES:
        return (_LICENSES,)
    if _USED_UP.fullmatch(reason):
        return None
    if match := _PER_OWNER.fullmatch(reason):
        owner = job.user if match[1] == "User" else job.account
        return ("qos", job.qos, match[1], owner)
    if reason.startswith("QOSGrp"):
        return ("qos", job.qos)
    if reason.startswith("AssocGrp"):
        return ("account", job.account)
    return ("user", job.account, job.user) if reason == "AssocMaxJobsLimit" else None


def _array(job: Job) -> str:
    """Return the number of a task's array."""
    array, task, _ = job.display_id.partition("_")
    return array if task else ""
