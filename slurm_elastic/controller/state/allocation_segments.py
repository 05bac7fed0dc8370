"""Segments of the ledger: the allocation of each run of a job, with its beginning and end.

Companions of a job have segments of their own, as Slurm's accounting has; the key of such a segment
begins with that of their base.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot


class AllocationSegments:
    """Open segments of all jobs. Not thread-safe: `JobStore` holds its lock.

    Args:
        ledger: where the segments are kept.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        #: Runs with an open segment, by the key of the segment.
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
            base_key, _, companion_id = key.partition("+")
            job = alive.get(base_key)
            if companion_id:
                over = job is None or companion_id not in {str(c.job_id) for c in job.companions}
            else:
                over = job is None or job.run != run or job.state is JobState.PENDING
            if over:
                ended_job = ended.get(key)
                end = ended_job.end_time if ended_job and ended_job.end_time else snapshot.time
                self._ledger.end_segment(key, end)
                del self._runs[key]
        for job in alive.values():
            if job.elastic and job.state is JobState.RUNNING:
                for row in _held_rows(job, snapshot.time):
                    if row["key"] not in self._runs:
                        self._ledger.begin_segment(row)
                        self._runs[row["key"]] = row["run"]


def base_of_segment(row: Mapping[str, Any]) -> int:
    """Return the id of the job that a segment counts for: that of its base for a companion."""
    base_key, _, companion_id = str(row["key"]).partition("+")
    number = base_key.partition("@")[0]
    return int(number) if companion_id and number.isdecimal() else int(row["job_id"])


def _held_rows(job: Job, now: float) -> Iterator[dict[str, Any]]:
    """Iterate over the segments of a running job: its own, and those of its companions."""
    if job.base_allocation is not None:
        start = job.start_time or now
        ids = {"key": job.key, "job_id": job.job_id, "run": job.run, "start": start}
        yield ids | _held(job, job.base_allocation)
    for companion in job.companions:
        key, start = f"{job.key}+{companion.job_id}", companion.start_time or now
        ids = {"key": key, "job_id": companion.job_id, "run": 0, "start": start}
        yield ids | _held(job, companion.allocation)


def _held(job: Job, held: Allocation) -> dict[str, Any]:
    return {
        "user": job.user,
        "name": job.name,
        "gpu_type": held.gpu_type,
        "gpus": held.amount,
        "nodes": ",".join(f"{n}:{g}" for n, g in held.shares),
    }
