"""Clearing: running jobs leave a node that then falls idle, so that it can sleep.

Jobs that end leave others behind, spread over more nodes than they need. While no job waits for
GPUs and nothing else changes, one node a round is cleared: the one with the fewest GPUs in use
whose jobs all find a place, of the same size, as near and as fast, on nodes that stay in use.

It has to be worth its cost (our definition). The node would else be in use for the time that its
jobs have left, at most `[sleep] clear_s`: less a boot, that has to be `_WORTH` times what the jobs
lose by their changes, all together.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from slurm_elastic.core.cluster import Allocation, JobState, Node
from slurm_elastic.core.reason import Reason
from slurm_elastic.models.colocation.node_sharing import tenants
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.placement.best_fit import fit
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.node_arrays import Mask
from slurm_elastic.placement.sleep.growth_demand import time_left_s
from slurm_elastic.placement.sleep.sleep_choice import in_use

#: The time for which a node is cleared is so many times what its jobs lose.
_WORTH = 20.0
#: Least part of its present speed that a job is predicted to have in its new place.
_AS_FAST = 0.99


def clear(assignment: Assignment, round_jobs: Mapping[int, RoundJob]) -> None:
    """Let the jobs of one node move to others, if that node can then sleep and it is worth it.

    Args:
        assignment: of this round, complete.
        round_jobs: all elastic jobs.
    """
    settings, frame = assignment.config.sleep, assignment.frame
    snapshot = frame.snapshot
    if settings.mode != "act" or not settings.clear_s or not _is_quiet(assignment, round_jobs):
        return
    on_node = tenants(snapshot)
    used: Mask = np.array([in_use(n) for n in snapshot.nodes], dtype=bool)
    for name in sorted(on_node, key=lambda n: (sum(g for _, g in on_node[n]), n)):
        node = snapshot.node.get(name)
        if node is None or not node.available:
            continue
        ids = sorted(job.job_id for job, _ in on_node[name])
        jobs = [round_jobs[job_id] for job_id in ids if job_id in round_jobs]
        if len(jobs) < len(ids) or not _are_movable(assignment, jobs, node):
            continue
        targets = _places(assignment, jobs, frame.index[name], used)
        if targets is None:
            continue
        lost_s = sum(job.change_cost_s(targets[job.job.job_id]) for job in jobs)
        left_s = min(
            settings.clear_s, max(time_left_s(j.job, j.record, snapshot.time) for j in jobs)
        )
        if left_s - settings.boot_s < _WORTH * lost_s:
            continue
        for job in jobs:
            target = targets[job.job.job_id]
            assignment.later.give(job.need, job.current)
            assignment.later.take(job.need, target)
            outcome = assignment.outcomes[job.job.job_id]
            outcome.target = target
            outcome.reason = Reason(
                "clears-node", nodes=(name,), left_s=left_s, cost_s=job.change_cost_s(target)
            )
        return


def _is_quiet(assignment: Assignment, round_jobs: Mapping[int, RoundJob]) -> bool:
    """Return whether no job waits for GPUs, and none changes."""
    return (
        not any(outcome.changed for outcome in assignment.outcomes.values())
        and not any(job.eligibility is Eligibility.MOVING for job in round_jobs.values())
        and not any(
            job.state is JobState.PENDING
            and job.begin_time is None
            and not job.dependency
            and not job.reason.startswith("JobHeld")
            for job in assignment.frame.snapshot.jobs
        )
    )


def _are_movable(assignment: Assignment, jobs: list[RoundJob], node: Node) -> bool:
    """Return whether these jobs, all of a node's, may move, and nothing else uses the node."""
    gpus = cpus = 0
    for job in jobs:
        outcome = assignment.outcomes.get(job.job.job_id)
        if job.eligibility is not Eligibility.FREE or job.current is None or outcome is None:
            return False
        if not job.allowed(job.current) or job.job.companions:
            return False
        held = job.current.on(node.name)
        gpus += held
        cpus += max(held, job.need.cpus(held))
    return node.used_gpus <= gpus and node.used_cpus <= cpus


def _places(
    assignment: Assignment, jobs: list[RoundJob], node: int, used: Mask
) -> dict[int, Allocation] | None:
    """Return a place of each job off a node, on others that are in use; None: one has none."""
    frame, resources = assignment.frame, assignment.later.copy()
    stays = used.copy()
    stays[node] = False
    targets = {}
    for job in sorted(jobs, key=lambda job: -(job.current.gpus if job.current else 0)):
        current = job.current
        assert current is not None
        resources.give(job.need, current)
        demand = job.demand(frame)
        target = fit(
            dataclasses.replace(demand, allowed=demand.allowed & stays & frame.open),
            current.gpu_type,
            current.gpus,
            resources,
            unit=job.directive.unit_for(current.gpu_type),
            caps={node: 0},
        )
        if target is None or not _is_as_good(assignment, job, target, resources):
            return None
        resources.take(job.need, target)
        targets[job.job.job_id] = target
    return targets


def _is_as_good(
    assignment: Assignment, job: RoundJob, target: Allocation, resources: FreeResources
) -> bool:
    """Return whether a place is as near and as fast as the present one, and no neighbour hurts."""
    frame, current = assignment.frame, job.current
    assert current is not None
    spread = frame.topology.spread
    hurts = (resources.hurts(job.job.job_id, i, g) for i, g in frame.shares(target.shares).items())
    return (
        spread(target.nodes) <= spread(current.nodes)
        and job.speed(frame, target) >= _AS_FAST * job.speed(frame, current)
        and not any(hurts)
    )
