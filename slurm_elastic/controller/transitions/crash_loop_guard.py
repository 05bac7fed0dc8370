"""Hold of jobs that are requeued repeatedly and make no progress.

Progress is defined in `attempt_progress`. The hold is Slurm's own, of the kind that the job's
owner can release (`scontrol release`, or `selastic release`) after fixing the script. A job is
held nowhere else.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.state import attempt_progress
from slurm_elastic.controller.state.attempt_progress import AttemptProgress, Verdict
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.failed_changes import exhausted
from slurm_elastic.controller.transitions.steps.state_steps import HELD
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.plan import Action
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.readers.pyslurm_records import LAUNCH_FAILED
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError, SlurmUnreachableError

#: Prefix of the comment of a held job, for users of Slurm's own tools.
COMMENT = "selastic: held, "


class CrashLoopGuard:
    """Attempts of all elastic jobs, and holds.

    Args:
        scontrol: writes.
        config: the site's.
        store: records of jobs.
        ledger: where holds are kept for `selastic history`.
        log: structlog logger.
        counts: of holds, for metrics.
    """

    def __init__(
        self,
        scontrol: Scontrol,
        config: Config,
        store: JobStore,
        ledger: Ledger,
        log: Any,
        *,
        counts: ActivityCounts | None = None,
    ) -> None:
        self._scontrol, self.config, self._store = scontrol, config, store
        self._ledger, self._log = ledger, log
        self._advised: set[str] = set()
        self._counts = counts or ActivityCounts()

    def review(self, snapshot: Snapshot, live: Mapping[int, Any], *, act: bool) -> None:
        """Count attempts that are over, hold jobs without progress, end holds that were released.

        Args:
            snapshot: read just now.
            live: transitions under way, by job.
            act: whether anything may be done to jobs.

        Raises:
            SlurmUnreachableError: slurmctld does not answer.
            LedgerError: a hold could not be written, and was not begun.
        """
        for job in snapshot.jobs:
            if not job.elastic or job.state is JobState.ENDED:
                continue
            entry = self._store.entry(job)
            watch = entry.watch
            last_run = watch.run
            self._follow(watch, job, snapshot, by_transition=job.job_id in live)
            if watch.run != last_run:
                self._store.touch(job)
            due = self._due(entry)
            if not act:
                self._advise(due, job)
            elif job.job_id in live:
                continue
            elif watch.why:
                self._follow_hold(watch, job)
            elif job.state is JobState.PENDING and due and job.reason not in HELD:
                self._hold(watch, due, job)

    def _due(self, entry: StoredJob) -> Reason | None:
        """Return why a job is to be held once it is in the queue; None: it is not."""
        most, watch, trials = self.config.limits.vain_attempts, entry.watch, entry.trials
        if trials.failure is not None and exhausted(trials, most):
            return Reason(
                "trials-failed",
                attempts=trials.failures,
                step=trials.newest,
                reason=trials.failure,
            )
        if 0 < most <= watch.vain:
            return attempt_progress.no_progress(watch.vain, watch.mark, watch.code)
        return None

    def _follow(
        self, watch: AttemptProgress, job: Job, snapshot: Snapshot, *, by_transition: bool
    ) -> None:
        watch.excused = watch.excused or by_transition
        if job.run == watch.run + 1 and watch.run >= 0:
            lost = any(
                name not in snapshot.node or not snapshot.node[name].available
                for name in watch.nodes
            )
            watch.excused = watch.excused or lost or job.reason == LAUNCH_FAILED
            watch.code = job.exit_code
            code = watch.code or watch.ended or 0
            if attempt_progress.close(watch, at=_back_at(job)) is Verdict.VAIN:
                step = "none" if watch.mark is None else watch.mark
                self._log.warning(
                    f"JobId={job.display_id} Run={job.run - 1} Progress=none ExitCode={code} "
                    f"Checkpoint={step} InVain={watch.vain}"
                )
                watch.code = code  # for the words of a hold
        elif job.run != watch.run:
            attempt_progress.begin(watch, job.run, at=_back_at(job))
        if job.state is JobState.RUNNING and job.allocation is not None:
            watch.since, watch.nodes = job.start_time, list(job.allocation.nodes)
        if job.state is JobState.RUNNING:
            watch.code = 0

    def _advise(self, due: Reason | None, job: Job) -> None:
        """Log once which job would be held, where nothing may be done."""
        if due and job.key not in self._advised:
            self._advised.add(job.key)
            self._log.warning(f"JobId={job.display_id} Action=hold Mode=advise Reason={due}")

    def _hold(self, watch: AttemptProgress, due: Reason, job: Job) -> None:
        watch.why = due
        self._store.command(job, watch=watch)
        try:
            self._scontrol.hold(job)
        except SlurmUnreachableError:
            watch.why = None
            raise
        except ScontrolError as error:
            watch.why = None
            self._log.warning(f"JobId={job.display_id} Problem={error}")
            return
        self._counts.job_held()
        self._log.warning(
            f"JobId={job.display_id} Action=hold Reason={watch.why} "
            f"Remedy='mend it, then: selastic release {job.display_id}'"
        )
        if not job.comment or job.comment.startswith(COMMENT):
            self._comment(job, COMMENT + str(watch.why))
        noted = Transition.of(
            job,
            action=Action.HOLD,
            reason=watch.why,
            state=TransitionState.DONE,
            entered={TransitionState.DONE.value: time.time()},
        )
        id_ = self._ledger.add_transition(job.job_id, job.key, noted.to_body())
        self._ledger.put_transition(id_, TransitionState.DONE.value, noted.to_body(), live=False)

    def _follow_hold(self, watch: AttemptProgress, job: Job) -> None:
        """Follow a held job until it is released."""
        if job.state is JobState.PENDING and job.reason in HELD:
            if not watch.freed:
                return
            try:
                self._scontrol.release(job)
            except SlurmUnreachableError:
                raise
            except ScontrolError as error:
                self._log.warning(f"JobId={job.display_id} Problem={error}")
                return
        if job.comment.startswith(COMMENT):
            self._comment(job, "")
        self._log.info(f"JobId={job.display_id} Hold=released")
        watch.why, watch.freed, watch.vain = None, False, 0
        self._store.entry(job).clear_failures()
        self._store.command(job, watch=watch)

    def _comment(self, job: Job, text: str) -> None:
        """Set the comment; a failure changes neither hold nor release."""
        try:
            self._scontrol.update(job, {"Comment": text})
        except ScontrolError as error:
            self._log.warning(f"JobId={job.display_id} Problem={error}")


def _back_at(job: Job) -> float | None:
    """Return when a job came back to the queue: Slurm then sets its submit time anew."""
    return job.submit_time if job.state is JobState.PENDING else None
