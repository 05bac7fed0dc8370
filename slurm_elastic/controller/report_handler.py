"""Reports of running jobs, and the orders that answer them.

Orders come from transitions (`engine`), batch tuning (`tuner`) and users: layout and directive,
layers to freeze, and one rehearsal that shows that a script resumes.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from slurm_elastic.controller.batch_tuning import BatchTuner
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import LedgerError
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Orders, Report

_PROVE = Orders(action="rehearse")


class ReportHandler:
    """Exchange with the running jobs. Where a method takes a job, it is as last read.

    Args:
        store: where reports are kept.
        engine: receives acknowledgements of saved jobs.
        tuner: receives the layers that may be frozen.
        log: structlog logger.

    Attributes:
        predicts_frozen_layers: whether the policy does (`policy_protocol.Capabilities`).
    """

    def __init__(
        self, *, store: JobStore, engine: TransitionEngine, tuner: BatchTuner, log: Any
    ) -> None:
        self._store, self._engine, self._tuner, self._log = store, engine, tuner, log
        self._outbox = engine.outbox
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
            news = self._store.record_report(report, job, now)
            try:
                self._measure(report, job, now)
            except LedgerError as error:
                self._log.error(str(error))
            if act and not self._store.entry(job).held:
                learned = (
                    self._store.freezable(job, report) if self.predicts_frozen_layers else None
                )
                self._tuner.answer_report(
                    job, report, directive=self._store.directive(job), learned=learned
                )
        if report.phase == "saved" and report.notice is not None:
            self._engine.acknowledge(report.job_id, report.run, report.notice, step=report.step)
        return news

    def orders(self, job_id: int, run: int, *, job: Job | None) -> Orders:
        """Return the orders of one attempt; users' orders are in the first answer already."""
        if job is not None:
            self.stand(job)
        return self._outbox.orders(job_id, run)

    def reason(self, job_id: int, run: int) -> Reason | None:
        """Return the reason of what one attempt is asked, or None."""
        return self._outbox.reason(job_id, run)

    def stand(self, job: Job) -> None:
        """Send a job the layout and directive that users ordered, if they are new.

        A setting for other GPUs than the job holds goes to the attempt that will have them: the
        present one would restart in vain.
        """
        entry, held, directive = self._store.entry(job), job.allocation, self._store.directive(job)
        waits = stays = False
        if held and held.gpus:
            waits = entry.layout != "" and LayoutText.parse(entry.layout).world != held.gpus
            stays = directive is not None and not directive.allows(held.gpus, held.gpu_type)
        self._outbox.tell(job.job_id, run=job.run + waits, layout=entry.layout)
        self._outbox.tell(job.job_id, run=job.run + stays, directive=entry.override)

    def prove(self, job: Job) -> None:
        """Ask an unmodified script, once, to show at its next checkpoint that it resumes."""
        report, directive = self._store.last_report(job.job_id), self._store.directive(job)
        if (
            report is not None
            and directive is not None
            and report.run == job.run
            and report.kind == "script"
            and not self._store.entry(job).proven
            and directive.min_gpus < directive.max_gpus
        ):
            reason = Reason("resume-rehearsal")
            self._outbox.ask(job.job_id, _PROVE, run=job.run, once=True, reason=reason)

    def expect(self, transition: Transition) -> None:
        """Await the first step of a job on its new GPUs, which shows what the change cost."""
        self._measuring[transition.job_id] = transition

    def forget(self, alive: Collection[int]) -> None:
        """Drop the data of jobs that are gone."""
        self._measuring = {k: t for k, t in self._measuring.items() if k in alive}
        self._outbox.forget(alive)

    def _measure(self, report: Report, job: Job, now: float) -> None:
        """Record the cost of a change, from its notice to the first step after it."""
        transition = self._measuring.get(report.job_id)
        if transition is None or report.run <= transition.run or report.startup_s is None:
            return  # its first step is still to come, or it is a script without steps
        del self._measuring[report.job_id]
        transition.entered["first_step"] = now
        transition.startup_s, transition.restore_s = report.startup_s, report.restore_s
        transition.checkpoint_s = report.checkpoint_s
        total = transition.seconds()["total"]
        if total is not None:
            self._store.command(job, restart_s=total)
        self._engine.persist(transition)
        self._log.info(f"{transition} State=training Seconds={transition.seconds_text()}")
