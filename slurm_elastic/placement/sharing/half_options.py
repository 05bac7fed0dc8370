"""Halves of GPUs that a policy may count on: which jobs may share one, and how fast. Pure.

Most policies divide whole GPUs only; pairs are made at the end of a round (gpu_sharing.py). A
policy that weighs halves against whole GPUs (`Capabilities.weighs_halves`) gets these options with
its question. gpu_sharing.py carries out what it decides: the first job of a pair has a GPU, or
starts on one; the second one waits, and joins it in a later round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.gpu_parts import HalfOptions
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.sharing.gpu_sharing import pays_for_half
from slurm_elastic.placement.sharing.shareable_gpus import (
    OpenGpus,
    SharedNodeRoom,
    is_divisible,
    may_share,
)

#: Most jobs with `share=yes` that a round compares.
_MOST_JOBS = 128


def half_options(
    round_jobs: Mapping[int, RoundJob],
    asked: Iterable[int],
    table: GpuPairTable | None,
    free: FreeResources,
) -> HalfOptions | None:
    """Return the halves of GPUs that jobs of a question may have; None: there are none.

    Args:
        round_jobs: all elastic jobs.
        asked: ids of the jobs of the question.
        table: speeds of two jobs on one GPU; None: nothing is shared.
        free: what is free both now and later.
    """
    if table is None or not table.pairs_jobs:
        return None
    sharing = [t for t in round_jobs.values() if t.directive.share == "yes" and t.partner is None]
    if len(sharing) < 2:
        return None
    frame, asked_ids = free.frame, frozenset(asked)
    nodes: dict[str, str] = {}
    for node in frame.snapshot.nodes:
        if is_divisible(node):
            nodes.setdefault(node.gpu_type, node.name)
    open_gpus = OpenGpus(frame, round_jobs)
    hosts: dict[int, str] = {}
    guests: dict[int, frozenset[str]] = {}
    joinable: dict[str, tuple[int, ...]] = {}
    for round_job in sharing[:_MOST_JOBS]:
        job_id, held = round_job.job.job_id, round_job.job.allocation
        if held is None:
            types = frozenset(t for t in nodes if may_share(round_job, t))
            if types and job_id in asked_ids and round_job.record.stopped is None:
                guests[job_id] = types
        elif not _may_be_joined(round_job, frame, open_gpus):
            continue
        elif job_id in asked_ids:
            hosts[job_id] = held.gpu_type
        elif held.half and round_job.eligibility is not Eligibility.MOVING:
            joinable[held.gpu_type] = (*joinable.get(held.gpu_type, ()), job_id)
    options = HalfOptions(hosts=hosts, guests=guests, joinable=joinable)
    speeds = _speeds(options, round_jobs, table, nodes, free=free)
    if not speeds:
        return None
    return dataclasses.replace(options, speeds=speeds)


def _may_be_joined(round_job: RoundJob, frame: NodeArrays, open_gpus: OpenGpus) -> bool:
    """Return whether a running job has one GPU alone, of which another one may get half."""
    job, held = round_job.job, round_job.job.allocation
    if job.state is not JobState.RUNNING or held is None or held.gpus != 1 or job.companions:
        return False
    node = frame.snapshot.node.get(held.nodes[0])
    if node is None or not is_divisible(node) or not may_share(round_job, held.gpu_type):
        return False
    return pays_for_half(round_job) and open_gpus.no_other_part(job, node.name)


def _speeds(
    options: HalfOptions,
    round_jobs: Mapping[int, RoundJob],
    table: GpuPairTable,
    nodes: Mapping[str, str],
    *,
    free: FreeResources,
) -> dict[tuple[str, int, int], float]:
    """Return the speeds of all allowed pairs of a waiting job with another one."""
    speeds: dict[tuple[str, int, int], float] = {}
    room = SharedNodeRoom(free)
    for gpu_type, node in nodes.items():
        waiting = [job for job, types in options.guests.items() if gpu_type in types]
        running = [job for job, held in options.hosts.items() if held == gpu_type]
        running += options.joinable.get(gpu_type, ())
        pairs = [(a, b) for at, a in enumerate(waiting) for b in waiting[at + 1 :]]
        for guest in waiting:
            pairs += [
                (guest, host) for host in running if room.fits(round_jobs[host], round_jobs[guest])
            ]
        for first, second in pairs:
            own, other = table.speed(node, first, second), table.speed(node, second, first)
            if min(own, other) >= table.gate and table.has_memory(node, first, second):
                speeds[gpu_type, first, second] = own
                speeds[gpu_type, second, first] = other
    return speeds
