"""Placement of binding proposals; GPUs that waiting jobs leave idle are offered to the others.

Under `[placement] mode = "delay"` a job may refuse the place that it would get. It keeps what it
has, and the policy is asked once more, about the other jobs alone, with all GPUs that these may
have. So a refusal leaves no GPUs idle that the policy would give to another job.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slurm_elastic.core.plan import Proposal
from slurm_elastic.placement import pack
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.placement.defragment import consolidate
from slurm_elastic.placement.eligibility import RoundJob
from slurm_elastic.placement.swap import exchange

#: Most further questions to the policy after refusals.
_MOST_OFFERS = 8

#: Asks the policy about these jobs, with all GPUs that are free or theirs; also its new state.
Ask = Callable[[Sequence[int]], tuple[Sequence[Proposal], Mapping[str, Any]]]


def carry_out(
    assignment: Assignment,
    asked: Sequence[int],
    proposals: Sequence[Proposal],
    tenants: Mapping[int, RoundJob],
    ask: Ask,
    *,
    moves: bool,
) -> None:
    """Give each job the first of its alternatives for which there is room.

    Args:
        assignment: nothing of these jobs is on it yet.
        asked: the jobs of the proposals.
        proposals: the policy's first answer.
        tenants: all elastic jobs.
        ask: for further answers.
        moves: whether other jobs may change nodes to make room.
    """
    before, kept = assignment.later.copy(), dict(assignment.outcomes)
    for offers in range(_MOST_OFFERS + 1):
        if assignment.at_once:
            pack.carry_out(assignment, proposals, tenants, moves=moves)
        else:
            assignment.place(proposals, tenants)
            if assignment.config.controller.queue == "controller":
                exchange(assignment)
        waiting = {j: o for j, o in assignment.outcomes.items() if o.waits and not o.changed}
        for outcome in waiting.values():
            if outcome.target is None:
                outcome.reason = outcome.waits
        others = [j for j in asked if j not in waiting]
        idle = any(assignment.idle().values())
        if offers == _MOST_OFFERS or len(others) == len(asked) or not others or not idle:
            break
        asked = others
        assignment.later, assignment.outcomes = before.copy(), {**kept, **waiting}
        kept = dict(assignment.outcomes)
        proposals, _ = ask(asked)
    if not assignment.gate.open:
        consolidate(assignment)
