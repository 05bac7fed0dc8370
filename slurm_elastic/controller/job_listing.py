"""Jobs as they were last read."""

from __future__ import annotations

from collections.abc import Collection

from slurm_elastic.controller.companions.companion_folding import fold
from slurm_elastic.controller.state.job_store import JobStore
from slurm_elastic.controller.transitions.transition_engine import TransitionEngine
from slurm_elastic.core.cluster import Job
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader


class JobListing:
    """All jobs, each with its allowed directive.

    Args:
        reader: of the cluster.
        store: knows the allowed directives and the companions that were placed.
        engine: knows the companions that transitions are placing.

    Attributes:
        listed: by id, as Slurm shows them.
        jobs: by id, as decisions see them: companions are a part of their bases.
        companions: by id, jobs that their comment marks as companions, as Slurm shows them.
    """

    def __init__(self, reader: ClusterReader, store: JobStore, engine: TransitionEngine) -> None:
        self._reader, self._store, self._engine = reader, store, engine
        self.listed: dict[int, Job] = {}
        self.jobs: dict[int, Job] = {}
        self.companions: dict[int, Job] = {}

    def read_all(self) -> None:
        """Read all jobs."""
        self.listed = self._store.all_with_allowed_directives(self._reader.jobs())
        self.fold()

    def read_again(self, job_ids: Collection[int]) -> None:
        """Read these jobs again; the others are those of the last time that all were read."""
        reports = (self._store.last_report(i) for i in job_ids)
        named = {row[0] for r in reports if r is not None for row in r.companions}
        marked = {
            i
            for i, companion in self.companions.items()
            if companion.companion is not None and companion.companion.base in job_ids
        }
        again = {*job_ids, *named, *marked}
        others = {i: job for i, job in self.listed.items() if i not in again}
        self.listed = others | self._store.all_with_allowed_directives(
            self._reader.some_jobs(again)
        )
        self.fold()

    def fold(self) -> None:
        """Make companions that the controller has placed a part of their bases."""
        self.jobs, self.companions = fold(
            self.listed,
            placed=lambda base: self._store.companions(base) | self._engine.companions(base),
            awaited=self._engine.awaits,
        )
