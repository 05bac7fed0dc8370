"""Two running jobs that shall each have the other's GPU type, with nothing free to begin with.

Nobody moves into GPUs that are not free yet (round.py), so neither could ever begin. Where
the controller starts jobs itself (`queue = "controller"`) one of them is suspended: the other
moves into its GPUs, and it starts in those that the other left, as the policy sees fit then.
Its restart costs what the move would have cost, and it waits for the other's move. Only for
binding proposals: their policy has weighed what the change costs.
"""

from __future__ import annotations

from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome


def exchange(assignment: Assignment) -> None:
    """Suspend one job of each pair that can only change places; the one that costs less."""
    stuck = [o for o in assignment.outcomes.values() if _is_stuck(o)]
    stuck.sort(key=lambda o: (_cost(o), o.tenant.job.job_id))
    done: set[int] = set()
    for giver in stuck:
        for mover in stuck:
            pair = {giver.tenant.job.job_id, mover.tenant.job.job_id}
            if len(pair) == 2 and not pair & done and _swap(assignment, giver, mover):
                done |= pair


def _is_stuck(outcome: JobOutcome) -> bool:
    """Whether a running job was to change its type and found no place."""
    wished, current = outcome.wished, outcome.tenant.current
    if wished is None or current is None or outcome.changed or not wished.gpus:
        return False
    return wished.gpu_type != current.gpu_type


def _cost(outcome: JobOutcome) -> float:
    current = outcome.tenant.current
    return outcome.tenant.cost_s * (current.gpus if current else 0)


def _swap(assignment: Assignment, giver: JobOutcome, mover: JobOutcome) -> bool:
    """Book the mover on what the giver holds, if each fits where the other is."""
    wants, gives = mover.wished, giver.tenant.current
    back, leaves = giver.wished, mover.tenant.current
    if wants is None or gives is None or back is None or leaves is None:
        return False
    if wants.gpu_type != gives.gpu_type or back.gpu_type != leaves.gpu_type:
        return False
    later = assignment.later
    later.give(giver.tenant.need, gives)
    later.give(mover.tenant.need, leaves)
    target = assignment.find(mover.tenant, wants.gpu_type, wants.gpus)
    after = None
    if target is not None:
        later.take(mover.tenant.need, target)
        after = assignment.find(giver.tenant, back.gpu_type, back.gpus)
    if target is None or after is None:
        if target is not None:
            later.give(mover.tenant.need, target)
        later.take(giver.tenant.need, gives)
        later.take(mover.tenant.need, leaves)
        return False
    mover.target, mover.reason = target, wants.reason
    giver.target = None
    giver.reason = Reason(
        "changes-places",
        job=mover.tenant.job.display_id,
        reason=back.reason or Reason("keeps-allocation"),
    )
    return True
