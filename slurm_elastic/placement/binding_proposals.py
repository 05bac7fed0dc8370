"""Placement of binding proposals; GPUs that waiting jobs leave idle are offered to the others.

Under `[placement] mode = "delay"` a job may refuse the place that it would get. It keeps what it
has, and the policy is asked once more, about the other jobs alone, with all GPUs that these may
have. So a refusal leaves no GPUs idle that the policy would give to another job.

Two running jobs that are each to get the other's GPU type could never begin, since no job moves
into GPUs that are not free yet (round.py). Where Slurm starts jobs they are changed together
(exchanges.py). Where the controller starts jobs itself (`queue = "controller"`) one of them is
suspended: the other moves into its GPUs, and it starts in those left by the other, as the policy
proposes then. Its restart costs what the move would have cost, and it waits for the other's move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement import pack
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.defragment import consolidate
from slurm_elastic.placement.eligibility import RoundJob
from slurm_elastic.placement.exchanges import Ask, exchange

#: Most further questions to the policy after refusals.
_MOST_OFFERS = 8


def carry_out(
    assignment: Assignment,
    job_ids: Sequence[int],
    proposals: Sequence[Proposal],
    round_jobs: Mapping[int, RoundJob],
    ask: Ask,
    *,
    ask_alone: Ask,
    moves: bool,
) -> None:
    """Give each job the first of its alternatives for which there is room.

    Args:
        assignment: nothing of these jobs is on it yet.
        job_ids: the jobs of the proposals.
        proposals: the policy's first answer.
        round_jobs: all elastic jobs.
        ask: for further answers.
        ask_alone: for answers about an exchange, which replace no others.
        moves: whether other jobs may change nodes to make room.
    """
    saved_later, saved_outcomes = assignment.later.copy(), dict(assignment.outcomes)
    for offers in range(_MOST_OFFERS + 1):
        if assignment.at_once:
            pack.carry_out(assignment, proposals, round_jobs, moves=moves)
        else:
            assignment.place(proposals, round_jobs)
            if assignment.config.controller.queue == "controller":
                _suspend_for_exchange(assignment)
            else:
                exchange(assignment, proposals, ask_alone)
        waiting = {j: o for j, o in assignment.outcomes.items() if o.waits and not o.changed}
        for outcome in waiting.values():
            if outcome.target is None:
                outcome.reason = outcome.waits
        not_waiting = [j for j in job_ids if j not in waiting]
        idle = any(assignment.idle().values())
        if (
            offers == _MOST_OFFERS
            or len(not_waiting) == len(job_ids)
            or not not_waiting
            or not idle
        ):
            break
        job_ids = not_waiting
        assignment.later, assignment.outcomes = saved_later.copy(), {**saved_outcomes, **waiting}
        saved_outcomes = dict(assignment.outcomes)
        proposals, _ = ask(job_ids)
    if not assignment.gate.open:
        consolidate(assignment)


def _suspend_for_exchange(assignment: Assignment) -> None:
    """Suspend one job of each pair that can only change places; the one that costs less."""
    stuck = [o for o in assignment.outcomes.values() if _is_stuck(o)]
    stuck.sort(key=lambda o: (_cost(o), o.round_job.job.job_id))
    done: set[int] = set()
    for giver in (o for o in stuck if o.wished and not o.wished.urgent):
        for mover in stuck:
            pair = {giver.round_job.job.job_id, mover.round_job.job.job_id}
            if len(pair) == 2 and not pair & done and _swap(assignment, giver, mover):
                done |= pair


def _is_stuck(outcome: JobOutcome) -> bool:
    """Return whether a running job is to change its type and has no place."""
    wished, current = outcome.wished, outcome.round_job.current
    if wished is None or current is None or outcome.changed or not wished.gpus:
        return False
    return wished.gpu_type != current.gpu_type


def _cost(outcome: JobOutcome) -> float:
    current = outcome.round_job.current
    return outcome.round_job.cost_s * (current.gpus if current else 0)


def _swap(assignment: Assignment, giver: JobOutcome, mover: JobOutcome) -> bool:
    """Book the mover on what the giver holds, if each fits where the other is."""
    mover_wish, giver_place = mover.wished, giver.round_job.current
    giver_wish, mover_place = giver.wished, mover.round_job.current
    if mover_wish is None or giver_place is None or giver_wish is None or mover_place is None:
        return False
    if mover_wish.gpu_type != giver_place.gpu_type or giver_wish.gpu_type != mover_place.gpu_type:
        return False
    later = assignment.later
    later.give(giver.round_job.need, giver_place)
    later.give(mover.round_job.need, mover_place)
    target = assignment.find(mover.round_job, mover_wish.gpu_type, mover_wish.gpus)
    giver_target = None
    if target is not None:
        later.take(mover.round_job.need, target)
        giver_target = assignment.find(giver.round_job, giver_wish.gpu_type, giver_wish.gpus)
    if target is None or giver_target is None:
        if target is not None:
            later.give(mover.round_job.need, target)
        later.take(giver.round_job.need, giver_place)
        later.take(mover.round_job.need, mover_place)
        return False
    mover.target, mover.reason = target, mover_wish.reason
    giver.target = None
    giver.reason = Reason(
        "changes-places",
        job=mover.round_job.job.display_id,
        reason=giver_wish.reason or Reason("keeps-allocation"),
    )
    return True
