"""Targets to decisions: what can be begun now, in which order, and for which reasons. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.plan import Action, Alternative, Decision, Plan, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.beginnings import Beginnings, beginnings
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.explanation import Explainer, awaits, gives, notes
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.pending_claims import PendingClaims

#: Order in which changes begin.
BEGIN_ORDER = (
    Action.PREEMPT,
    Action.SHRINK,
    Action.START,
    Action.MOVE,
    Action.GROW,
    Action.KEEP,
)


def build_plan(
    round_jobs: Mapping[int, RoundJob],
    pending_claims: PendingClaims,
    assignment: Assignment,
    proposals: Mapping[int, Proposal],
    *,
    explain: bool,
) -> Plan:
    """Turn targets into decisions, as far as they can be begun now, with their reasons."""
    frame = assignment.frame
    snapshot = frame.snapshot
    explainer = Explainer(frame, assignment.idle(), pending_claims.claims) if explain else None
    givers: dict[int, list[Job]] = {}
    for each in pending_claims.concessions.values():
        givers.setdefault(each.beneficiary.job_id, []).append(each.round_job.job)
    claims = {claim.job_id: claim for claim in pending_claims.claims}
    decisions = []
    # Jobs of equal rank take what is free in the order in which they got their places.
    position = {job_id: at for at, job_id in enumerate(assignment.outcomes)}
    ordered = sorted(
        round_jobs.values(),
        key=lambda t: (
            _rank(t, pending_claims, assignment.outcomes),
            position.get(t.job.job_id, 0),
        ),
    )
    begun = _begun(ordered, pending_claims, assignment)
    for round_job in ordered:
        job_id, current = round_job.job.job_id, round_job.current
        outcome = assignment.outcomes.get(job_id)
        concession = pending_claims.concessions.get(job_id)
        target, reason = round_job.current, Reason("keeps-allocation")
        waiting = round_job.reason
        if concession is not None:
            target, reason, waiting = concession.target, gives(concession, snapshot), None
        elif outcome is not None:
            target, reason = outcome.target, outcome.reason or reason
        elif round_job.current is None:
            waiting = awaits(round_job, claims.get(job_id), givers.get(job_id, []), assignment)
            reason = Reason("waits")
        waits = concession is None and outcome is not None and job_id not in begun.jobs
        if target and waits:
            waiting = Reason(
                "gpus-given-up-first",
                gpus=target.gpus,
                gpu_type=target.gpu_type,
                nodes=target.nodes,
            )
            target, reason = round_job.current, Reason("keeps-for-now")
        holds = target or round_job.current
        meant = _meant(proposals.get(job_id), target)
        if outcome is not None and outcome.partners and target != current:
            meant = outcome.wished
        answers = {}
        if explainer is not None and holds:
            answers = {
                "why_not_more": explainer.why_not_more(round_job, holds, outcome, concession),
                "why_not_fewer": explainer.why_not_fewer(round_job, holds, outcome),
                "why_here": explainer.why_here(round_job, holds, outcome),
            }
        decisions.append(
            Decision(
                job_id=job_id,
                current=round_job.current,
                target=target,
                action=_action(round_job.current, target),
                reason=reason,
                gain=_gain(frame, round_job, target) if explain else 0.0,
                cost_s=_cost_s(round_job, target),
                waiting_for=waiting,
                batch=meant.batch if meant else None,
                dropped=meant is not None and meant.dropped,
                exchange=outcome.partners if outcome is not None and target != current else (),
                givers=begun.givers.get(job_id, ()),
                **answers,
            )
        )
    decisions.sort(key=lambda d: BEGIN_ORDER.index(d.action))
    return Plan(
        time=snapshot.time,
        decisions=tuple(decisions),
        claims=tuple(pending_claims.claims),
        notes=notes(snapshot, pending_claims.claims, givers),
        left_to_slurm=frozenset(
            j for j, t in round_jobs.items() if t.eligibility is Eligibility.SLURMS
        ),
        wake=assignment.gate.wake(d.job_id for d in decisions if d.action is Action.KEEP),
    )


def _begun(
    ordered: Sequence[RoundJob], pending_claims: PendingClaims, assignment: Assignment
) -> Beginnings:
    """Return the changes that begin; concessions always do."""
    targets = [
        outcome
        for t in ordered
        if t.job.job_id not in pending_claims.concessions
        and (outcome := assignment.outcomes.get(t.job.job_id)) is not None
    ]
    if assignment.at_once:
        return Beginnings({o.job_id for o in targets})
    return beginnings(assignment.now, targets, assignment.outcomes)


def _meant(proposal: Proposal | None, target: Allocation | None) -> Alternative | None:
    """Return the alternative of the proposal that matches a target."""
    shape = (target.gpu_type, target.gpus) if target else ("", 0)
    ranked = proposal.alternatives if proposal else ()
    return next((a for a in ranked if (a.gpu_type, a.gpus) == shape), None)


def _rank(
    round_job: RoundJob, pending_claims: PendingClaims, outcomes: Mapping[int, JobOutcome]
) -> int:
    """Return the sort key by which changes take what is free now."""
    if round_job.job.job_id in pending_claims.concessions:
        return 0
    outcome = outcomes.get(round_job.job.job_id)
    if outcome is None or not outcome.changed:
        return 4
    return 1 if round_job.current is None else 2


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


def _gain(frame: NodeArrays, round_job: RoundJob, target: Allocation | None) -> float:
    if round_job.current is None or target == round_job.current:
        return 0.0
    return round_job.speed(frame, target) / round_job.speed(frame, round_job.current) - 1


def _cost_s(round_job: RoundJob, target: Allocation | None) -> float:
    if round_job.current is None or target == round_job.current:
        return 0.0
    return round_job.change_cost_s(target) * round_job.current.gpus
