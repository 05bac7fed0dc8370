"""Association and QOS limits, as caps over sets of jobs.

Slurm keeps a job pending that would exceed a GPU or node limit, however it was reshaped, but
accepts an operator's update beyond CPU and memory limits: so placement keeps to all of them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import structlog

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Job, JobState, Limit
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import output

_RESOURCES = {"gres/gpu": "gpu", "node": "node", "cpu": "cpu", "mem": "mem"}
#: Columns with the limits of one job.
_EACH = "MaxTRES,MaxWall,MaxTRESPerNode,MaxTRESMins,GrpTRESRunMins"
_NO_CAP = 2.0**63
_WALL = re.compile(r"(?:([0-9]{1,9})-)?([0-9]{1,9}):([0-9]{2}):([0-9]{2})")
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}


@dataclass(frozen=True, slots=True)
class TimedCaps:
    """Caps of one row on each node, and on resources times minutes; resource → cap.

    Attributes:
        node: of each job on each node (MaxTRESPerNode).
        job_minutes: of each job, for its time limit (MaxTRESMins).
        group_minutes: of all running jobs together, for what is left of them (GrpTRESRunMins).
    """

    node: Mapping[str, int] = field(default_factory=dict)
    job_minutes: Mapping[str, int] = field(default_factory=dict)
    group_minutes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: list[str]) -> TimedCaps:
        """Return those of the last columns of a row; no caps where they are missing."""
        return cls(*map(parse_tres, columns[:3]))


@dataclass(frozen=True, slots=True)
class QosRow:
    """One QOS; each mapping is resource → cap."""

    name: str
    group: Mapping[str, int]
    per_user: Mapping[str, int]
    per_account: Mapping[str, int]
    per_job: Mapping[str, int]
    wall_s: int | None = None
    timed: TimedCaps = field(default_factory=TimedCaps)


@dataclass(frozen=True, slots=True)
class AssociationRow:
    """One association; `user` is "" for a whole account, `partition` is "" for all partitions."""

    account: str
    user: str
    partition: str
    parent: str
    group: Mapping[str, int]
    per_job: Mapping[str, int]
    wall_s: int | None = None
    timed: TimedCaps = field(default_factory=TimedCaps)


@dataclass
class AccountingLimits:
    """Limits of the accounting database, read again every `refresh_s` seconds.

    Without slurmdbd there are none. While it does not answer, the last known limits stay in force.

    Attributes:
        cluster: cluster whose associations count, if several share a slurmdbd; "" for all.
    """

    refresh_s: float = 60.0
    timeout_s: float = 20.0
    cluster: str = ""
    qos: tuple[QosRow, ...] = ()
    associations: tuple[AssociationRow, ...] = ()
    _read_s: float | None = field(default=None, repr=False)
    _problem: str = field(default="", repr=False)

    def limits(
        self, jobs: Iterable[Job], partition_qos: Mapping[str, str] | None = None
    ) -> tuple[Limit, ...]:
        """Return the caps that apply to jobs running or pending now."""
        if self._read_s is None or time.monotonic() - self._read_s > self.refresh_s:
            self._refresh()
        return caps(self.qos, self.associations, jobs, partition_qos)

    def _refresh(self) -> None:
        self._read_s = time.monotonic()
        filters = (f"cluster={self.cluster}",) if self.cluster else ()
        try:
            self.qos = parse_qos(self._show("qos", f"Name,GrpTRES,MaxTRESPU,MaxTRESPA,{_EACH}"))
            self.associations = parse_associations(
                self._show("assoc", f"Account,User,Partition,ParentName,GrpTRES,{_EACH}", *filters)
            )
        except SlurmUnreachableError as error:
            problem = f"{error}; the last known limits stay in force"
        else:
            problem = ""
        if problem and problem != self._problem:
            structlog.get_logger("limits").warning(problem)
        self._problem = problem

    def _show(self, entity: str, columns: str, *filters: str) -> str:
        command = ("sacctmgr", "-nP", "show", entity, *filters, f"format={columns}")
        return output(*command, timeout_s=self.timeout_s).decode(errors="replace")


def caps(
    qos: Iterable[QosRow],
    associations: Iterable[AssociationRow],
    jobs: Iterable[Job],
    partition_qos: Mapping[str, str] | None = None,
) -> tuple[Limit, ...]:
    """Return the caps over jobs running or pending now; caps over no job are left out.

    Args:
        qos: all QOS.
        associations: all associations.
        jobs: all jobs.
        partition_qos: QOS by name of its partition.
    """
    live = [j for j in jobs if j.state is not JobState.ENDED]
    return (
        *_qos_limits(qos, live, partition_qos or {}),
        *_association_limits(associations, live),
    )


def parse_qos(text: str) -> tuple[QosRow, ...]:
    """Parse the lines of `sacctmgr -nP show qos`."""
    rows = []
    for line in text.splitlines():
        if line.count("|") >= 5:
            name, *columns = line.split("|")
            group, user, account, each = map(parse_tres, columns[:4])
            timed = TimedCaps.of(columns[5:])
            rows.append(QosRow(name, group, user, account, each, parse_wall(columns[4]), timed))
    return tuple(rows)


def parse_associations(text: str) -> tuple[AssociationRow, ...]:
    """Parse the lines of `sacctmgr -nP show assoc`."""
    rows = [line.split("|") for line in text.splitlines() if line.count("|") >= 6]
    return tuple(
        AssociationRow(
            account=r[0],
            user=r[1],
            partition=r[2],
            parent=r[3],
            group=parse_tres(r[4]),
            per_job=parse_tres(r[5]),
            wall_s=parse_wall(r[6]),
            timed=TimedCaps.of(r[7:]),
        )
        for r in rows
    )


def parse_wall(text: str) -> int | None:
    """Return a time limit in seconds; None for no limit.

    >>> parse_wall("1-02:00:00"), parse_wall("00:30:00"), parse_wall("")
    (93600, 1800, None)
    """
    match = _WALL.fullmatch(text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(n or 0) for n in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_tres(text: str) -> dict[str, int]:
    """Return caps from Slurm's notation, memory in MB, of the resources that a resize can change.

    >>> parse_tres("cpu=8,gres/gpu:a100=4,gres/gpu=6,mem=2G,billing=9")
    {'cpu': 8, 'gpu:a100': 4, 'gpu': 6, 'mem': 2048}
    """
    caps = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        base, _, gpu_type = name.partition(":")
        resource = _RESOURCES.get(base)
        if resource is None or not value:
            continue
        factor = _UNITS.get(value[-1].upper())
        try:
            number = float(value[:-1]) * factor if factor else float(value)
        except ValueError:  # "UNLIMITED", or a word of a later Slurm
            continue
        if 0 <= number < _NO_CAP:  # -1 clears a limit
            caps[f"{resource}:{gpu_type}" if gpu_type else resource] = int(number)
    return caps


def _qos_limits(
    rows: Iterable[QosRow], jobs: list[Job], partition_qos: Mapping[str, str]
) -> Iterable[Limit]:
    for row in rows:
        qos_jobs = [j for j in jobs if row.name in (j.qos, partition_qos.get(j.partition))]
        yield from _limits(f"QOS {row.name} GrpTRES", row.group, qos_jobs)
        for user in sorted({j.user for j in qos_jobs}) if row.per_user else ():
            limited_jobs = [j for j in qos_jobs if j.user == user]
            yield from _limits(f"QOS {row.name} MaxTRESPerUser", row.per_user, limited_jobs)
        for account in sorted({j.account for j in qos_jobs}) if row.per_account else ():
            limited_jobs = [j for j in qos_jobs if j.account == account]
            yield from _limits(f"QOS {row.name} MaxTRESPerAccount", row.per_account, limited_jobs)
        for job in qos_jobs if row.per_job else ():
            yield from _limits(f"QOS {row.name} MaxTRES", row.per_job, [job])
        yield from _wall(f"QOS {row.name}", row.wall_s, qos_jobs)
        yield from _timed(f"QOS {row.name}", row.timed, qos_jobs)


def _association_limits(rows: Iterable[AssociationRow], jobs: list[Job]) -> Iterable[Limit]:
    rows = tuple(rows)
    parents = {r.account: r.parent for r in rows if not r.user}
    above: dict[str, set[str]] = {}
    for account in {j.account for j in jobs}:
        chain, ancestor = {account}, account
        while parents.get(ancestor) and parents[ancestor] not in chain:
            ancestor = parents[ancestor]
            chain.add(ancestor)
        above[account] = chain
    for row in rows:
        if not (row.group or row.per_job or row.wall_s is not None or row.timed != TimedCaps()):
            continue
        association_jobs = [
            j
            for j in jobs
            if (
                (j.account == row.account and j.user == row.user)
                if row.user
                else row.account in above[j.account]
            )
            and row.partition in ("", j.partition)
        ]
        name = f"association {row.account}{'/' + row.user if row.user else ''}"
        yield from _limits(f"{name} GrpTRES", row.group, association_jobs)
        for job in association_jobs if row.per_job else ():
            yield from _limits(f"{name} MaxTRES", row.per_job, [job])
        yield from _wall(name, row.wall_s, association_jobs)
        yield from _timed(name, row.timed, association_jobs)


def _wall(name: str, wall_s: int | None, jobs: list[Job]) -> Iterable[Limit]:
    if jobs and wall_s is not None:
        ids = frozenset(j.job_id for j in jobs)
        yield Limit(name=f"{name} MaxWall", resource="wall", cap=wall_s, jobs=ids)


def _timed(name: str, timed: TimedCaps, jobs: list[Job]) -> Iterable[Limit]:
    """Yield caps on the GPUs of a node, and on the GPUs that the minutes leave each elastic job.

    A job of which a limit leaves less than it holds keeps what it holds.
    """
    elastic = [j for j in jobs if j.elastic]
    if elastic and "gpu" in timed.node:
        cap, ids = timed.node["gpu"], frozenset(j.job_id for j in elastic)
        shown = f"{name} MaxTRESPerNode gres/gpu={cap}"
        yield Limit(name=shown, resource=GPUS_OF_A_NODE, cap=cap, jobs=ids)
    kinds = (("MaxTRESMins", timed.job_minutes), ("GrpTRESRunMins", timed.group_minutes))
    if not any(caps for _, caps in kinds):
        return
    now = time.time()
    used = {j.job_id: j.gpus * left for j in jobs if (left := _minutes_left(j, now)) is not None}
    running = {j.job_id for j in jobs if j.state is not JobState.PENDING}
    for job in elastic:
        left = _minutes_left(job, now)
        if left is None:
            continue
        others = sum(m for i, m in used.items() if i in running and i != job.job_id)
        held = job.allocation.gpus if job.allocation else 0
        for kind, caps in kinds:
            if "gpu" not in caps:
                continue
            minutes = caps["gpu"] - (others if kind == "GrpTRESRunMins" else 0)
            shown = f"{name} {kind} gres/gpu={caps['gpu']}"
            cap = max(held, int(minutes // left))
            yield Limit(name=shown, resource="gpu", cap=cap, jobs=frozenset({job.job_id}))


def _minutes_left(job: Job, now: float) -> int | None:
    """Return the minutes that a job may still run, at least one; None: no limit."""
    if job.time_limit_s is None:
        return None
    ran_s = 0.0 if job.start_time is None else now - job.start_time
    return max(1, math.ceil((job.time_limit_s - ran_s) / 60))


def _limits(name: str, caps: Mapping[str, int], jobs: list[Job]) -> Iterable[Limit]:
    if not jobs:
        return
    ids = frozenset(j.job_id for j in jobs)
    for resource, cap in caps.items():
        shown = resource.replace("gpu", "gres/gpu")
        yield Limit(name=f"{name} {shown}={cap}", resource=resource, cap=cap, jobs=ids)
