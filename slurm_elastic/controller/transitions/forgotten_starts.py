"""Attempts that run although slurmctld has forgotten their start: they are requeued.

A slurmctld that is killed forgets the changes of its last seconds. Where that was a requeue and the
start after it, the job is running for it in the attempt before, on the GPUs of that one. Releases
before 25.11 do not see that a node runs another attempt, which may use GPUs that slurmctld takes
for idle and gives to other jobs. That attempt reports under its own number. It counts only if the
job's last change has started it: the environment of a job may give its attempt a wrong number.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.transitions.steps.step_inputs import started_run
from slurm_elastic.controller.transitions.transition_records import last_change
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError

#: Seconds for which such reports arrive until the job is requeued (our choice): a snapshot may be
#: older than the newest report.
_SURE_S = 15.0


class ForgottenStarts:
    """Running jobs whose reports are of a later attempt than the one that Slurm knows.

    Args:
        scontrol: writes.
        store: has the reports.
        ledger: has the transitions.
        log: structlog logger.
    """

    def __init__(self, scontrol: Scontrol, store: JobStore, ledger: Ledger, log: Any) -> None:
        self._scontrol, self._store = scontrol, store
        self._ledger, self._log = ledger, log
        self._since: dict[tuple[str, int], float] = {}
        self._requeued: set[tuple[str, int]] = set()

    def review(self, snapshot: Snapshot, live: Container[int]) -> None:
        """Requeue, once, each job for which such reports have arrived for a while.

        Args:
            snapshot: read just now.
            live: ids of jobs with a transition under way, which sees to it itself.
        """
        since: dict[tuple[str, int], float] = {}
        for job in snapshot.jobs:
            if not job.elastic or job.state is not JobState.RUNNING or job.job_id in live:
                continue
            report, reported = self._store.last_report(job.job_id), self._store.reported(job.job_id)
            if report is None or reported is None or report.run <= job.run:
                continue
            attempt = (job.key, job.run)
            since[attempt] = self._since.get(attempt, snapshot.time)
            is_sure = reported - since[attempt] >= _SURE_S and attempt not in self._requeued
            if is_sure and self._was_started(job, report.run):
                self._requeue(job, reported=report.run)
        self._since = since
        self._requeued &= since.keys()

    def _was_started(self, job: Job, run: int) -> bool:
        """Return whether the last change of a job has started this attempt."""
        last = last_change(self._ledger, job)
        return last is not None and started_run(last) == run

    def _requeue(self, job: Job, *, reported: int) -> None:
        self._requeued.add((job.key, job.run))
        words = f"JobId={job.display_id} Run={job.run} ReportedRun={reported} Start=forgotten"
        if not job.requeueable:
            self._log.warning(f"{words} Problem=the job was submitted with --no-requeue")
            return
        try:
            self._scontrol.requeue(job)
        except ScontrolError as error:
            self._log.warning(f"{words} Action=requeue Problem={error}")
            return
        self._log.warning(f"{words} Action=requeue")
