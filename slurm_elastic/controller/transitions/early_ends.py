"""Jobs that end by a change, or cannot be launched after it: they are sent back to the queue.

A slurmctld that is killed forgets what it has done in the last seconds. If that was a requeue of
ours, it takes the attempt, which that requeue has ended, for one that has failed. `TransitionSteps`
goes on with a change that is under way; here are those that were over, or whose controller died.

esrun keeps a job when its program fails on trial. It cannot where the batch script itself fails
before it reaches esrun (`module load` on another node, `set -e`): Slurm ends the job. Slurm lets an
operator requeue an ended job as long as it lists it (`MinJobAge`), so the job is sent back to the
queue, and from there to where it worked last (docs/reliability-failed-changes.md).

Where a Prolog fails that runs for some seconds (a health check), the change is over by then, as the
job was running. Slurm drains the node, and holds the job. The job would not be there without the
change, so the hold is lifted. A job that Slurm itself had sent there stays held.

What decides that stands in the ledger, so that a controller that was started in between decides the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.steps.step_inputs import is_requeued_attempt, started_run
from slurm_elastic.controller.transitions.transition_records import changes, last_change
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.readers.pyslurm_records import LAUNCH_FAILED
from slurm_elastic.slurm.release_rules import WAIT_AFTER_REQUEUE_S
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Seconds from the start within which a script fails before it reaches esrun (our choice).
_SOON_S = 120.0
#: Seconds from a requeue, which may not have been sent, within which it ends an attempt: KillWait,
#: and some in which slurmctld may have been dead (our choice).
_REQUEUE_S = 120.0


class EarlyEnds:
    """Ends of jobs soon after a change, and their way back to the queue.

    Args:
        scontrol: writes.
        store: records of jobs.
        ledger: has the transitions.
        log: structlog logger.
    """

    def __init__(self, scontrol: Scontrol, store: JobStore, ledger: Ledger, log: Any) -> None:
        self._scontrol, self._store = scontrol, store
        self._ledger, self._log = ledger, log
        self._judged: set[tuple[str, int]] = set()

    def review(self, snapshot: Snapshot, live: Mapping[int, Transition], *, act: bool) -> None:
        """Send jobs back to the queue that have just failed, or that Slurm holds after a change.

        To be called before the store records their end.

        Args:
            snapshot: read just now.
            live: transitions under way, by job.
            act: whether anything may be done to jobs.

        Raises:
            LedgerError: a failure could not be written; nothing is done.
        """
        ended = [job for job in snapshot.jobs if job.elastic and job.state is JobState.ENDED]
        ended = [job for job in ended if job.job_id not in live]
        for job in ended:
            if (job.key, job.run) in self._judged or not act or not job.requeueable:
                continue
            if self._is_requeued(job):
                self._requeue(job, "Requeue=forgotten")
            elif (transition := self._beginning(job)) is not None:
                self._send_back(job, transition, now=snapshot.time)
        self._judged = {(job.key, job.run) for job in ended}
        for job in snapshot.jobs if act else ():
            if job.elastic and job.state is JobState.PENDING and job.reason == LAUNCH_FAILED:
                waited_s = snapshot.time - job.submit_time  # since Slurm has requeued it
                if job.job_id not in live and waited_s >= WAIT_AFTER_REQUEUE_S:
                    self._lift_hold(job)

    def _lift_hold(self, job: Job) -> None:
        """Release a job that could not be launched where the last change had sent it."""
        last = last_change(self._ledger, job)
        if last is None or started_run(last) != job.run - 1:
            return
        try:
            self._scontrol.update(job, {"StartTime": "now"})
            self._scontrol.release(job)
        except ScontrolError as error:
            self._log.warning(f"JobId={job.display_id} Action=release Problem={error}")
            return
        nodes = ",".join(last.target.nodes) if last.target else ""
        self._log.warning(
            f"JobId={job.display_id} Run={job.run} Change=launch-failed NodeList={nodes}"
            " Action=release"
        )

    def _is_requeued(self, job: Job) -> bool:
        """Return whether a change of a job had requeued the attempt that has ended now."""
        if job.end_state not in ("FAILED", "COMPLETED"):
            return False
        # After it another one may have begun, as the attempt seemed to run.
        requeued = [t for t in changes(self._ledger, job) if is_requeued_attempt(t, job)]
        if not requeued:
            return False
        last = requeued[-1]
        if "drained" in last.entered:  # the next attempt was in the queue, or has run
            return True
        waited_s = (job.end_time or 0.0) - last.entered[TransitionState.REQUEUE.value]
        return job.end_state == "FAILED" and waited_s <= _REQUEUE_S

    def _beginning(self, job: Job) -> Transition | None:
        """Return the change after which a job failed at once; None: it has ended for good."""
        if job.end_state != "FAILED" or not job.exit_code:
            return None
        if job.start_time is None or job.end_time is None:
            return None
        if job.end_time - job.start_time > _SOON_S:
            return None
        entry = self._store.entry(job)
        if entry.reported_run >= job.run or entry.trials.newest is None:
            return None
        if entry.ending is not None and entry.ending.run >= job.run:
            return None  # an earlier controller has seen this end
        last = last_change(self._ledger, job)
        return last if last is not None and started_run(last) == job.run else None

    def _send_back(self, job: Job, transition: Transition, *, now: float) -> None:
        trials = self._store.entry(job).trials
        trials.follow(job.run, transition.target, now=now)
        trials.begun(job.run, transition.id)
        trials.fail(Reason("program-failed", exit_code=job.exit_code), now=now)
        self._store.command(job)
        self._requeue(job, "Change=failed")

    def _requeue(self, job: Job, event: str) -> None:
        try:
            self._scontrol.requeue_ended(job)
        except ScontrolError as error:
            self._log.warning(f"JobId={job.display_id} Action=requeue Problem={error}")
            return
        self._log.warning(
            f"JobId={job.display_id} Run={job.run} {event} Action=requeue ExitCode={job.exit_code}"
        )
