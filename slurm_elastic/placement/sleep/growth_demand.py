"""Sleeping nodes onto which jobs would grow, or start, if they were awake; pure.

A round is decided as if they were awake. A boot costs the job nothing, as it trains on while the
node boots, but the node's power: so a job grows there only if enough of its time is left.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.plan import Action, JobRecord, Plan


def awakened(snapshot: Snapshot, names: Collection[str]) -> Snapshot:
    """Return the snapshot as if these sleeping nodes were awake."""
    nodes = tuple(
        dataclasses.replace(n, available=True, asleep=False, state="IDLE")
        if n.name in names and n.asleep
        else n
        for n in snapshot.nodes
    )
    return dataclasses.replace(snapshot, nodes=nodes)


def growth_nodes(
    plan: Plan,
    snapshot: Snapshot,
    names: Collection[str],
    records: Mapping[int, JobRecord],
    *,
    least_left_s: float,
) -> frozenset[str]:
    """Return the sleeping nodes that are worth a boot.

    Args:
        plan: decided as if they were awake.
        snapshot: the cluster.
        names: the sleeping nodes.
        records: of the elastic jobs.
        least_left_s: a running job has to have so much of its time left.
    """
    wanted: set[str] = set()
    for decision in plan.decisions:
        job = snapshot.job.get(decision.job_id)
        if job is None or decision.target is None:
            continue
        grows = decision.action is Action.GROW
        worth = grows and time_left_s(job, records.get(job.job_id), snapshot.time) >= least_left_s
        if worth or decision.action is Action.START:
            wanted.update(n for n in decision.target.nodes if n in names)
    return frozenset(wanted)


def time_left_s(job: Job, record: JobRecord | None, now: float) -> float:
    """Return the seconds that a job still runs, by its limit and its predicted length."""
    age_s = max(0.0, now - job.start_time) if job.start_time else 0.0
    left_s = math.inf if job.time_limit_s is None else job.time_limit_s - age_s
    if record is not None and record.length is not None:
        left_s = min(left_s, record.length.given(age_s).median - age_s)
    return left_s
