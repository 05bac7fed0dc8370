"""Reads of slurmctld's state, in bulk, through pyslurm.

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

import structlog

from slurm_elastic.core.cluster import (
    Job,
    JobState,
    Limit,
    Reservation,
    Snapshot,
    Switch,
)
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.submission import (
    Submission,
    SubmissionError,
    parse_admin_comment,
    parse_comment,
)
from slurm_elastic.slurm import pyslurm_records
from slurm_elastic.slurm.gres import LinkDomains, read_link_domains
from slurm_elastic.slurm.limits import LimitBook
from slurm_elastic.slurm.scontrol import SlurmUnreachable
from slurm_elastic.slurm.switches import read_switches

_STATES = {
    "PENDING": JobState.PENDING,
    "RUNNING": JobState.RUNNING,
    "CONFIGURING": JobState.RUNNING,
    "COMPLETING": JobState.COMPLETING,
    "SUSPENDED": JobState.SUSPENDED,
    "STOPPED": JobState.SUSPENDED,
    "REQUEUED": JobState.PENDING,
    "REQUEUE_HOLD": JobState.PENDING,
    "SPECIAL_EXIT": JobState.PENDING,
    "RESV_DEL_HOLD": JobState.PENDING,
}
#: After the prefix of our reservations: one that says which controller is active.
LEASE = "active_"
#: The switch tree and link domains change when an administrator edits them.
_TOPOLOGY_S = 600.0


class Reader:
    """A connection to slurmctld for reading. Thread-safe: one call at a time.

    Args:
        reservation_prefix: of our own reservations.
        limits: where the accounting database's limits come from; None: no limits.

    Raises:
        SlurmUnreachable: pyslurm is missing or finds no usable slurm.conf.
    """

    def __init__(self, *, reservation_prefix: str, limits: LimitBook | None = None) -> None:
        os.environ["PYSLURM_DISABLE_AUTO_INIT"] = "1"  # else a bad slurm.conf ends the process
        try:
            import pyslurm  # noqa: PLC0415 - must not be imported where it is missing
        except ImportError as error:
            raise SlurmUnreachable(
                f"pyslurm cannot be imported ({error}): install the release that matches "
                "`scontrol --version` (docs/install.md)"
            ) from None
        self._pyslurm: Any = pyslurm
        self._prefix = reservation_prefix
        self._limits = limits
        self._lock = threading.Lock()
        self._log = structlog.get_logger("snapshot")
        self._switches: tuple[Switch, ...] = ()
        self._links = LinkDomains()
        self._switches_read = 0.0
        self._submissions: dict[
            tuple[int, float, str], tuple[Submission | None, Reason | None]
        ] = {}
        self._names: dict[int, str] = {}
        #: Jobs as last read, and what tells whether they have changed.
        self._known: dict[int, tuple[object, Job]] = {}
        #: What `leases` found, or a reading of all reservations since.
        self.leases_seen: tuple[Reservation, ...] = ()
        #: Jobs whose record makes no sense, said once.
        self._unreadable: set[int] = set()
        try:
            pyslurm.slurm_init()
        except pyslurm.PyslurmError as error:
            raise SlurmUnreachable(f"slurm.conf cannot be used: {error}") from None

    def jobs(self) -> dict[int, Job]:
        """All jobs that slurmctld knows, by raw id.

        Raises:
            SlurmUnreachable: no answer (after about 9 s with slurmctld down, 2 s with munge down).
        """
        raw = self._load(self._pyslurm.Jobs)
        jobs = [j for j in map(self._read, raw.values()) if j is not None]
        self._known = {j.job_id: known for j in jobs if (known := self._known.get(j.job_id))}
        self._unreadable &= {j.job_id for j in jobs}
        current = {(j.job_id, j.submit_time) for j in jobs}
        self._submissions = {k: v for k, v in self._submissions.items() if k[:2] in current}
        return {j.job_id: j for j in jobs}

    def pulse(self) -> frozenset[tuple[int, str, int]]:
        """(job, state, restarts) of all jobs: differs when something has begun or ended.

        A third of the work of `jobs`.
        """
        raw = self._load(self._pyslurm.Jobs).values()
        return frozenset((int(j.id), str(j.state), int(j.requeue_count or 0)) for j in raw)

    def snapshot(self, jobs: Mapping[int, Job] | None = None) -> Snapshot:
        """The whole cluster, in four bulk reads.

        Args:
            jobs: read just now; None: read them too.
        """
        jobs = self.jobs() if jobs is None else jobs
        reservations = self.reservations()
        foreign = {n for r in reservations if not r.ours and _now_in(r) for n in r.nodes}
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
        """Nodes on which no job may start now."""
        nodes = self._load(self._pyslurm.Nodes).values()
        return frozenset(str(n.name) for n in nodes if not pyslurm_records.usable(str(n.state)))

    def reservations(self) -> tuple[Reservation, ...]:
        """All reservations but leases of controllers."""
        every = self._every_reservation()
        return tuple(r for r in every if r not in self.leases_seen)

    def leases(self) -> tuple[Reservation, ...]:
        """The reservations by which controllers agree who is active (`controller.lease`).

        Raises:
            SlurmUnreachable: no answer.
        """
        self._every_reservation()
        return self.leases_seen

    def some_node(self) -> str:
        """The name of a node, whatever its state; "": there is none.

        Raises:
            SlurmUnreachable: no answer.
        """
        return max((str(n.name) for n in self._load(self._pyslurm.Nodes).values()), default="")

    def _every_reservation(self) -> tuple[Reservation, ...]:
        every = self._load(self._pyslurm.Reservations).values()
        found = tuple(self._reservation(r) for r in every)
        self.leases_seen = tuple(r for r in found if r.name.startswith(self._prefix + LEASE))
        return found

    def settings(self) -> dict[str, Any]:
        """What the controller needs of slurm.conf: PrivateData, KillWait, ClusterName.

        Raises:
            SlurmUnreachable: no answer.
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
                raise SlurmUnreachable(f"slurmctld: {_one_line(error)}") from None

    def _topology(self) -> tuple[Switch, ...]:
        if time.monotonic() - self._switches_read > _TOPOLOGY_S or not self._switches_read:
            self._switches = read_switches() or self._switches
            self._links = read_link_domains()
            self._switches_read = time.monotonic()
        return self._switches

    def _user(self, raw: Any) -> str:
        uid = int(raw.user_id or 0)
        if uid not in self._names:
            self._names[uid] = pyslurm_records.text(raw, "user_name") or str(uid)
        return self._names[uid]

    def _read(self, raw: Any) -> Job | None:
        """The value of last time while the record says the same: most do, and that is soon seen."""
        try:
            mark = pyslurm_records.mark(raw, time.time())
        except (ValueError, TypeError, AttributeError, OverflowError):
            return self._readable(raw)  # says what is wrong with it
        known = self._known.get(mark[0])
        if known is not None and known[0] == mark:
            return known[1]
        job = self._readable(raw)
        if job is not None and job.job_id not in self._unreadable:
            self._known[job.job_id] = (mark, job)
        return job

    def _readable(self, raw: Any) -> Job | None:
        """A job that makes no sense is left alone, with a line in the log: the others go on."""
        try:
            return self._job(raw)
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError) as error:
            why = f"{error!r:.200}"
        if int(raw.id) not in self._unreadable:
            self._unreadable.add(int(raw.id))
            self._log.error(f"JobId={raw.id} Unreadable={why}")
        try:
            return pyslurm_records.unreadable(raw, _STATES.get(raw.state, JobState.ENDED), why)
        except (ValueError, TypeError, AttributeError, KeyError):
            return None

    def _job(self, raw: Any) -> Job:
        state = _STATES.get(raw.state, JobState.ENDED)
        if state is JobState.ENDED:
            return self._ended(raw)
        submission, problem = self._submission(raw)
        if submission and not problem:
            problem = pyslurm_records.unmanageable(raw)
        allocation = None
        layout = {}
        if state is not JobState.PENDING:
            layout = raw.get_resource_layout_per_node()
            allocation = pyslurm_records.allocation(layout)
            if allocation is None and submission and state is JobState.RUNNING:
                problem = problem or Reason("several-gpu-types")
        tres = raw.requested_tres
        wanted, gpu_type = pyslurm_records.asked(raw, tres)
        gpus = wanted
        if allocation:
            gpus, gpu_type = allocation.gpus, allocation.gpu_type
        cpus = int(raw.cpus or 0)
        memory = sum(int(n.get("memory") or 0) for n in layout.values())
        memory = memory or pyslurm_records.memory(raw, wanted)
        begin = float(raw.eligible_time or 0)
        return Job(
            job_id=int(raw.id),
            display_id=pyslurm_records.display_id(raw),
            name=pyslurm_records.text(raw, "name"),
            user=self._user(raw),
            uid=int(raw.user_id or 0),
            state=state,
            partition=pyslurm_records.text(raw, "partition"),
            account=pyslurm_records.text(raw, "account"),
            qos=pyslurm_records.text(raw, "qos"),
            reason=pyslurm_records.reason(raw),
            priority=int(raw.priority or 0),
            nice=int(raw.nice or 0),
            submit_time=float(raw.submit_time or 0),
            start_time=pyslurm_records.epoch(raw.start_time)
            if state is not JobState.PENDING
            else None,
            end_time=pyslurm_records.epoch(raw.end_time),
            begin_time=begin if state is JobState.PENDING and begin > time.time() else None,
            time_limit_s=pyslurm_records.limit_s(raw.time_limit),
            run=int(raw.requeue_count or 0),
            submission=submission,
            managed=not problem,
            unmanaged_reason=problem,
            allocation=allocation,
            devices=pyslurm_records.devices(layout),
            gpus=gpus,
            gpu_type=gpu_type,
            min_nodes=pyslurm_records.min_nodes(raw, tres),
            cpus=cpus,
            cpus_per_gpu=cpus / gpus if gpus else 1.0,
            memory_per_gpu_mb=memory / gpus if gpus else 0.0,
            required_nodes=pyslurm_records.named_nodes(raw, "required_nodes"),
            excluded_nodes=pyslurm_records.named_nodes(raw, "excluded_nodes"),
            features="&".join(raw.constraints or ()),
            reservation=pyslurm_records.text(raw, "reservation"),
            dependency="yes" if raw.dependencies else "",
            comment=pyslurm_records.text(raw, "comment"),
            extra=pyslurm_records.text(raw, "extra"),
            requeueable=bool(raw.is_requeueable),
            exit_code=pyslurm_records.exit_code(raw),
        )

    def _ended(self, raw: Any) -> Job:
        """What history needs of a job that is over."""
        submission, _ = self._submission(raw)
        return Job(
            job_id=int(raw.id),
            display_id=pyslurm_records.display_id(raw),
            name=pyslurm_records.text(raw, "name"),
            user=self._user(raw),
            uid=int(raw.user_id or 0),
            state=JobState.ENDED,
            partition=pyslurm_records.text(raw, "partition"),
            submit_time=float(raw.submit_time or 0),
            start_time=pyslurm_records.epoch(raw.start_time),
            end_time=pyslurm_records.epoch(raw.end_time),
            run=int(raw.requeue_count or 0),
            submission=submission,
        )

    def _submission(self, raw: Any) -> tuple[Submission | None, Reason | None]:
        """Return directive and shape, parsed once per job; a malformed one leaves the job alone."""
        admin, comment = (
            pyslurm_records.text(raw, "admin_comment"),
            pyslurm_records.text(raw, "comment"),
        )
        key = (int(raw.id), float(raw.submit_time or 0), admin + "\0" + comment)
        if key not in self._submissions:
            try:
                found = parse_admin_comment(admin) or parse_comment(comment)
                self._submissions[key] = (found, None)
            except SubmissionError as error:
                self._submissions[key] = (None, Reason("directive-invalid", error=str(error)))
        return self._submissions[key]

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
        # With GPUs of several types it has no allocation in our sense, but holds them all the same.
        typed = job.allocation.shares if job.allocation else None
        for node, gpus in typed or ((n, len(held)) for n, held in job.indexes.items()):
            used[node] = used.get(node, 0) + gpus
    return used


def _now_in(reservation: Reservation) -> bool:
    return reservation.start_time <= time.time() < reservation.end_time


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def pyslurm_version() -> str:
    """Of the installed pyslurm, "" when it is missing."""
    try:
        return importlib.metadata.version("pyslurm")
    except importlib.metadata.PackageNotFoundError:
        return ""
