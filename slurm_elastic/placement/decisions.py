"""Targets to decisions: what can be begun now, in which order, and for which reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.plan import Action, Alternative, Decision, Plan, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.eligibility import RoundJob
from slurm_elastic.placement.explanation import Explainer, awaits, gives, notes
from slurm_elastic.placement.free_resources import FreeResources, union
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import PendingClaims

#: Order in which changes begin.
_ORDER = (
    Action.PREEMPT,
    Action.SHRINK,
    Action.START,
    Action.MOVE,
    Action.GROW,
    Action.KEEP,
)


def made(
    everyone: Mapping[int, RoundJob],
    owed: PendingClaims,
    assignment: Assignment,
    proposals: Mapping[int, Proposal],
    *,
    explain: bool,
) -> Plan:
    """Turn targets into decisions, as far as they can be begun now, with their reasons."""
    frame, now = assignment.frame, assignment.now
    snapshot = frame.snapshot
    explainer = Explainer(frame, assignment.idle(), owed.claims) if explain else None
    givers: dict[int, list[Job]] = {}
    for given in owed.ways.values():
        givers.setdefault(given.beneficiary.job_id, []).append(given.tenant.job)
    kept = {claim.job_id: claim for claim in owed.claims}
    decisions = []
    ordered = sorted(everyone.values(), key=lambda t: _rank(t, owed, assignment.outcomes))
    for tenant in ordered:
        job_id, current = tenant.job.job_id, tenant.current
        outcome = assignment.outcomes.get(job_id)
        way = owed.ways.get(job_id)
        target, reason = tenant.current, Reason("keeps-allocation")
        waiting = tenant.why
        if way is not None:
            target, reason, waiting = way.target, gives(way, snapshot), None
        elif outcome is not None:
            target, reason = outcome.target, outcome.reason or reason
        elif tenant.current is None:
            waiting = awaits(tenant, kept.get(job_id), givers.get(job_id, []))
            reason = Reason("waits")
        begins = assignment.at_once or way is not None or not target or target == current
        if target and not begins and not _begin(now, tenant, target):
            waiting = Reason(
                "gpus-given-up-first",
                gpus=target.gpus,
                gpu_type=target.gpu_type,
                nodes=target.nodes,
            )
            target, reason = tenant.current, Reason("keeps-for-now")
        holds = target or tenant.current
        meant = _meant(proposals.get(job_id), target)
        answers = {}
        if explainer is not None and holds:
            answers = {
                "why_not_more": explainer.why_not_more(tenant, holds, outcome, way),
                "why_not_fewer": explainer.why_not_fewer(tenant, holds, outcome),
                "why_here": explainer.why_here(tenant, holds, outcome),
            }
        decisions.append(
            Decision(
                job_id=job_id,
                current=tenant.current,
                target=target,
                action=_action(tenant.current, target),
                reason=reason,
                gain=_gain(frame, tenant, target) if explain else 0.0,
                cost_s=_cost_s(tenant, target),
                waiting_for=waiting,
                batch=meant.batch if meant else None,
                dropped=meant is not None and meant.dropped,
                **answers,
            )
        )
    decisions.sort(key=lambda d: _ORDER.index(d.action))
    return Plan(
        time=snapshot.time,
        decisions=tuple(decisions),
        claims=tuple(owed.claims),
        notes=notes(snapshot, owed.claims, givers),
        wake=assignment.gate.wake(d.job_id for d in decisions if d.action is Action.KEEP),
    )


def _meant(proposal: Proposal | None, target: Allocation | None) -> Alternative | None:
    """Return the alternative of the proposal that matches a target."""
    shape = (target.gpu_type, target.gpus) if target else ("", 0)
    ranked = proposal.alternatives if proposal else ()
    return next((a for a in ranked if (a.gpu_type, a.gpus) == shape), None)


def _rank(tenant: RoundJob, owed: PendingClaims, outcomes: Mapping[int, JobOutcome]) -> int:
    """Return the sort key by which changes take what is free now."""
    if tenant.job.job_id in owed.ways:
        return 0
    outcome = outcomes.get(tenant.job.job_id)
    if outcome is None or not outcome.changed:
        return 4
    return 1 if tenant.current is None else 2


def _begin(now: FreeResources, tenant: RoundJob, target: Allocation) -> bool:
    """Book a change if it fits beside all present allocations; return whether it does."""
    current = tenant.current
    if union(current, target) == current:
        return True
    now.give(tenant.need, current)
    room = now.room(tenant.need)
    shares = now.frame.shares(target.shares)
    fits = all(room[i] >= g for i, g in shares.items()) and not now.exceeds_limits(
        tenant.need, target
    )
    now.take(tenant.need, union(current, target) if fits else current)
    return fits


def _action(current: Allocation | None, target: Allocation | None) -> Action:
    if current == target:
        return Action.KEEP
    if target is None:
        return Action.PREEMPT
    if current is None:
        return Action.START
    if current.gpu_type != target.gpu_type or current.gpus == target.gpus:
        return Action.MOVE
    return Action.GROW if target.gpus > current.gpus else Action.SHRINK


def _gain(frame: NodeArrays, tenant: RoundJob, target: Allocation | None) -> float:
    if tenant.current is None or target == tenant.current:
        return 0.0
    return tenant.speed(frame, target) / tenant.speed(frame, tenant.current) - 1


def _cost_s(tenant: RoundJob, target: Allocation | None) -> float:
    if tenant.current is None or target == tenant.current:
        return 0.0
    return tenant.cost_s * tenant.current.gpus
