"""Waiting jobs that start beside running ones, on half of their GPU. Pure.

Both jobs of a pair have `share=yes` in their directives, and each holds half of the GPU's shards.
Pairs are made after everything else is decided: a job that waits, and for which nothing is free,
kept or given up, gets half of the GPU of a running job. The running job is requeued first, with
half of its GPU; the other one starts as soon as that runs. A half whose other half is free counts
as a whole GPU everywhere else. A policy that weighs halves (half_options.py) may name jobs that are
to be joined: they start on half of a GPU at once, where Slurm can put them on one only. How pairs
part again is in pair_separation.py.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.core.cluster import JobState
from slurm_elastic.core.plan import Action, Decision, Plan
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.placement.decisions import BEGIN_ORDER
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.placement.neighbours.pair_matching import PossiblePair, matched
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import waiting_jobs
from slurm_elastic.placement.sharing.shareable_gpus import (
    OpenGpus,
    SharedNodeRoom,
    half_of_gpu,
    is_divisible,
    may_share,
)

#: Limits on the jobs that a round compares: waiting ones, running ones of a node (of which one gets
#: a partner in a round), and running ones in all.
_MOST_WAITING, _MOST_ON_NODE, _MOST_RUNNING = 64, 4, 64


def share_gpus(
    plan: Plan,
    assignment: Assignment,
    round_jobs: Mapping[int, RoundJob],
    table: GpuPairTable | None,
) -> Plan:
    """Return the plan with pairs of jobs on one GPU; the same plan where there is none.

    Args:
        plan: decided without pairs.
        assignment: of this round; it has the resources that are free beside the plan.
        round_jobs: all elastic jobs.
        table: speeds of two jobs on one GPU; None: nothing is shared.
    """
    plan = _as_held(plan, round_jobs)
    if table is None or not table.pairs_jobs:
        return plan
    open_gpus = OpenGpus(assignment.frame, round_jobs)
    plan = _started_on_halves(plan, assignment, round_jobs, open_gpus)
    hosts = [
        t
        for t in round_jobs.values()
        if _is_host(t, plan, assignment.frame) and open_gpus.has_no_other(t.job)
    ]
    hosts = _first_of_each_node(hosts)
    guests = _guests(plan, assignment.frame, round_jobs) if hosts else []
    if not guests:
        return plan
    room = SharedNodeRoom(assignment.later.meet(assignment.now))
    pairs = [
        pair
        for host in hosts
        for guest in guests
        if (pair := _pair(host, guest, table)) is not None
        and pair.allowed
        and room.fits(host, guest)
    ]
    changed: dict[int, Decision] = {}
    nodes: set[str] = set()
    host_ids = {t.job.job_id for t in hosts}
    for first, second in matched(pairs):
        host, guest = round_jobs[first], round_jobs[second]
        if second in host_ids:
            host, guest = guest, host
        (node,) = half_of_gpu(host).nodes
        # Earlier pairs have taken resources; the jobs of two pairs on a node Slurm might exchange.
        if node in nodes or not room.fits(host, guest):
            continue
        nodes.add(node)
        room.take(host, guest)
        changed |= _decisions(host, guest, plan, table)
    if not changed:
        return plan
    decisions = (changed.get(d.job_id, d) for d in plan.decisions)
    return dataclasses.replace(plan, decisions=_in_order(decisions))


def _first_of_each_node(hosts: Iterable[RoundJob]) -> list[RoundJob]:
    """Return some running jobs of each node, first those that need no restart."""
    on_node, chosen = Counter[str](), []
    for host in sorted(hosts, key=lambda t: t.current == t.job.allocation):
        (node,) = half_of_gpu(host).nodes
        on_node[node] += 1
        if on_node[node] <= _MOST_ON_NODE:
            chosen.append(host)
    return chosen[:_MOST_RUNNING]


def _as_held(plan: Plan, round_jobs: Mapping[int, RoundJob]) -> Plan:
    """Return the plan with the halves that jobs hold and keep, which counted as whole GPUs."""
    halves = {
        job_id: held
        for job_id, t in round_jobs.items()
        if (held := t.job.allocation) is not None and held.half and t.partner is None
    }
    if not halves:
        return plan
    decisions = [
        d
        if (held := halves.get(d.job_id)) is None
        else dataclasses.replace(
            d, current=held, target=held if d.action is Action.KEEP else d.target
        )
        for d in plan.decisions
    ]
    return dataclasses.replace(plan, decisions=tuple(decisions))


def _started_on_halves(
    plan: Plan, assignment: Assignment, round_jobs: Mapping[int, RoundJob], open_gpus: OpenGpus
) -> Plan:
    """Return the plan in which jobs that are to share their GPU start on half of it at once."""
    starting = {
        d.job_id
        for d in plan.decisions
        if d.action is Action.START
        and d.target is not None
        and (outcome := assignment.outcomes.get(d.job_id)) is not None
        and outcome.wished is not None
        and outcome.wished.half
        and d.target.gpus == 1
        and may_share(round_jobs[d.job_id], d.target.gpu_type)
        and open_gpus.has_one_free(d.target.nodes[0], assignment)
    }
    if not starting:
        return plan
    decisions = tuple(
        dataclasses.replace(d, target=dataclasses.replace(d.target, half=True))
        if d.job_id in starting and d.target is not None
        else d
        for d in plan.decisions
    )
    return dataclasses.replace(plan, decisions=decisions)


def _is_host(round_job: RoundJob, plan: Plan, frame: NodeArrays) -> bool:
    """Return whether a running job has a GPU, or half of one, beside which another may start."""
    job, held = round_job.job, round_job.job.allocation
    decision = plan.decision[job.job_id]
    if job.state is not JobState.RUNNING or held is None or held.gpus != 1 or job.companions:
        return False
    if not may_share(round_job, held.gpu_type) or decision.action is not Action.KEEP:
        return False
    node = frame.snapshot.node.get(held.nodes[0])
    if node is None or not is_divisible(node):
        return False
    if held.half:
        is_settled = round_job.eligibility is not Eligibility.MOVING
        return is_settled and round_job.partner is None
    return round_job.eligibility is Eligibility.FREE


def _guests(
    plan: Plan, frame: NodeArrays, round_jobs: Mapping[int, RoundJob]
) -> Sequence[RoundJob]:
    """Return the jobs that wait for a GPU, and for which none is free, kept or given up."""
    claimed = {claim.job_id for claim in plan.claims}
    guests = []
    for job in waiting_jobs(round_jobs, frame):
        round_job = round_jobs.get(job.job_id)
        if round_job is None or job.job_id in claimed or not job.managed or round_job.record.held:
            continue
        decision = plan.decision[job.job_id]
        starts_at_all = round_job.reason is None or round_job.reason.code == "slurm-starts"
        if starts_at_all and decision.action is Action.KEEP and round_job.record.stopped is None:
            guests.append(round_job)
    return guests[:_MOST_WAITING]


def pays_for_half(host: RoundJob) -> bool:
    """Return whether the restart of a running job with half of its GPU pays, if it needs one."""
    return (
        host.job.allocation == half_of_gpu(host) or not host.cost_s or host.window_s > host.cost_s
    )


def _pair(host: RoundJob, guest: RoundJob, table: GpuPairTable) -> PossiblePair | None:
    """Return a pair and its value.

    None: the host's restart would not be paid back, or the GPU's memory does not suffice for both.
    """
    half, host_id, guest_id = half_of_gpu(host), host.job.job_id, guest.job.job_id
    (node,) = half.nodes
    if not pays_for_half(host):
        return None
    cost_s = 0.0 if host.job.allocation == half else host.cost_s
    if not table.has_memory(node, host_id, guest_id):
        return None
    speeds = (
        table.speed(node, host_id, guest_id),
        table.speed(node, guest_id, host_id),
    )
    return PossiblePair(
        first=host_id,
        second=guest_id,
        speeds=speeds,
        surely=speeds,
        gates=(table.gate, table.gate),
        caution=0.0,
        cost=cost_s / host.window_s if cost_s else 0.0,
    )


def _decisions(
    host: RoundJob, guest: RoundJob, plan: Plan, table: GpuPairTable
) -> dict[int, Decision]:
    """Return the decisions of a pair: the guest starts, or the host makes room for it first."""
    half, host_id, guest_id = half_of_gpu(host), host.job.job_id, guest.job.job_id
    (node,) = half.nodes
    beside_guest = {"job": guest.job.display_id, "user": guest.job.user}
    beside_host = {"job": host.job.display_id, "user": host.job.user}
    waiting = plan.decision[guest_id]
    if host.job.allocation == half:
        speed = table.speed(node, guest_id, host_id)
        starts = dataclasses.replace(
            waiting,
            target=half,
            action=Action.START,
            reason=Reason("starts-on-half", speed=speed, **beside_host),
            waiting_for=None,
        )
        return {guest_id: starts}
    speed = table.speed(node, host_id, guest_id)
    divides = dataclasses.replace(
        plan.decision[host_id],
        target=half,
        action=Action.MOVE,
        reason=Reason("halves-gpu", speed=speed, cost_s=host.cost_s, **beside_guest),
        gain=speed - 1,
        cost_s=host.cost_s,
        waiting_for=None,
    )
    waits = dataclasses.replace(waiting, waiting_for=Reason("half-given-first", **beside_host))
    return {host_id: divides, guest_id: waits}


def _in_order(decisions: Iterable[Decision]) -> tuple[Decision, ...]:
    """Return decisions in the order in which they begin."""
    return tuple(sorted(decisions, key=lambda d: BEGIN_ORDER.index(d.action)))
