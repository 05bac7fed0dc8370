"""Interface of what reads slurmctld: raw records, in bulk.

Two classes have it: `PyslurmSource` and `JsonSource`. Their records have the same attributes,
those of pyslurm's classes; `pyslurm_records` and `JobParser` make values of this project of them.
An attribute may raise ValueError, TypeError or AttributeError when it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, Protocol, TypedDict


class SlurmConf(TypedDict):
    """Settings of slurm.conf that the controller needs, and Slurm's version."""

    private_data: tuple[str, ...]
    kill_wait_s: int
    cluster_name: str
    version: str


class RecordSource(Protocol):
    """Reader of slurmctld's records; without an answer it raises SlurmUnreachableError."""

    def jobs(self, only: Collection[int] = ()) -> Iterable[Any]:
        """Return the records of jobs.

        Args:
            only: raw ids; the records of these jobs suffice. (): all jobs.
        """
        ...

    def mark(self, record: Any, now: float) -> tuple[Any, ...]:
        """Return a mark of a job's record, its id first: equal marks make equal jobs."""
        ...

    def pulse(self) -> object:
        """Return a value that differs when a job has begun or ended; as cheap as possible."""
        ...

    def nodes(self) -> Iterable[Any]:
        """Return the records of all nodes."""
        ...

    def partitions(self) -> Iterable[Any]:
        """Return the records of all partitions."""
        ...

    def reservations(self) -> Iterable[Any]:
        """Return the records of all reservations."""
        ...

    def settings(self) -> SlurmConf:
        """Return settings of slurm.conf."""
        ...
