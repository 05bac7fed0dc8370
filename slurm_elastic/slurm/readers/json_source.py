"""Records of slurmctld through the JSON that Slurm's commands print.

Fits every release from 23.11 on, and costs more than pyslurm, most of it in squeue. So an answer,
and each job in it, is decoded only if its bytes have changed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable
from typing import Any

import msgspec
import structlog

from slurm_elastic.slurm.readers import json_records
from slurm_elastic.slurm.readers.json_records import JobJson
from slurm_elastic.slurm.readers.partition_records import partitions_of
from slurm_elastic.slurm.readers.record_source import SlurmConf
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import output
from slurm_elastic.slurm.slurm_settings import parse_settings, seconds

_JOBS = ("squeue", "--all", "--states=all", "--json")
_UNKNOWN_JOB = "Invalid job id"
_STATES = ("squeue", "--only-job-state", "--json")  # refuses --all, and shows all without it


class _Jobs(msgspec.Struct):
    jobs: list[msgspec.Raw]


_slices = msgspec.json.Decoder(_Jobs).decode


class JsonSource:
    """Records through `squeue` and `scontrol`. Thread-safe.

    Args:
        release: of the installed commands.
        timeout_s: for each command.
    """

    def __init__(self, release: Release, *, timeout_s: float = 30.0) -> None:
        self._release, self._timeout_s = release, timeout_s
        self._lock = threading.Lock()
        #: The last answer about all jobs, and its records by their JSON.
        self._answer: bytes | None = None
        self._jobs: dict[bytes, JobJson] = {}
        self._log = structlog.get_logger("json_source")

    def jobs(self, only: Collection[int] = ()) -> Iterable[Any]:
        """Return the records of all jobs, or of those named."""
        if only:
            ids = ",".join(map(str, sorted(only)))
            try:
                content = output(*_JOBS, f"--jobs={ids}", timeout_s=self._timeout_s)
            except SlurmUnreachableError as error:
                if _UNKNOWN_JOB in str(error):  # the only one, and Slurm has forgotten it
                    return []
                raise
            return [j for c in self._slices(content) if (j := self._job(c))]
        content = output(*_JOBS, timeout_s=self._timeout_s)
        with self._lock:
            if content != self._answer:
                present = [bytes(c) for c in self._slices(content)]
                jobs = {c: self._jobs.get(c) or self._job(c) for c in present}
                self._jobs = {c: j for c, j in jobs.items() if j}
                self._answer = content
            return list(self._jobs.values())

    def mark(self, record: Any, now: float) -> tuple[Any, ...]:
        """Return a mark of a job's record."""
        return record.mark(now)  # type: ignore[no-any-return]

    def pulse(self) -> object:
        """Return the states of all jobs; where Slurm cannot print them alone, from all records."""
        if not self._release.has_job_states:
            return frozenset((j.id, j.state, j.requeue_count) for j in self.jobs())
        content = output(*_STATES, timeout_s=self._timeout_s)
        return frozenset(bytes(c) for c in self._slices(content))

    def nodes(self) -> Iterable[Any]:
        """Return the records of all nodes."""
        return [json_records.node_of(n) for n in self._show("nodes")]

    def partitions(self) -> Iterable[Any]:
        """Return the records of all partitions."""
        command = ("scontrol", "--all", "--oneliner", "show", "partitions")
        return list(partitions_of(output(*command, timeout_s=self._timeout_s)))

    def reservations(self) -> Iterable[Any]:
        """Return the records of all reservations."""
        command = ("scontrol", "--all", "--oneliner", "show", "reservation")
        return list(json_records.reservations_of(output(*command, timeout_s=self._timeout_s)))

    def settings(self) -> SlurmConf:
        """Return settings of slurm.conf."""
        text = output("scontrol", "show", "config", timeout_s=self._timeout_s)
        conf = parse_settings(text.decode(errors="replace"))
        if not conf:
            raise SlurmUnreachableError("scontrol show config: printed no settings")
        private = conf.get("PrivateData", "").lower()
        return {
            "private_data": tuple(w for w in private.split(",") if w not in ("", "none")),
            "kill_wait_s": int(seconds(conf.get("KillWait", "")) or 30),
            "cluster_name": conf.get("ClusterName", ""),
            "version": conf.get("SLURM_VERSION", ""),
        }

    def _show(self, entity: str) -> list[Any]:
        content = output("scontrol", "--all", "show", entity, "--json", timeout_s=self._timeout_s)
        try:
            rows = json_records.document(content)[entity]
        except (ValueError, KeyError) as error:
            raise SlurmUnreachableError(
                f"scontrol show {entity} --json: the answer is invalid: {error!r:.100}"
            ) from None
        return rows if isinstance(rows, list) else []

    def _slices(self, content: bytes) -> list[msgspec.Raw]:
        try:
            return _slices(content).jobs
        except ValueError as error:
            raise SlurmUnreachableError(
                f"squeue --json: the answer is invalid: {error!r:.100}"
            ) from None

    def _job(self, content: bytes | msgspec.Raw) -> JobJson | None:
        """Return a record; None, with one line in the log, if it is not the JSON of a job."""
        try:
            return JobJson(bytes(content))
        except ValueError as error:
            self._log.error(f"a job of squeue --json cannot be read: {error!r:.100}")
            return None
