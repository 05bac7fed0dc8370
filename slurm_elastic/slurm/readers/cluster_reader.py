"""Bulk reads of slurmctld's state: the cluster as values of this project.

Strings that users can write are hostile: a field that is not UTF-8 reads as empty, never as an
error.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import structlog

from slurm_elastic.core.cluster import (
    Job,
    Limit,
    Node,
    Partition,
    Reservation,
    Snapshot,
    Switch,
    UnusableNodes,
)
from slurm_elastic.core.nodelist import fold
from slurm_elastic.slurm.gres import LinkDomains, read_link_domains
from slurm_elastic.slurm.limits import AccountingLimits
from slurm_elastic.slurm.readers import pyslurm_records
from slurm_elastic.slurm.readers.job_parser import JobParser
from slurm_elastic.slurm.readers.kept_submissions import KeptSubmission
from slurm_elastic.slurm.readers.lost_nodes import LostNodes
from slurm_elastic.slurm.readers.record_source import RecordSource, SlurmConf
from slurm_elastic.slurm.release_rules import WAIT_AFTER_REQUEUE_S, Release
from slurm_elastic.slurm.slurm_settings import read_settings
from slurm_elastic.slurm.switches import read_switches

#: Name, after the prefix of our reservations, of the one that marks the active controller.
LEASE = "active_"
#: The switch tree and link domains change when an administrator edits them.
_TOPOLOGY_S = 600.0
#: The first snapshot follows the first reading of jobs at once.
_JUST_NOW_S = 2.0


@dataclass(frozen=True, slots=True)
class ReaderChoice:
    """Way in which slurmctld is read, and why.

    Attributes:
        name: `pyslurm` or `json`.
        reason: why, for people.
        release: of the installed commands.
    """

    name: str
    reason: str
    release: Release

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


class _ClusterRecords(NamedTuple):
    """Records of all nodes and partitions, and when they were read (monotonic s)."""

    read_at: float
    nodes: tuple[Any, ...]
    partitions: tuple[Any, ...]


class ClusterReader:
    """Reader of slurmctld. Thread-safe: one call at a time.

    Made by `reader_choice.connect`. Every method raises SlurmUnreachableError without an answer.

    Args:
        source: of the records.
        reservation_prefix: beginning of the names of our own reservations.
        limits: limits of the accounting database; None: no limits.
        choice: how the source was chosen; None: by the caller.
    """

    def __init__(
        self,
        source: RecordSource,
        *,
        reservation_prefix: str,
        limits: AccountingLimits | None = None,
        choice: ReaderChoice | None = None,
    ) -> None:
        self.source, self.choice = source, choice
        self._prefix = reservation_prefix
        self._limits = limits
        self._switches: tuple[Switch, ...] = ()
        self._links = LinkDomains()
        self._switches_read = 0.0
        self._lost_nodes = LostNodes()
        self._log = structlog.get_logger("snapshot")
        #: Nodes whose GPUs are not managed, as last logged.
        self._unmanaged_nodes: tuple[str, ...] = ()
        self._knows_defaults = False
        self._has_cpus_per_gpu: bool | None = None
        #: Nodes and partitions that the first reading of jobs needed, for the next snapshot.
        self._first_records: _ClusterRecords | None = None
        self._parser = JobParser(
            mark=source.mark,
            keeps_licenses=choice is None or choice.release.keeps_licenses,
        )
        #: Leases when reservations were last read.
        self.leases_seen: tuple[Reservation, ...] = ()

    @property
    def wait_after_requeue_s(self) -> float:
        """Seconds that a requeued job must wait before it may start again."""
        return self.choice.release.wait_after_requeue_s if self.choice else WAIT_AFTER_REQUEUE_S

    def jobs(self) -> dict[int, Job]:
        """Return all jobs of slurmctld, by raw id."""
        records = self.source.jobs()
        if not self._knows_defaults:
            cluster = self._first_records = self._read_cluster()
            self._learn_defaults(map(pyslurm_records.partition, cluster.partitions))
            self._learn_types(cluster.nodes)
        return self._parser.jobs(records)

    def remember(self, submissions: Mapping[int, KeptSubmission]) -> None:
        """Take submissions, by job id, that an earlier controller has read."""
        self._parser.kept = dict(submissions) | self._parser.kept

    def some_jobs(self, job_ids: Collection[int]) -> dict[int, Job]:
        """Return at least the jobs of these raw ids, as far as slurmctld knows them."""
        jobs = (self._parser.job(record) for record in self.source.jobs(job_ids))
        return {j.job_id: j for j in jobs if j is not None}

    def pulse(self) -> object:
        """Return a value that differs when a job has begun or ended; cheaper than `jobs`."""
        return self.source.pulse()

    def snapshot(self, jobs: Mapping[int, Job] | None = None) -> Snapshot:
        """Return the whole cluster, from four bulk reads.

        Args:
            jobs: jobs that were read just now; None: read them as well.
        """
        jobs = self.jobs() if jobs is None else jobs
        reservations = self.reservations()
        foreign = {n for r in reservations if not r.ours and _active(r) for n in r.nodes}
        cluster, self._first_records = self._first_records, None
        if cluster is None or time.monotonic() - cluster.read_at >= _JUST_NOW_S:
            cluster = self._read_cluster()
        records = cluster.nodes
        self._learn_types(records)
        lost = self._lost_nodes.look({str(n.name): str(n.state) for n in records})
        used = _used(jobs.values())
        sharing = Counter(name for job in jobs.values() for name, _ in job.parts)
        switches = self._topology()
        nodes = tuple(
            pyslurm_records.node(
                n,
                used.get(n.name, 0),
                sharing_jobs=sharing[str(n.name)],
                barred=n.name in foreign or n.name in lost,
                domains=self._links.of(str(n.name)),
            )
            for n in records
        )
        self._log_unmanaged(nodes)
        partitions = tuple(map(pyslurm_records.partition, cluster.partitions))
        self._learn_defaults(partitions)
        return Snapshot(
            time=time.time(),
            nodes=nodes,
            jobs=tuple(jobs.values()),
            switches=switches,
            partitions=partitions,
            limits=self._caps(
                jobs, {str(p.name): str(p.qos or "") for p in cluster.partitions}, nodes
            ),
            reservations=reservations,
        )

    def _read_cluster(self) -> _ClusterRecords:
        nodes, partitions = tuple(self.source.nodes()), tuple(self.source.partitions())
        return _ClusterRecords(time.monotonic(), nodes, partitions)

    def _learn_types(self, records: Iterable[Any]) -> None:
        """Note the GPU type of each node; jobs that hold parts of GPUs do not tell it."""
        divided = filter(pyslurm_records.has_parts_of_gpus, records)
        nodes = (pyslurm_records.node(record, 0, barred=False) for record in divided)
        self._parser.gpu_types = {n.name: n.gpu_type for n in nodes}

    def _log_unmanaged(self, nodes: Iterable[Node]) -> None:
        """Log the nodes whose GPUs are not managed, when they are others than before."""
        names = tuple(n.name for n in nodes if n.unmanaged_gpus)
        if names and names != self._unmanaged_nodes:
            self._log.info(f"Nodes={fold(names)} Growth=none Reason=gpus-not-managed")
        self._unmanaged_nodes = names

    def _learn_defaults(self, partitions: Iterable[Partition]) -> None:
        """Note in which partitions, or whether in all, there is a default of the CPUs of a GPU."""
        settings = read_settings()[0] if self._has_cpus_per_gpu is None else {}
        if settings:
            self._has_cpus_per_gpu = "DefCpuPerGPU" in settings.get("JobDefaults", "")
        self._knows_defaults = True
        self._parser.partitions_with_cpus = frozenset(
            p.name for p in partitions if p.has_cpus_per_gpu or self._has_cpus_per_gpu
        )

    def _caps(
        self, jobs: Mapping[int, Job], partition_qos: Mapping[str, str], nodes: Iterable[Node]
    ) -> tuple[Limit, ...]:
        if self._limits is None:
            return ()
        self._limits.cluster = self._limits.cluster or self.settings()["cluster_name"]
        return self._limits.limits(jobs.values(), partition_qos, nodes)

    def unusable(self) -> UnusableNodes:
        """Return the nodes on which no job may start now."""
        states = self.node_states()
        lost = self._lost_nodes.look(states)
        others = {name for name, state in states.items() if not pyslurm_records.usable(state)}
        return UnusableNodes(lost | others, lost)

    def node_states(self) -> dict[str, str]:
        """Return the state of each node, by name."""
        return {str(n.name): str(n.state or "UNKNOWN") for n in self.source.nodes()}

    def reservations(self) -> tuple[Reservation, ...]:
        """Return all reservations but the leases of controllers."""
        reservations = self._every_reservation()
        return tuple(r for r in reservations if r not in self.leases_seen)

    def leases(self) -> tuple[Reservation, ...]:
        """Return the reservations that mark the active controller (`controller.leader`)."""
        self._every_reservation()
        return self.leases_seen

    def some_node(self) -> str:
        """Return the name of a node in any state; "" if there is none."""
        return max((str(n.name) for n in self.source.nodes()), default="")

    def _every_reservation(self) -> tuple[Reservation, ...]:
        records = self.source.reservations()
        reservations = tuple(self._reservation(r) for r in records)
        self.leases_seen = tuple(r for r in reservations if r.name.startswith(self._prefix + LEASE))
        return reservations

    def settings(self) -> SlurmConf:
        """Return the settings of slurm.conf that the controller needs, and Slurm's version."""
        return self.source.settings()

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
        if job.allocation is not None and job.allocation.half:
            continue  # counted with its node, by index
        typed = job.allocation.shares if job.allocation else None
        for node, gpus in typed or ((n, len(held)) for n, held in job.indexes.items()):
            used[node] = used.get(node, 0) + gpus
    return used


def _active(reservation: Reservation) -> bool:
    return reservation.start_time <= time.time() < reservation.end_time
