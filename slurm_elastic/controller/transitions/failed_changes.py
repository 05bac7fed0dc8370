"""Way back of jobs whose change has failed (docs/reliability-failed-changes.md).

The program of such a job has failed, or makes no progress, before it has completed a checkpoint
in its new shape. No save is requested: the checkpoint of before counts. `ShapeTrials` defines when
a change has failed; this module detects attempts without progress and begins the way back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.transition import Transition
from slurm_elastic.controller.state.trials.barred_shapes import shape_of
from slurm_elastic.controller.state.trials.shape_trials import ShapeTrials
from slurm_elastic.controller.transitions.admission import more
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import (
    STARTED,
    Allocation,
    Job,
    JobState,
    Snapshot,
    shape_parameters,
)
from slurm_elastic.core.gpu_parts import vacated_gpus
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason

#: Multiple of the failures after which a job is held that never came back to where it worked.
_STRAYS = 3
#: States of a companion whose ranks have failed: its script ends by itself. Others are CANCELLED by
#: people, end with their node or at their time limit.
_BY_ITSELF = ("COMPLETED", "FAILED")
#: Seconds in which esrun says whether the whole program has failed, and companions ended with it.
_REPORT_S = 10.0
#: Rounds that try to bring a job back to GPUs, as Slurm may refuse them; then it has to wait.
_MOST_WAYS = 5


class FailedChanges:
    """Attempts that fail on trial, and the allocations that their jobs return to.

    Args:
        store: records of jobs.
        engine: gives up changes of failed jobs that have not begun yet.
        config: the site's.
        log: structlog logger.
        counts: of failures, for metrics.
    """

    def __init__(
        self,
        store: JobStore,
        engine: TransitionEngine,
        config: Config,
        log: Any,
        *,
        counts: ActivityCounts | None = None,
    ) -> None:
        self._counts = counts or ActivityCounts()
        self._store, self._engine, self.config, self._log = store, engine, config, log
        #: Run and start of the last failure of each job.
        self._logged: dict[str, tuple[int, int]] = {}

    def review(self, snapshot: Snapshot, live: Mapping[int, Transition]) -> None:
        """Follow the attempts of all jobs: fail those that make no progress.

        Args:
            snapshot: read just now.
            live: transitions under way, by job.
        """
        for job in snapshot.jobs:
            if not job.elastic or job.state not in STARTED:
                continue
            trials = self._store.entry(job).trials
            if trials.run != job.run:
                continue
            if job.state is JobState.SUSPENDED:
                trials.pause(snapshot.time)
            elif job.job_id not in live and self._stalled(job, trials):
                limit_s = trials.limit_s(self.config.resize.trial_s)
                reason = Reason("no-newer-checkpoint", waited_s=limit_s)
                trials.fail(reason, now=snapshot.time)
                self._store.touch(job)
            failed = trials.failure is not None or trials.left is not None
            if failed and self._store.lost_node(job):
                trials.withdraw_failure()  # Slurm requeues it
                self._store.touch(job)
            elif failed:
                self._fail(job, trials)
        keys = {j.key for j in snapshot.jobs}
        self._logged = {k: start for k, start in self._logged.items() if k in keys}

    def review_companions(
        self, snapshot: Snapshot, live: Mapping[int, Transition], companions: Mapping[int, Job]
    ) -> None:
        """Bar changes in place of jobs that have lost a companion while that was on trial.

        The others train on, and the next round would start ranks there again and again.

        Args:
            snapshot: read just now.
            live: transitions under way, by job.
            companions: as Slurm shows them, by id.
        """
        for job in snapshot.jobs:
            if not job.elastic or job.state is not JobState.RUNNING:
                continue
            leaving = live[job.job_id].leaves if job.job_id in live else ()
            for job_id in sorted(self._store.companions(job).difference(leaving)):
                lost = companions.get(job_id)
                ended = lost is not None and lost.state is JobState.ENDED
                if lost is None or not ended or snapshot.time < (lost.end_time or 0) + _REPORT_S:
                    continue
                reason = self._reason_of_loss(job, job_id)
                by_itself = lost.end_state in _BY_ITSELF and not self._store.lost_node(lost)
                if self._store.lose_companion(job, job_id, reason if by_itself else None):
                    self._log.warning(f"JobId={job.display_id} Companion={job_id} Problem={reason}")

    def _reason_of_loss(self, job: Job, job_id: int) -> Reason:
        """Return why a companion has ended, as far as the job's esrun has said."""
        report = self._store.last_report(job.job_id)
        reason = report.change_reason if report is not None else None
        said = ("companion-out-of-memory", str(job_id))
        if reason is not None and (reason.code, reason.parameters.get("job")) == said:
            return reason
        return Reason("companion-failed", job=str(job_id))

    def _stalled(self, job: Job, trials: ShapeTrials) -> bool:
        """Return whether an attempt has reported, after its time limit, that it made no progress.

        False while no reports arrive: its progress is not known then.
        """
        report, at = self._store.last_report(job.job_id), self._store.reported(job.job_id)
        if report is None or at is None or report.run != job.run or report.phase == "ended":
            return False
        return trials.changed and trials.overdue(at, self.config.resize.trial_s)

    def _fail(self, job: Job, trials: ShapeTrials) -> None:
        is_over = trials.failure is not None  # else esrun has started the program again
        start = (job.run, 0 if is_over else trials.restarts)
        is_new = self._logged.get(job.key) != start
        if is_over or is_new:
            self._engine.abandon(job, failure(job, trials))
        if is_new:
            self._logged[job.key] = start
            self._counts.change_failed()
            self._log.warning(
                f"JobId={job.display_id} Run={job.run} Change=failed "
                f"Failures={trials.failures} Reason={failure(job, trials)}"
            )

    def due(self, snapshot: Snapshot, live: Mapping[int, Transition]) -> list[tuple[Decision, Job]]:
        """Return the ways back to begin now."""
        taken = [*live.values()]
        decisions = []
        for job in snapshot.jobs:
            if not job.elastic or job.job_id in live or not job.requeueable:
                continue
            trials = self._store.entry(job).trials
            if trials.failure is None or not _is_to_go_back(job, trials):
                continue
            target = None
            trials.ways_back += 1
            gives_up = exhausted(trials, self.config.limits.vain_attempts)
            if not gives_up and trials.ways_back <= _MOST_WAYS:
                target = way_back(job, trials, snapshot, taken)
            decision = Decision(
                job_id=job.job_id,
                current=job.allocation,
                target=target,
                action=_action(job.allocation, target),
                reason=failure(job, trials),
            )
            decisions.append((decision, job))
        return decisions


def _is_to_go_back(job: Job, trials: ShapeTrials) -> bool:
    """Return whether the attempt that failed is the present one, or has just ended the job.

    `EarlyEnds` has then sent that back to the queue, where it still has the shape that failed.
    """
    if job.state is JobState.PENDING and trials.held is not None:
        is_unchanged = set(job.required_nodes) == set(trials.held.nodes)
        is_unchanged &= bool(job.shards) == trials.held.half
        return trials.run == job.run - 1 and is_unchanged and trials.ways_back < _MOST_WAYS
    return job.state is JobState.RUNNING and trials.run == job.run


def exhausted(trials: ShapeTrials, most: int) -> bool:
    """Return whether a job has failed too often, going back included, to be started once more.

    Where it has not come back to a shape that worked, as Slurm has started it elsewhere or it had
    half of a GPU, it gets more attempts.

    Args:
        trials: of the job.
        most: `[limits] vain_attempts`; 0: no limit.
    """
    enough = max(2, most)
    is_back = shape_of(trials.held) == trials.shapes.last_shape and not trials.on_half
    returned = is_back or not trials.shapes.worked
    return most > 0 and trials.failures >= (enough if returned else _STRAYS * enough)


def failure(job: Job, trials: ShapeTrials) -> Reason:
    """Return the reason why a job goes back."""
    left = trials.left
    if trials.failure is None and left is not None:
        return Reason("change-failed", gpus=left.gpus, gpu_type=left.gpu_type, reason=left.reason)
    because = trials.failure or Reason("job-ending")
    return Reason("change-failed", **shape_parameters(job.allocation), reason=because)


def way_back(
    job: Job, trials: ShapeTrials, snapshot: Snapshot, live: Iterable[Transition]
) -> Allocation | None:
    """Return the allocation that a failed job goes back to.

    The last one that worked, or a part of the present one.

    Args:
        job: running.
        trials: its own.
        snapshot: the cluster.
        live: transitions that take GPUs.

    Returns:
        None: no shape that worked is free; the job waits for one.
    """
    taken = Counter[str]()
    for transition in live:
        taken.update(more(transition, snapshot.job))
    if trials.shapes.last is not None and _free(job, trials.shapes.last, snapshot, taken):
        return trials.shapes.last
    held = job.allocation
    for gpu_type, gpus in reversed(trials.shapes.worked):
        if held is None or gpu_type != held.gpu_type or gpus > held.gpus:
            continue
        part = _part(held, gpus)
        if _free(job, part, snapshot, Counter()):
            return part
    return None


def _free(job: Job, target: Allocation, snapshot: Snapshot, taken: Mapping[str, int]) -> bool:
    """Return whether a job may have these GPUs now, beside those that others are about to get."""
    directive, own = job.directive, vacated_gpus(job, snapshot.jobs)
    if directive is None or not directive.allows(target.gpus, target.gpu_type):
        return False
    for name, gpus in target.shares:
        node, held = snapshot.node.get(name), own.get(name, 0)
        if node is None or not node.available or name in job.excluded_nodes:
            return False
        if gpus > held and gpus > held + node.free_gpus - taken.get(name, 0):
            return False
    return True


def _part(held: Allocation, gpus: int) -> Allocation:
    """Return so many GPUs of an allocation, on as few of its nodes as possible."""
    shares: dict[str, int] = {}
    for node, count in sorted(held.shares, key=lambda share: (-share[1], share[0])):
        shares[node] = min(count, gpus - sum(shares.values()))
    return Allocation.of(held.gpu_type, shares)


def _action(held: Allocation | None, target: Allocation | None) -> Action:
    if target is None:
        return Action.PREEMPT
    gpus = held.gpus if held else 0
    if target.gpus == gpus:
        return Action.MOVE
    return Action.SHRINK if target.gpus < gpus else Action.GROW
