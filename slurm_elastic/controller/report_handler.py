"""Reports of running jobs, and the orders that answer them.

Orders come from transitions (`engine`), batch tuning (`tuner`), users (layout and directive) and
the choice of plans (`plan_orders`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection
from typing import Any

from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.attempt_comparison import AttemptComparison
from slurm_elastic.controller.neighbours.neighbour_learning import NeighbourLearning
from slurm_elastic.controller.plan_orders import PlanOrders
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import LedgerError
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.controller.transitions.failed_changes import failure
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report


class ReportHandler:
    """Exchange with the running jobs. Where a method takes a job, it is as last read.

    Args:
        store: where reports are kept.
        engine: receives acknowledgements of saved jobs.
        tuner: receives the layers that may be frozen.
        log: structlog logger.
        counts: of lost steps and speeds, for metrics.
        neighbours: learns from step times; None: it is not learned.

    Attributes:
        attempts: compares each attempt with the one before.
        predicts_frozen_layers: whether the policy does (`policy_protocol.Capabilities`).
    """

    def __init__(
        self,
        *,
        store: JobStore,
        engine: TransitionEngine,
        tuner: BatchTuner,
        log: Any,
        counts: ActivityCounts | None = None,
        neighbours: NeighbourLearning | None = None,
    ) -> None:
        self._neighbours = neighbours
        self._counts = counts or ActivityCounts()
        self.attempts = AttemptComparison(self._counts)
        self._store, self._engine, self._tuner, self._log = store, engine, tuner, log
        self._outbox = engine.outbox
        self._plans = PlanOrders(store, live=engine.live, log=log)
        self.predicts_frozen_layers = False
        self._measuring: dict[int, Transition] = {}

    def handle(self, report: Report, job: Job | None, *, act: bool) -> bool:
        """Record a report.

        Args:
            report: the report.
            job: of the report; None: not known yet.
            act: whether layers may be frozen by the answer.

        Returns:
            Whether something that matters for a decision has changed.
        """
        news = False
        if job is not None:
            now = time.time()
            self._note_change(report, job)
            self._plans.acts = act
            self._plans.answer_lack_of_memory(report, job)
            self._plans.learn_lack_in_companion(report, job)
            news = self._store.record_report(report, job, now)
            if self._neighbours is not None:
                self._neighbours.report(report, job, now)
            if report.run == job.run:
                by_change = self._store.entry(job).trials.changed_run == job.run
                self.attempts.record(report, job.allocation, by_change=by_change)
            self._answer_failure(report, job)
            try:
                self._measure(report, job, now)
                if news:
                    self._rehearsed(report, job)
            except LedgerError as error:
                self._log.error(str(error))
            if act and not self._store.entry(job).held:
                learned = (
                    self._store.freezable(job, report) if self.predicts_frozen_layers else None
                )
                self._tuner.answer_report(
                    job, report, directive=self._store.allowed_directive(job), learned=learned
                )
            self._plans.consider(job, report)
        if report.phase == "saving" and report.notice is not None:
            self._engine.note_saving(report.job_id, report.run, report.notice)
        elif report.phase == "saved" and report.notice is not None:
            self._engine.acknowledge(report.job_id, report.run, report.notice, step=report.step)
        return news

    def _note_change(self, report: Report, job: Job) -> None:
        """Record the transition that has begun an attempt which reports before that is over."""
        transition = self._engine.live.get(report.job_id)
        if transition is not None and transition.target and transition.run < report.run:
            self._store.entry(job).trials.begun(report.run, transition.id)

    def _answer_failure(self, report: Report, job: Job) -> None:
        """Answer an esrun that waits since its program has failed on trial."""
        trials = self._store.entry(job).trials
        if report.failed_start is None or not job.run == report.run == trials.run:
            return
        answer = (report.failed_start, "end")
        by_plan = self._store.failed_by_plan(job, report)
        if trials.failure is not None or self._store.lost_node(job):
            answer = (report.failed_start, "wait")
        elif report.failed_start <= trials.restarts or by_plan:
            answer = (report.failed_start, "restart")
        orders = self._outbox.orders(job.job_id, report.run)
        if (orders.failed_start, orders.on_failure) != answer:
            if by_plan and not report.out_of_memory:  # which `PlanOrders` logs
                plan = self._store.entry(job).plan_trials.ordered or "own"
                start = f"JobId={job.job_id} FailedStart={report.failed_start}"
                self._log.warning(f"{start} Plan={plan}")
            orders = Orders(failed_start=answer[0], on_failure=answer[1])
            reason = failure(job, trials) if trials.failure else None
            self._outbox.ask(job.job_id, orders, run=report.run, reason=reason)

    def orders(self, job_id: int, run: int, *, job: Job | None) -> Orders:
        """Return the orders of one attempt; users' orders are in the first answer already."""
        if job is not None:
            self.send_settings(job)
        return self._outbox.orders(job_id, run)

    def reason(self, job_id: int, run: int) -> Reason | None:
        """Return the reason of what one attempt is asked, or None."""
        return self._outbox.reason(job_id, run)

    def send_settings(self, job: Job) -> None:
        """Send a job the layout or plan that is ordered, and its owner's directive, if new.

        A setting for other GPUs than the job holds goes to the attempt that will have them: the
        present one would restart in vain.
        """
        entry, directive = self._store.entry(job), self._store.allowed_directive(job)
        held = job.allocation
        ordered = self._plans.ordered(job)
        plan = ExecutionPlan.parse(ordered) if ordered else None
        waits = stays = False
        if held and held.gpus:
            waits = plan is not None and plan.world != held.gpus
            stays = directive is not None and not directive.allows(held.gpus, held.gpu_type)
        self._outbox.tell(
            job.job_id,
            run=job.run + waits,
            layout=str(plan.layout) if plan else "",
            plan=str(plan) if plan and not plan.plain else "",
        )
        self._outbox.tell(job.job_id, run=job.run + stays, directive=_for_ranks(entry.override))
        in_place = self._store.in_place(job).allowed
        if in_place != self._outbox.orders(job.job_id, job.run).in_place:
            self._outbox.tell(job.job_id, run=job.run, in_place=in_place)

    def _rehearsed(self, report: Report, job: Job) -> None:
        """Act on the result of a rehearsal, or on a job's refusal of it."""
        rehearsal = self._store.entry(job).rehearsal
        if rehearsal.why is not None and rehearsal.why.code == "rehearsal-refused":
            self._engine.decline(report.job_id, report.run, rehearsal.why)
        if rehearsal.transition and rehearsal.result:
            self._engine.records.put_result(
                job, rehearsal.transition, rehearsal.result, rehearsal.why
            )

    def await_first_step(self, transition: Transition) -> None:
        """Await the first step of a job on its new GPUs, which shows what the change cost."""
        self._measuring[transition.job_id] = transition

    def forget(self, alive: Collection[int]) -> None:
        """Drop the data of jobs that are gone."""
        self._measuring = {k: t for k, t in self._measuring.items() if k in alive}
        self.attempts.forget(alive)
        self._outbox.forget(alive)

    def _measure(self, report: Report, job: Job, now: float) -> None:
        """Record the cost of a change, from its notice to the first step after it."""
        transition = self._measuring.get(report.job_id)
        if transition is None or report.startup_s is None or not _is_after(report, transition):
            return  # its first step is still to come, or it is a script without steps
        del self._measuring[report.job_id]
        transition.entered["first_step"] = now
        transition.startup_s, transition.restore_s = report.startup_s, report.restore_s
        transition.checkpoint_s = report.checkpoint_s
        if transition.by_companions:
            transition.pause_s = now - transition.entered.get("saved", now)
        total = transition.seconds()["total"]
        if total is not None and transition.by_companions:
            self._store.entry(job).placed.restart_s = total
            self._store.touch(job)
        elif total is not None:
            self._store.command(job, restart_s=total)
        self._counts.training_again(transition)
        self._engine.records.put(transition)
        self._log.info(f"{transition} State=training Seconds={transition.seconds_text()}")


def _is_after(report: Report, transition: Transition) -> bool:
    """Return whether a report is of the program that was started by a transition."""
    if transition.by_companions:
        answer = (report.run, report.change, report.change_state)
        return answer == (transition.run, transition.id, "done")
    return report.run > transition.run


def _for_ranks(override: str) -> str:
    """Return an ordered directive without the keys `sizes` and `plan`.

    Ranks do not use them, and the library of an earlier release cannot read them.
    """
    if not override:
        return ""
    return str(dataclasses.replace(Directive.parse(override), listed=(), plan="own"))
