"""Ends of elastic jobs: written when they are first seen, read by `selastic explain`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from slurm_elastic.controller.state.job_ending import EndedJob, JobEnding, last_allocation
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.controller.state.stored_job import StoredJob
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.plan import JobRecord


class EndedJobs:
    """Ends of jobs in the ledger. Not thread-safe: `JobStore` holds its lock.

    Args:
        ledger: where the records of jobs are kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Elastic jobs of the last snapshot that had not ended, by key.
        self._alive: dict[str, Job] = {}
        #: Ends that are written, as long as Slurm shows the jobs.
        self._written: dict[str, JobEnding] = {}

    def observe(
        self,
        snapshot: Snapshot,
        alive: Mapping[str, Job],
        record: Callable[[Job], StoredJob | None],
    ) -> None:
        """Write the ends that a snapshot shows, and of jobs that it no longer has.

        Args:
            snapshot: the present one.
            alive: its jobs that have not ended, by key.
            record: returns the stored record of a job; None without one.

        Raises:
            LedgerError: one could not be written.
        """
        endings = {
            job.key: (job, JobEnding.of(job))
            for job in snapshot.jobs
            if job.submission is not None and job.key not in alive
        }
        shown = {key: ending for key, (_, ending) in endings.items()}
        for key, job in self._alive.items():
            if key not in alive and key not in endings:  # no longer listed before its end was seen
                unknown = dataclasses.replace(JobEnding.of(job), exit_code=0, time=snapshot.time)
                endings[key] = (job, unknown)
        self._alive = {k: j for k, j in alive.items() if j.submission is not None}
        for key, (job, ending) in endings.items():
            if self._written.get(key) != ending:
                self._write(job, ending, record(job) or StoredJob(job.job_id))
        self._written = shown

    def _write(self, job: Job, ending: JobEnding, entry: StoredJob) -> None:
        if entry.ending == ending:
            return
        entry.ending = ending
        if entry.watch.run >= 0:  # an attempt after a requeue by hand is not counted
            entry.watch.run = -1
            entry.trials.end()
        self._ledger.put_job(job.key, job.job_id, entry.to_body())

    def of(self, job_id: int, job: Job | None = None) -> EndedJob | None:
        """Return the record of a job that has ended; None without one.

        Args:
            job_id: raw id.
            job: as Slurm shows it; None: Slurm no longer lists it.

        Raises:
            LedgerError: the ledger cannot be read.
        """
        key = job.key if job else self._ledger.key_of(job_id)
        body = self._ledger.get_job(key) if key else None
        try:
            entry = StoredJob.from_body(body) if body else StoredJob(job_id)
        except (KeyError, TypeError, ValueError, AttributeError):
            entry = StoredJob(job_id)
        if job is None:
            if entry.ending is None:
                return None
            job = entry.ending.job(job_id)
        segment = self._ledger.last_segment(key) if key else None
        return EndedJob(
            job=job,
            record=JobRecord(
                job_id=job_id,
                proven=entry.proven,
                unproven=None if entry.proven else entry.rehearsal.why,
                jump=entry.jump,
                checkpoint_s=entry.checkpoint_s,
                restart_s=entry.restart_s,
                progress=entry.progress,
                resizes=entry.resizes,
                stopped=entry.watch.why,
                barred=entry.trials.shapes.left_out,
                half_barred=entry.trials.shapes.half_barred,
            ),
            reported=entry.reported or entry.proven or entry.watch.told,
            held=last_allocation(segment) if segment else None,
            runs=int(segment["runs"]) if segment else 0,
        )
