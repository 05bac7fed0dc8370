"""Records of slurmctld through pyslurm.

This module and `pyslurm_probe` alone import pyslurm (GPL-2.0-only).
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
from collections.abc import Collection, Iterable
from typing import Any

from slurm_elastic.slurm.readers import pyslurm_records
from slurm_elastic.slurm.readers.record_source import SlurmConf
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import require_answer


class PyslurmSource:
    """Records through pyslurm. Thread-safe: one call at a time.

    Raises:
        SlurmUnreachableError: pyslurm is missing or finds no usable slurm.conf.
    """

    def __init__(self) -> None:
        os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"  # else a bad slurm.conf ends the process
        try:
            import pyslurm  # noqa: PLC0415 - must not be imported where it is missing
        except ImportError as error:
            raise SlurmUnreachableError(
                f"pyslurm cannot be imported ({error}): install the release that matches "
                '`scontrol --version`, or set [slurm] reader = "json"'
            ) from None
        self._pyslurm: Any = pyslurm
        self._lock = threading.Lock()
        self._silent = False
        try:
            pyslurm.slurm_init()
        except pyslurm.PyslurmError as error:
            raise SlurmUnreachableError(f"slurm.conf cannot be used: {error}") from None

    def jobs(self, only: Collection[int] = ()) -> Iterable[Any]:  # noqa: ARG002 - all cost no more
        """Return the records of all jobs."""
        return self._load(self._pyslurm.Jobs).values()  # type: ignore[no-any-return]

    def mark(self, record: Any, now: float) -> tuple[Any, ...]:
        """Return a mark of a job's record."""
        return pyslurm_records.mark(record, now)

    def pulse(self) -> object:
        """Return (job, state, restarts) of all jobs: a third of the work of parsing them."""
        records = self._load(self._pyslurm.Jobs).values()
        return frozenset((int(j.id), str(j.state), int(j.requeue_count or 0)) for j in records)

    def nodes(self) -> Iterable[Any]:
        """Return the records of all nodes."""
        return self._load(self._pyslurm.Nodes).values()  # type: ignore[no-any-return]

    def partitions(self) -> Iterable[Any]:
        """Return the records of all partitions."""
        return self._load(self._pyslurm.Partitions).values()  # type: ignore[no-any-return]

    def reservations(self) -> Iterable[Any]:
        """Return the records of all reservations."""
        return self._load(self._pyslurm.Reservations).values()  # type: ignore[no-any-return]

    def settings(self) -> SlurmConf:
        """Return settings of slurm.conf."""
        conf = self._load(self._pyslurm.slurmctld.Config)
        return {
            "private_data": tuple(conf.private_data or ()),
            "kill_wait_s": int(conf.kill_wait_time or 30),
            "cluster_name": str(conf.cluster_name or ""),
            "version": str(conf.version or ""),
        }

    def _load(self, collection: Any) -> Any:
        with self._lock:
            if self._silent:
                # No other thread runs while pyslurm waits for slurmctld, for 10 s and more.
                require_answer()
            try:
                records = collection.load()
            except self._pyslurm.RPCError as error:
                self._silent = True
                text = " ".join(str(error).split())
                raise SlurmUnreachableError(f"slurmctld: {text}") from None
            self._silent = False
            return records


def pyslurm_version() -> str:
    """Return the version of the installed pyslurm; "" if it is missing."""
    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return ""
