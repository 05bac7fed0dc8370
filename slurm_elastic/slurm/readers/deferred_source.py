"""Source of records for the time in which slurmctld does not answer.

pyslurm is trusted only after a trial, and a trial needs an answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable
from typing import Any

from slurm_elastic.slurm.readers.record_source import RecordSource, SlurmConf


class DeferredSource:
    """Records of slurmctld, from a source that is chosen at its first answer. Thread-safe.

    Args:
        choose: returns the source; raises SlurmUnreachableError until slurmctld answers.
    """

    def __init__(self, choose: Callable[[], RecordSource]) -> None:
        self._choose = choose
        self._source: RecordSource | None = None
        self._lock = threading.Lock()

    def jobs(self, only: Collection[int] = ()) -> Iterable[Any]:
        """Return the records of all jobs, or of those named."""
        return self._chosen().jobs(only)

    def mark(self, record: Any, now: float) -> tuple[Any, ...]:
        """Return a mark of a job's record."""
        return self._chosen().mark(record, now)

    def pulse(self) -> object:
        """Return a value that differs when a job has begun or ended."""
        return self._chosen().pulse()

    def nodes(self) -> Iterable[Any]:
        """Return the records of all nodes."""
        return self._chosen().nodes()

    def partitions(self) -> Iterable[Any]:
        """Return the records of all partitions."""
        return self._chosen().partitions()

    def reservations(self) -> Iterable[Any]:
        """Return the records of all reservations."""
        return self._chosen().reservations()

    def settings(self) -> SlurmConf:
        """Return settings of slurm.conf."""
        return self._chosen().settings()

    def _chosen(self) -> RecordSource:
        with self._lock:
            if self._source is None:
                self._source = self._choose()
            return self._source
