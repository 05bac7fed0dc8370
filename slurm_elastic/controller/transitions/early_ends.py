"""Jobs whose batch script fails soon after a change, before esrun has reported.

esrun keeps a job when its program fails on trial. It cannot where the batch script itself fails
before it reaches esrun (`module load` on another node, `set -e`): Slurm ends the job. Slurm lets an
operator requeue an ended job as long as it lists it (`MinJobAge`), so the job is sent back to the
queue, and from there to where it worked last (docs/reliability.md, "A change that fails").

What decides that stands in the ledger, so that a controller that was started in between decides the
same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Seconds from the start within which a script fails before it reaches esrun (our choice).
_SOON_S = 120.0


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
        """Send jobs back to the queue that have just failed; before the store records their end.

        Args:
            snapshot: read just now.
            live: transitions under way, by job.
            act: whether anything may be done to jobs.

        Raises:
            LedgerError: a failure could not be written; nothing is done.
        """
        ended = [job for job in snapshot.jobs if job.elastic and job.state is JobState.ENDED]
        attempts = {(job.key, job.run) for job in ended}
        for job in ended:
            if (job.key, job.run) not in self._judged and act and job.job_id not in live:
                transition = self._beginning(job)
                if transition is not None:
                    self._send_back(job, transition, now=snapshot.time)
        self._judged = attempts

    def _beginning(self, job: Job) -> Transition | None:
        """Return the change after which a job failed at once; None: it has ended for good."""
        if job.end_state != "FAILED" or not job.exit_code or not job.requeueable:
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
        rows = self._ledger.ended_transitions(job.job_id, job.key)
        try:
            last = Transition.from_body(rows[-1])
        except (IndexError, ValueError):
            return None
        started = TransitionState.RELEASE.value in last.entered and last.target is not None
        run = last.run + (last.old is not None)
        return last if started and run == job.run else None

    def _send_back(self, job: Job, transition: Transition, *, now: float) -> None:
        trials = self._store.entry(job).trials
        trials.follow(job.run, transition.target, now=now)
        trials.begun(job.run, transition.id)
        trials.fail(Reason("program-failed", exit_code=job.exit_code), now=now)
        self._store.command(job)
        try:
            self._scontrol.requeue_ended(job)
        except ScontrolError as error:
            self._log.warning(f"JobId={job.display_id} Action=requeue Problem={error}")
            return
        self._log.warning(
            f"JobId={job.display_id} Run={job.run} Change=failed Action=requeue "
            f"ExitCode={job.exit_code}"
        )
