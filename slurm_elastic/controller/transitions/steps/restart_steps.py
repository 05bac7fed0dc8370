"""Steps of a restart of all ranks on other companions, without a requeue.

As a change in place, but for programs that cannot regroup: once the new companions run, the job is
asked to save; then esrun ends the ranks and starts the program again on the base and the companions
that it has by then (docs/adr/0018-in-place-changes.md).
"""

from __future__ import annotations

import time
from typing import Any

from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.order_outbox import OrderOutbox
from slurm_elastic.controller.transitions.steps.in_place_steps import JOIN_S, LEAVE_S, InPlaceSteps
from slurm_elastic.controller.transitions.steps.state_steps import interruption_of
from slurm_elastic.controller.transitions.steps.step_inputs import StepInputs
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.member_orders import MemberOrders
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import Scontrol

#: States in which the ranks are ended and started again.
_RESTARTING = (TransitionState.JOIN, TransitionState.LEAVE)


class RestartSteps(InPlaceSteps):
    """Actions of the states."""

    def __init__(self, scontrol: Scontrol, outbox: OrderOutbox, log: Any) -> None:
        super().__init__(scontrol, outbox, log)
        self._actions[TransitionState.NOTIFY] = self._notify

    def _members_due(self, t: Transition) -> TransitionState:
        # A program that has failed is not asked to save.
        return super()._members_due(t) if t.failed else TransitionState.NOTIFY

    def _notify(self, t: Transition, job: Job, _: StepInputs) -> TransitionState | None:
        if interruption := interruption_of(t, job):
            return self._given_up(t, interruption)
        if "saved" in t.entered:
            return super()._members_due(t)
        if t.waited(time.time()) > t.notice_s:
            t.entered["unanswered"] = time.time()
            return self._given_up(t, Reason("no-checkpoint", notice_s=t.notice_s))
        return None

    def _orders(self, t: Transition, *, leave: bool, cancel: bool) -> MemberOrders:
        return MemberOrders(
            change=t.id,
            join=tuple(j.gpus for j in t.joins),
            gpu_type=t.target.gpu_type if t.target else "",
            leave=t.leaves if leave else (),
            deadline_s=t.notice_s + (JOIN_S if t.joins else LEAVE_S),
            cancel=cancel,
            restart="now" if t.state in _RESTARTING else "prepare",
        )
