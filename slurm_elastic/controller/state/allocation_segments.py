"""Segments of the ledger: the allocation of each run of a job, with its beginning and end."""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Job, JobState, Snapshot


class AllocationSegments:
    """Open segments of all jobs. Not thread-safe: `JobStore` holds its lock.

    Args:
        ledger: where the segments are kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Runs with an open segment, by the key of the job.
        self._runs: dict[str, int] = {k: s["run"] for k, s in ledger.open_segments().items()}

    def observe(self, snapshot: Snapshot, alive: Mapping[str, Job]) -> None:
        """End the segments of runs that are over, and begin those of new runs.

        Args:
            snapshot: the present one.
            alive: its jobs that have not ended, by key.

        Raises:
            LedgerError: a segment could not be written.
        """
        ended = {j.key: j for j in snapshot.jobs if j.state is JobState.ENDED}
        for key, run in list(self._runs.items()):
            job = alive.get(key)
            if job is None or job.run != run or job.state is JobState.PENDING:
                ended_job = ended.get(key)
                end = ended_job.end_time if ended_job and ended_job.end_time else snapshot.time
                self._ledger.end_segment(key, end)
                del self._runs[key]
        for key, job in alive.items():
            if key in self._runs or not job.elastic or job.state is not JobState.RUNNING:
                continue
            held = job.allocation
            if held is None:
                continue
            self._ledger.begin_segment(
                {
                    "key": key,
                    "job_id": job.job_id,
                    "user": job.user,
                    "name": job.name,
                    "run": job.run,
                    "gpu_type": held.gpu_type,
                    "gpus": held.gpus,
                    "nodes": ",".join(f"{n}:{g}" for n, g in held.shares),
                    "start": job.start_time or snapshot.time,
                }
            )
            self._runs[key] = job.run
