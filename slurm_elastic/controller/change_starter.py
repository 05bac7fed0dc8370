"""Start of the changes that a round has decided: kind, notice, time limit, a line in the log."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.log_format import log_line
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.transitions import rehearsal_choice
from slurm_elastic.controller.transitions.failed_changes import FailedChanges
from slurm_elastic.controller.transitions.limit_extension import allowed
from slurm_elastic.controller.transitions.requested_change import RequestedChange
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.member_orders import MAX_COMPANIONS
from slurm_elastic.core.plan import Decision, JobRecord, Plan
from slurm_elastic.core.resize_kind import (
    CompanionChange,
    ResizeKind,
    change_by_restart,
    change_in_place,
)
from slurm_elastic.placement.companion_sizes import companion_sizes


class ChangeStarter:
    """Start of transitions of three kinds: planned changes, rehearsals, and ways back.

    Args:
        store: records of jobs.
        engine: carries out the transitions.
        tuner: gets each change before its job restarts.
        config: the site's.
        log: structlog logger.
    """

    def __init__(
        self,
        store: JobStore,
        engine: TransitionEngine,
        tuner: BatchTuner,
        config: Config,
        log: Any,
    ) -> None:
        self._store, self._engine, self._tuner = store, engine, tuner
        self.config, self._log = config, log

    def begin_planned(
        self, snapshot: Snapshot, plan: Plan, records: Mapping[int, JobRecord]
    ) -> set[int]:
        """Begin as many changes of a plan as may be under way; return their jobs."""
        room = self.config.resize.max_in_flight - len(self._engine.live)
        current = [d for d in plan.changes if not self._is_outdated(snapshot.job[d.job_id])]
        decisions = current[: max(0, room)]
        chosen = {d.job_id for d in decisions}
        changes = []
        for decision in decisions:
            if not chosen.issuperset(decision.requires):
                continue
            job = snapshot.job[decision.job_id]
            record = records.get(job.job_id)
            kind = ResizeKind.REQUEUE
            if record and not decision.exchange:
                kind = record.kind_of(job, decision.target)
            changes.append(self._of_kind(kind, decision, job, snapshot, records))
        return self._begin(changes, snapshot, records) if changes else set()

    def _is_outdated(self, job: Job) -> bool:
        """Return whether a job's directive has changed since the plan was made."""
        return self._store.allowed_directive(job) != job.directive

    def begin_rehearsals(
        self, snapshot: Snapshot, plan: Plan, records: Mapping[int, JobRecord]
    ) -> set[int]:
        """Begin the rehearsals that are due; return their jobs."""
        live = self._engine.live
        rehearsals = self._store.rehearsals(snapshot)
        decisions = rehearsal_choice.due(
            snapshot,
            records=records,
            rehearsals=rehearsals,
            reports=self._store.last_reports(snapshot),
            config=self.config,
            live=[t.action for t in live.values()],
            busy={*live, *(d.job_id for d in plan.changes)},
            spent=self._store.resized(time.time(), live.values()),
        )
        begun = set()
        for decision in decisions:  # one by one: each in a reservation of its own
            job = snapshot.job[decision.job_id]
            change = self._requested(decision, job, snapshot, records)
            notice_s = max(rehearsal_choice.NOTICE_S, change.notice_s)
            if self._engine.begin([change._replace(notice_s=notice_s)]):
                rehearsals[job.job_id].begin()
                self._store.touch(job)
                self._log.info(log_line(decision, snapshot))
                begun.add(job.job_id)
        return begun

    def begin_ways_back(self, failed_changes: FailedChanges, snapshot: Snapshot) -> None:
        """Begin the way back of each job whose change has failed."""
        live = self._engine.live
        due = failed_changes.due(snapshot, live)
        if not due:
            return
        records = self._store.records(snapshot, live)
        for decision, job in due:  # one by one: their nodes may be in several reservations
            may_restart = self._store.in_place(job).may_restart(
                snapshot.time, on_own=decision.target == job.base_allocation
            )
            kind = ResizeKind.RESTART if may_restart else ResizeKind.REQUEUE
            change = self._of_kind(kind, decision, job, snapshot, records)
            self._begin([change._replace(failed=True)], snapshot, records)

    def _begin(
        self,
        changes: list[RequestedChange],
        snapshot: Snapshot,
        records: Mapping[int, JobRecord],
    ) -> set[int]:
        """Begin changes in one reservation; return the jobs of those that could begin."""
        begun = self._engine.begin(changes)
        requeued = {c.job.job_id for c in changes if c.kind is ResizeKind.REQUEUE}
        ahead = [d for d in begun if d.job_id in requeued]
        self._tuner.ahead(ahead, snapshot, records, self._store.last_reports(snapshot))
        for decision in begun:
            self._log.info(log_line(decision, snapshot))
        return {d.job_id for d in begun}

    def _requested(
        self,
        decision: Decision,
        job: Job,
        snapshot: Snapshot,
        records: Mapping[int, JobRecord],
    ) -> RequestedChange:
        """Return a change by requeue with the time that its job gets."""
        spare_s = self._store.spare_s(job)
        time_left = allowed(
            job,
            decision,
            self._store.entry(job).budget,
            snapshot=snapshot,
            records=records,
            config=self.config,
            spare_s=spare_s,
        )
        change = RequestedChange(decision, job, self._notice_s(job), spare_s, *time_left)
        return change._replace(leaves=tuple(c.job_id for c in job.companions))

    def _of_kind(
        self,
        kind: ResizeKind,
        decision: Decision,
        job: Job,
        snapshot: Snapshot,
        records: Mapping[int, JobRecord],
    ) -> RequestedChange:
        """Return a change of this kind, or a requeue where companions do not lead to its target."""
        members = None if kind is ResizeKind.REQUEUE else self._members(kind, decision, job)
        if members is None:
            return self._requested(decision, job, snapshot, records)
        leaves = tuple(job.companions[i].job_id for i in members.leave)
        return RequestedChange(
            decision,
            job,
            self._notice_s(job),
            kind=kind,
            joins=members.join,
            leaves=leaves,
        )

    def _members(self, kind: ResizeKind, decision: Decision, job: Job) -> CompanionChange | None:
        """Return the companions that join and leave; None: the job has to be requeued."""
        target = decision.target
        if target is None or target == job.allocation:
            return None
        is_restart = kind is ResizeKind.RESTART
        members = (change_by_restart if is_restart else change_in_place)(job, target)
        if members is None or len(job.companions) + len(members.join) > MAX_COMPANIONS:
            return None
        directive = self._store.allowed_directive(job)
        if is_restart or directive is None or not members.join:
            return members
        held = target.gpus - sum(gpus for _, gpus in members.join)
        joins = companion_sizes(directive, target.gpu_type, held, members.join)
        if len(job.companions) + len(joins) > MAX_COMPANIONS:
            return members
        return dataclasses.replace(members, join=joins)

    def _notice_s(self, job: Job) -> float:
        directive = self._store.allowed_directive(job)
        notice_s = directive.notice_s if directive else None
        return float(notice_s or self.config.resize.notice_s)
