"""Bulk reads of slurmctld's state, through pyslurm.

This module alone imports pyslurm (GPL-2.0-only). Strings that users can write
are hostile: a field that is not UTF-8 reads as empty, never as an error.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from slurm_elastic.core.cluster import Job, Limit, Reservation, Snapshot, Switch
from slurm_elastic.slurm import pyslurm_records
from slurm_elastic.slurm.gres import LinkDomains, read_link_domains
from slurm_elastic.slurm.job_parser import JobParser
from slurm_elastic.slurm.limits import AccountingLimits
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.switches import read_switches

#: After the prefix of our reservations: name of the one that marks the active controller.
LEASE = "active_"
#: The switch tree and link domains change when an administrator edits them.
_TOPOLOGY_S = 600.0


class Reader:
    """Connection to slurmctld for reading. Thread-safe: one call at a time.

    Args:
        reservation_prefix: beginning of the names of our own reservations.
        limits: limits of the accounting database; None: no limits.

    Raises:
        SlurmUnreachableError: pyslurm is missing or finds no usable slurm.conf.
    """

    def __init__(self, *, reservation_prefix: str, limits: AccountingLimits | None = None) -> None:
        os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"  # else a bad slurm.conf ends the process
        try:
            import pyslurm  # noqa: PLC0415 - must not be imported where it is missing
        except ImportError as error:
            raise SlurmUnreachableError(
                f"pyslurm cannot be imported ({error}): install the release that matches "
                "`scontrol --version` (docs/install.md)"
            ) from None
        self._pyslurm: Any = pyslurm
        self._prefix = reservation_prefix
        self._limits = limits
        self._lock = threading.Lock()
        self._switches: tuple[Switch, ...] = ()
        self._links = LinkDomains()
        self._switches_read = 0.0
        self._parser = JobParser()
        #: Leases when reservations were last read.
        self.leases_seen: tuple[Reservation, ...] = ()
        try:
            pyslurm.slurm_init()
        except pyslurm.PyslurmError as error:
            raise SlurmUnreachableError(f"slurm.conf cannot be used: {error}") from None

    def jobs(self) -> dict[int, Job]:
        """Return all jobs of slurmctld, by raw id.

        Raises:
            SlurmUnreachableError: no answer (after 9 s with slurmctld down, 2 s with munge down).
        """
        return self._parser.jobs(self._load(self._pyslurm.Jobs).values())

    def pulse(self) -> frozenset[tuple[int, str, int]]:
        """Return (job, state, restarts) of all jobs: it differs when a job has begun or ended.

        A third of the work of `jobs`.
        """
        raw = self._load(self._pyslurm.Jobs).values()
        return frozenset((int(j.id), str(j.state), int(j.requeue_count or 0)) for j in raw)

    def snapshot(self, jobs: Mapping[int, Job] | None = None) -> Snapshot:
        """Return the whole cluster, from four bulk reads.

        Args:
            jobs: jobs that were read just now; None: read them as well.
        """
        jobs = self.jobs() if jobs is None else jobs
        reservations = self.reservations()
        foreign = {n for r in reservations if not r.ours and _active(r) for n in r.nodes}
        used = _used(jobs.values())
        switches = self._topology()
        nodes = tuple(
            pyslurm_records.node(
                n,
                used.get(n.name, 0),
                reserved=n.name in foreign,
                domains=self._links.of(str(n.name)),
            )
            for n in self._load(self._pyslurm.Nodes).values()
        )
        partitions = self._load(self._pyslurm.Partitions).values()
        return Snapshot(
            time=time.time(),
            nodes=nodes,
            jobs=tuple(jobs.values()),
            switches=switches,
            partitions=tuple(pyslurm_records.partition(p) for p in partitions),
            limits=self._caps(jobs, {str(p.name): str(p.qos or "") for p in partitions}),
            reservations=reservations,
        )

    def _caps(self, jobs: Mapping[int, Job], partition_qos: Mapping[str, str]) -> tuple[Limit, ...]:
        if self._limits is None:
            return ()
        self._limits.cluster = self._limits.cluster or str(self.settings()["cluster_name"])
        return self._limits.limits(jobs.values(), partition_qos)

    def down(self) -> frozenset[str]:
        """Return the nodes on which no job can start now."""
        nodes = self._load(self._pyslurm.Nodes).values()
        return frozenset(str(n.name) for n in nodes if not pyslurm_records.usable(str(n.state)))

    def reservations(self) -> tuple[Reservation, ...]:
        """Return all reservations but the leases of controllers."""
        reservations = self._every_reservation()
        return tuple(r for r in reservations if r not in self.leases_seen)

    def leases(self) -> tuple[Reservation, ...]:
        """Return the reservations that mark the active controller (`controller.leader`).

        Raises:
            SlurmUnreachableError: no answer.
        """
        self._every_reservation()
        return self.leases_seen

    def some_node(self) -> str:
        """Return the name of a node in any state; "" if there is none.

        Raises:
            SlurmUnreachableError: no answer.
        """
        return max((str(n.name) for n in self._load(self._pyslurm.Nodes).values()), default="")

    def _every_reservation(self) -> tuple[Reservation, ...]:
        records = self._load(self._pyslurm.Reservations).values()
        reservations = tuple(self._reservation(r) for r in records)
        self.leases_seen = tuple(r for r in reservations if r.name.startswith(self._prefix + LEASE))
        return reservations

    def settings(self) -> dict[str, Any]:
        """Return the settings of slurm.conf that the controller needs, and Slurm's version.

        Raises:
            SlurmUnreachableError: no answer.
        """
        conf = self._load(self._pyslurm.slurmctld.Config)
        return {
            "private_data": tuple(conf.private_data or ()),
            "kill_wait_s": int(conf.kill_wait_time or 30),
            "cluster_name": str(conf.cluster_name or ""),
            "version": str(conf.version or ""),
        }

    def _load(self, collection: Any) -> Any:
        with self._lock:
            try:
                return collection.load()
            except self._pyslurm.RPCError as error:
                raise SlurmUnreachableError(f"slurmctld: {_one_line(error)}") from None

    def _topology(self) -> tuple[Switch, ...]:
        if time.monotonic() - self._switches_read > _TOPOLOGY_S or not self._switches_read:
            self._switches = read_switches() or self._switches
            self._links = read_link_domains()
            self._switches_read = time.monotonic()
        return self._switches

    def _reservation(self, raw: Any) -> Reservation:
        name = pyslurm_records.text(raw, "name")
        return Reservation(
            name=name,
            nodes=pyslurm_records.named_nodes(raw, "nodes"),
            start_time=float(raw.start_time or 0),
            end_time=float(raw.end_time or 0),
            users=tuple(raw.users or ()),
            comment=pyslurm_records.text(raw, "comment"),
            ours=name.startswith(self._prefix),
        )


def _used(jobs: Iterable[Job]) -> dict[str, int]:
    used: dict[str, int] = {}
    for job in jobs:
        # A job with GPUs of several types has no `allocation`; the GPUs that it holds count here.
        typed = job.allocation.shares if job.allocation else None
        for node, gpus in typed or ((n, len(held)) for n, held in job.indexes.items()):
            used[node] = used.get(node, 0) + gpus
    return used


def _active(reservation: Reservation) -> bool:
    return reservation.start_time <= time.time() < reservation.end_time


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def pyslurm_version() -> str:
    """Return the version of the installed pyslurm; "" if it is missing."""
    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return ""
