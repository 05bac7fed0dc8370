"""A change that a round, a rehearsal or a way back asks the engine for."""

from __future__ import annotations

import time
from typing import NamedTuple

from slurm_elastic.controller.state.time_limits import ExtensionTerms, TimeBudget
from slurm_elastic.controller.state.transition import (
    PlannedCompanion,
    Transition,
    TransitionState,
)
from slurm_elastic.controller.transitions.exchange_partners import EXCHANGE_S
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.plan import Decision
from slurm_elastic.core.resize_kind import ResizeKind


class RequestedChange(NamedTuple):
    """A change to begin.

    Attributes:
        job: as it is.
        notice_s: how long it gets to save.
        spare_s, budget, terms, failed, kind, leaves: see `Transition`.
        joins: (node, GPUs) of each companion that is to join.
    """

    decision: Decision
    job: Job
    notice_s: float
    spare_s: int = 0
    budget: TimeBudget | None = None
    terms: ExtensionTerms | None = None
    failed: bool = False
    kind: ResizeKind = ResizeKind.REQUEUE
    joins: tuple[tuple[str, int], ...] = ()
    leaves: tuple[int, ...] = ()

    @property
    def reserved_nodes(self) -> frozenset[str]:
        """Nodes that the change would reserve."""
        if self.kind is not ResizeKind.REQUEUE:
            return frozenset(node for node, _ in self.joins)
        target = self.decision.target
        return frozenset(target.nodes if target else ())

    def transition(self) -> Transition:
        """Return the transition of this change, without an id, in its first state."""
        decision, notice_s = self.decision, self.notice_s
        if decision.exchange:  # those that have saved wait for the others
            notice_s = min(notice_s, EXCHANGE_S)
        return Transition.of(
            self.job,
            action=decision.action,
            reason=decision.reason,
            target=decision.target,
            planned=decision.target,
            notice_s=notice_s,
            spare_s=self.spare_s,
            budget=self.budget,
            terms=self.terms,
            nice=self.job.nice,
            failed=self.failed,
            kind=self.kind,
            joins=[PlannedCompanion(node, gpus) for node, gpus in self.joins],
            leaves=self.leaves,
            exchange=decision.exchange,
            givers=decision.givers,
            entered={TransitionState.RESERVE.value: time.time()},
        )
