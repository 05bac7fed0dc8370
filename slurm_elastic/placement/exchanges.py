"""Exchanges of GPUs among running jobs, which can only change together. Pure.

No job moves into GPUs that are not free yet (round.py), so that running jobs that are each to get
GPUs of the others could never begin. Such a group of two or three jobs is changed together: all
save, then all are requeued, and each starts on GPUs that another one has left. The plan has all
changes of a group or none, and the transitions begin all or none
(controller/transitions/admission.py).

A policy weighs changes for all jobs together, and other changes of its answer may find no place.
So it is asked about the group alone, and the exchange is made only if it still prefers the changes,
with all their costs, to what the jobs hold. A solver may prefer one of two nearly equal answers now
and the other one in the next round. So, where the policy values the choices of a job, the product
of all jobs' values must rise as well (our definition): then the way back would lower it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome

#: Asks the policy about these jobs, with all GPUs that are free or theirs; also its new state.
Ask = Callable[[Sequence[int]], tuple[Sequence[Proposal], Mapping[str, Any]]]

#: Jobs in one exchange.
_SIZES = (2, 3)
#: Most jobs without a place that are compared, and most questions to the policy, in one round.
_MOST_JOBS, _MOST_QUESTIONS = 12, 8
#: A job that takes longer to save would keep the others waiting.
_SAVE_S = 60.0

_EPSILON = 1e-9

#: Choices of a job that it prefers to what it has, best first.
_Wishes = Mapping[int, Sequence[Alternative]]
_Targets = Mapping[int, tuple[Allocation, Alternative]]


def exchange(assignment: Assignment, proposals: Sequence[Proposal], ask_alone: Ask) -> None:
    """Give jobs that found no place the GPUs of each other, where the policy prefers that.

    Args:
        assignment: with the outcomes of the proposals.
        proposals: the policy's answer for all jobs.
        ask_alone: asks the policy about some jobs, with GPUs that are idle or theirs.
    """
    by_job = {p.job_id: p for p in proposals if p.job_id in assignment.outcomes}
    stuck = [
        outcome
        for job_id, proposal in sorted(by_job.items())
        if _is_stuck(outcome := assignment.outcomes[job_id], proposal)
    ][:_MOST_JOBS]
    wishes = {o.job_id: _wishes(o, by_job[o.job_id]) for o in stuck}
    questions = 0
    done: set[int] = set()
    for group in (g for size in _SIZES for g in combinations(stuck, size)):
        job_ids = [o.job_id for o in group]
        if not done.isdisjoint(job_ids) or not _crosses(group, wishes):
            continue
        if _targets(assignment, group, wishes) is None:
            continue
        if questions == _MOST_QUESTIONS:
            return
        questions += 1
        answers, _ = ask_alone(job_ids)
        alone = {p.job_id: _wishes(assignment.outcomes[p.job_id], p) for p in answers}
        targets = _targets(assignment, group, alone) if _crosses(group, alone) else None
        if targets is not None and _gains(group, targets, answers):
            _book(assignment, group, targets)
            done.update(job_ids)


def _is_stuck(outcome: JobOutcome, proposal: Proposal) -> bool:
    """Return whether a running job keeps what it has, since other places are not free."""
    current = outcome.round_job.current
    if current is None or outcome.changed or outcome.waits is not None:
        return False
    if (outcome.round_job.record.checkpoint_s or 0.0) > _SAVE_S:
        return False
    wishes = _wishes(outcome, proposal)
    return any(a.place is not None or a.gpu_type != current.gpu_type for a in wishes)


def _wishes(outcome: JobOutcome, proposal: Proposal) -> list[Alternative]:
    """Return the alternatives that a job's policy prefers to what the job holds.

    Those weighed as changes in place are left out: an exchange needs requeues.
    """
    current, wishes = outcome.round_job.current, list[Alternative]()
    for alternative in proposal.alternatives:
        shape = (alternative.gpu_type, alternative.gpus)
        if not alternative.gpus or current is None:
            break
        if alternative.place == current:
            break
        if alternative.place is None and shape == (current.gpu_type, current.gpus):
            break
        if not alternative.in_place:
            wishes.append(alternative)
    return wishes


def _crosses(group: Sequence[JobOutcome], wishes: _Wishes) -> bool:
    """Return whether each job of a group wants the type that another one holds."""
    for outcome in group:
        others = {_held_type(o) for o in group if o is not outcome}
        if not any(a.gpu_type in others for a in wishes.get(outcome.job_id, ())):
            return False
    return True


def _held_type(outcome: JobOutcome) -> str:
    current = outcome.round_job.current
    return current.gpu_type if current is not None else ""


def _targets(
    assignment: Assignment, group: Sequence[JobOutcome], wishes: _Wishes
) -> _Targets | None:
    """Return a place for each job of a group once all have left theirs; None: not all have one."""
    later = assignment.later
    for outcome in group:
        later.give(outcome.round_job.need, outcome.round_job.current)
    targets: dict[int, tuple[Allocation, Alternative]] = {}
    for outcome in sorted(group, key=lambda o: -max((a.gpus for a in wishes[o.job_id]), default=0)):
        target = _first_place(assignment, outcome, wishes[outcome.job_id])
        if target is None:
            break
        later.take(outcome.round_job.need, target[0])
        targets[outcome.job_id] = target
    for outcome in group:
        if outcome.job_id in targets:
            later.give(outcome.round_job.need, targets[outcome.job_id][0])
    for outcome in group:
        later.take(outcome.round_job.need, outcome.round_job.current)
    return targets if len(targets) == len(group) else None


def _first_place(
    assignment: Assignment, outcome: JobOutcome, wishes: Sequence[Alternative]
) -> tuple[Allocation, Alternative] | None:
    round_job = outcome.round_job
    for wish in wishes:
        target = (
            assignment.exactly(round_job, wish.place)
            if wish.place
            else assignment.find(round_job, wish.gpu_type, wish.gpus)
        )
        if target is None or target == round_job.current:
            continue
        most = assignment.frame.per_node.get(target.gpu_type, 1)
        # Policies value choices without a place as if they were on the fewest nodes.
        if wish.place is None and len(target.shares) > -(-target.gpus // most):
            continue
        if wish.place is None and assignment.gate.refusal(round_job, target):
            continue
        return target, wish
    return None


def _gains(group: Sequence[JobOutcome], targets: _Targets, answers: Sequence[Proposal]) -> bool:
    """Return whether the product of the jobs' values rises; also where they are not all known."""
    by_job = {p.job_id: p for p in answers}
    gain = 0.0
    for outcome in group:
        current, new = outcome.round_job.current, targets[outcome.job_id][1].value
        shape = (current.gpu_type, current.gpus) if current else None
        alternatives = by_job[outcome.job_id].alternatives
        old = next((a.value for a in alternatives if (a.gpu_type, a.gpus) == shape), 0.0)
        if old <= 0 or new <= 0:
            return True
        gain += math.log(new / old)
    return gain > _EPSILON


def _book(assignment: Assignment, group: Sequence[JobOutcome], targets: _Targets) -> None:
    """Make the targets of a group those of its jobs."""
    for outcome in group:
        assignment.later.give(outcome.round_job.need, outcome.round_job.current)
    for outcome in group:
        target, wish = targets[outcome.job_id]
        assignment.later.take(outcome.round_job.need, target)
        others = [o for o in group if o is not outcome]
        outcome.target, outcome.wished = target, wish
        outcome.partners = tuple(o.job_id for o in others)
        outcome.refusals.clear()
        outcome.reason = Reason(
            "exchanges-gpus",
            jobs=[o.round_job.job.display_id for o in others],
            users=[o.round_job.job.user for o in others],
            reason=wish.reason or Reason("keeps-allocation"),
        )
