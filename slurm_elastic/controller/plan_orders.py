"""Orders of execution plans: those of users, and for jobs with `plan=auto` the controller's choice.

A job is only made to change its plan while nothing else is done to it: it is proven that it resumes
from its checkpoints, no transition is under way, and no user has ordered a layout. A program that
has run out of memory is started again in a plan that needs less, whatever is under way: it has
ended.
"""

from __future__ import annotations

import time
from collections.abc import Container
from typing import Any

from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.trials.plan_trials import failed_on
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.possible_plans import PlanCandidates
from slurm_elastic.core.execution.supported_options import SupportedOptions
from slurm_elastic.core.report import Report


class PlanOrders:
    """The plan that is ordered of each job.

    Args:
        store: where the plans of jobs are kept.
        live: ids of the jobs that a transition changes.
        log: structlog logger.

    Attributes:
        acts: whether plans may be chosen now; else those that are ordered stand.
    """

    def __init__(self, store: JobStore, *, live: Container[int], log: Any) -> None:
        self._store, self._live, self._log = store, live, log
        self.acts = False

    def consider(self, job: Job, report: Report) -> None:
        """Choose another plan, if a report of the running job is a reason to."""
        entry, directive = self._store.entry(job), self._store.allowed_directive(job)
        held = job.allocation
        if directive is None or held is None or not self._chooses(job, directive):
            return
        if report.run != job.run or report.gpus != held.gpus or report.kind != "library":
            return
        if entry.proven and not entry.held and job.job_id not in self._live:
            self._choose(job, directive, held, _restart_s(report))

    def answer_lack_of_memory(self, report: Report, job: Job) -> None:
        """Order a plan that needs less memory for a program that has run out of it.

        It is to be called before the report is recorded as the failure of a size.
        """
        if not (report.out_of_memory and report.failed_start and report.phase == "ended"):
            return
        entry, directive = self._store.entry(job), self._store.allowed_directive(job)
        held = failed_on(report, job)
        if directive is None or not held or report.run != job.run or report.kind != "library":
            return
        if not self.acts or not self._chooses(job, directive) or self._store.lost_node(job):
            return
        if entry.trials.on and entry.trials.on_half:
            return  # it goes back to a whole GPU: the job beside it may have taken the memory
        trials, now = entry.plan_trials, time.time()
        known = trials.has_answered(report)
        trials.record(report, None)
        candidates = _candidates(directive, trials.supported, held)
        is_answered = trials.lack_memory(report, candidates, held, now)
        if not known:
            self._store.touch(job)
            self._store.learning.add_plans(entry.observations, job, trials.results())
            plan = (trials.ordered or "own") if is_answered else "none"
            self._log.warning(f"JobId={job.job_id} OutOfMemory=yes Plan={plan} GPUs={held.gpus}")
        base = job.base_allocation
        if is_answered and report.failed_gpus is not None and base and base != held:
            # Its companions have ended: it is started again on its own GPUs.
            self._choose(job, directive, base, None, new_only=True)

    def learn_lack_in_companion(self, report: Report, job: Job) -> None:
        """Record the plan and GPUs with which the ranks of a companion ran out of memory.

        The others train on, without that companion. With as many GPUs again, the job begins with a
        plan that needs less.
        """
        why, change = report.change_reason, report.change
        if why is None or why.code != "companion-out-of-memory" or change is None:
            return
        entry, directive = self._store.entry(job), self._store.allowed_directive(job)
        held = job.allocation
        if directive is None or not held or report.run != job.run or report.kind != "library":
            return
        gpus, nodes = why.parameters["gpus"], why.parameters["nodes"]
        if not isinstance(gpus, int) or not isinstance(nodes, int):
            return  # a report may have any number
        if not self._chooses(job, directive) or not directive.allows(gpus, held.gpu_type):
            return
        trials = entry.plan_trials
        if report.failed_start is not None:  # all ranks have ended: `answer_lack_of_memory`
            if trials.has_answered(report):
                trials.lost_in = report.run, change
            return
        candidates = PlanCandidates(directive, trials.supported, (gpus,))
        shape = held.gpu_type, gpus, nodes
        if trials.lose_companion(report.run, change, shape, candidates):
            self._store.touch(job)
            self._store.learning.add_plans(entry.observations, job, trials.results())
            failed = trials.ordered_in(shape) or "own"
            self._log.warning(f"JobId={job.job_id} OutOfMemory=companion Plan={failed} GPUs={gpus}")

    def ordered(self, job: Job) -> str:
        """Return the plan that is ordered of a job; "": its own choice."""
        entry, directive = self._store.entry(job), self._store.allowed_directive(job)
        trials = entry.plan_trials
        if directive is None or not self._chooses(job, directive):
            if trials.shape is not None:
                trials.withdraw(time.time())
                self._store.touch(job)
            return entry.layout
        if trials.shape is not None and job.allocation and job.allocation.gpus:
            self._choose(job, directive, job.allocation, None, new_only=True)
        return trials.ordered

    def _chooses(self, job: Job, directive: Directive) -> bool:
        return directive.plan == "auto" and not self._store.entry(job).layout

    def _choose(
        self,
        job: Job,
        directive: Directive,
        held: Allocation,
        restart_s: float | None,
        *,
        new_only: bool = False,
    ) -> None:
        """Choose a plan.

        Args:
            job: running.
            directive: in force.
            held: its allocation.
            restart_s: seconds that a restart of its ranks takes; None: not known.
            new_only: only if the allocation is another one than before.
        """
        trials = self._store.entry(job).plan_trials
        if not self.acts or (new_only and not trials.is_new(held)):
            return
        changed = trials.choose(
            _candidates(directive, trials.supported, held),
            held,
            now=time.time(),
            restart_s=restart_s,
            share=self._store.learning.config.resize.plan_trials,
        )
        if changed:
            self._store.touch(job)
            self._log.info(f"JobId={job.job_id} Plan={trials.ordered or 'own'} GPUs={held.gpus}")


def _candidates(
    directive: Directive, supported: SupportedOptions, held: Allocation
) -> PlanCandidates:
    return PlanCandidates(directive, supported, tuple(held.on(node) for node in held.nodes))


def _restart_s(report: Report) -> float | None:
    """Return the seconds of a restart of the ranks in place: a save, and a start."""
    if report.startup_s is None:
        return None
    return report.startup_s + (report.checkpoint_s or 0.0)
