"""Limits of the cluster and of the site on the jobs of a round, as rows of the program.

A limit (`core.cluster.Limit`) caps GPUs, nodes, CPUs or memory of some jobs together: those of an
association, a QOS, a partition or a user, or a share of the site. The jobs of the question may take
what all other jobs leave of it. Where jobs hold more than a limit (it was lowered) they keep it,
and none of them starts or grows.

A limit on the GPUs of each node (MaxTRESPerNode) is of one job: it bounds the job's sizes. Over how
many nodes they are spread is left to placement (docs/adr/0022-outside-the-program.md).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Limit
from slurm_elastic.placement.free_resources import HOLDING, ResourceNeed, limit_use
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate
from slurm_elastic.policies.sia.round_arrays import Floats, RoundArrays
from slurm_elastic.policies.sia.sia_configurations import SiaConfigurations


def within_node_limits(question: Question, arrays: RoundArrays) -> RoundArrays:
    """Return the arrays without sizes that limits on the GPUs of each node rule out on all nodes.

    What a job holds it may keep.
    """
    snapshot, columns = question.snapshot, arrays.configurations
    caps: dict[int, int] = {}
    for limit in snapshot.limits:
        if limit.resource == GPUS_OF_A_NODE:
            caps |= {job_id: min(limit.cap, caps.get(job_id, limit.cap)) for job_id in limit.jobs}
    if not caps:
        return arrays
    valid = arrays.valid.copy()
    for row, job in enumerate(arrays.candidates):
        cap = caps.get(job.job.job_id)
        if cap is None:
            continue
        most = dict.fromkeys(columns.types, 0)
        for node in snapshot.nodes:
            most[node.gpu_type] = most.get(node.gpu_type, 0) + min(cap, node.gpus)
        of_type = np.array([most[name] for name in columns.types], dtype=np.int64)
        valid[row] &= columns.gpus <= of_type[columns.kind]
        if arrays.held[row] >= 0:
            valid[row, arrays.held[row]] = True
    return dataclasses.replace(arrays, valid=valid)


def limit_rows(question: Question, arrays: RoundArrays) -> tuple[LimitRow, ...]:
    """Return the limits that the jobs of a question could exceed."""
    snapshot = question.snapshot
    row_of = {job.job.job_id: row for row, job in enumerate(arrays.candidates)}
    rows = []
    for index, limit in enumerate(snapshot.limits):
        members = sorted(row_of[job_id] for job_id in limit.jobs if job_id in row_of)
        if not members:
            continue
        jobs = [arrays.candidates[row] for row in members]
        if question.free is not None:
            left = question.free.limits[index]
        else:
            left = limit.cap - _held_by_all(question, limit)
        own = sum(_held(limit, job) for job in jobs)
        use = _uses(limit, jobs, arrays.configurations) * arrays.valid[members]
        left += own
        if left < own:
            # Slurm would refuse any job that starts or grows; those that hold GPUs may shrink.
            held = np.array([_held(limit, job) for job in jobs])
            use[use <= held[:, None]] = 0.0
            left = 0.0
        row = LimitRow(jobs=np.array(members, dtype=np.int64), use=use, left=left)
        if use.max(axis=1, initial=0.0).sum() > row.left:
            rows.append(row)
    return tuple(rows)


def _held_by_all(question: Question, limit: Limit) -> float:
    jobs = question.snapshot.job
    holding = (jobs[i] for i in limit.jobs if i in jobs and jobs[i].state in HOLDING)
    return sum(limit_use(limit, ResourceNeed.of(j), j.allocation) for j in holding if j.allocation)


def _held(limit: Limit, job: Candidate) -> float:
    return limit_use(limit, ResourceNeed.of(job.job), job.held) if job.held else 0.0


def _uses(limit: Limit, jobs: Sequence[Candidate], columns: SiaConfigurations) -> Floats:
    """Return [M, C] what each job takes of a limit, its GPUs spread evenly over the nodes."""
    gpus = columns.gpus[None, :].astype(np.float64)
    if limit.resource == "gpu":
        spared = np.array([limit.spared.get(job.job.job_id, 0) for job in jobs])
        return np.asarray(np.maximum(gpus - spared[:, None], 0.0))
    ones = np.ones((len(jobs), 1))
    if limit.resource == "node":
        return np.asarray(ones * columns.nodes)
    if limit.resource in ("cpu", "mem"):
        needs = [ResourceNeed.of(job.job) for job in jobs]
        each = [n.cpus_per_gpu if limit.resource == "cpu" else n.memory_per_gpu_mb for n in needs]
        per_node = np.array(each)[:, None] * gpus / columns.nodes
        return np.asarray(np.ceil(per_node - 1e-6) * columns.nodes)
    of_type = [limit.resource == f"gpu:{name}" for name in columns.names()]
    return np.asarray(ones * gpus * np.array(of_type, dtype=np.float64))
