"""Limits of sets of jobs that follow from the rows of associations and QOS.

A limit of a QOS replaces the same limit of associations, and that of a partition's QOS the one of
the job's QOS (with the flag OverPartQOS the other way round). Jobs under the replacing limit still
count where the other one binds. Limits of one job are those of its own association, which has
inherited them from its accounts.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from slurm_elastic.core.cluster import GPUS_OF_A_NODE, Job, JobState, Limit, Node

#: (Kind, resource) of limits that do not bind a job, as others replace them.
_Replaced = frozenset[tuple[str, str]]


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

    @property
    def kinds(self) -> tuple[tuple[str, Mapping[str, int]], ...]:
        """Caps by kind."""
        return (
            ("MaxTRESPerNode", self.node),
            ("MaxTRESMins", self.job_minutes),
            ("GrpTRESRunMins", self.group_minutes),
        )


@dataclass(frozen=True, slots=True)
class QosRow:
    """One QOS; each mapping is resource → cap.

    Attributes:
        over_partition: its limits replace those of the partition's QOS.
        relative: its limits are percentages: of its partition if it is the QOS of one, else of the
            cluster.
    """

    name: str
    group: Mapping[str, int]
    per_user: Mapping[str, int]
    per_account: Mapping[str, int]
    per_job: Mapping[str, int]
    wall_s: int | None = None
    timed: TimedCaps = field(default_factory=TimedCaps)
    over_partition: bool = False
    relative: bool = False

    @property
    def kinds(self) -> frozenset[tuple[str, str]]:
        """(Kind, resource) of each limit that it sets."""
        return frozenset(
            (kind, resource)
            for kind, caps in (
                ("GrpTRES", self.group),
                ("MaxTRESPerUser", self.per_user),
                ("MaxTRESPerAccount", self.per_account),
                ("MaxTRES", self.per_job),
                ("MaxWall", {} if self.wall_s is None else {"wall": self.wall_s}),
                *self.timed.kinds,
            )
            for resource in caps
        )


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


def job_limits(
    qos: Iterable[QosRow],
    associations: Iterable[AssociationRow],
    jobs: Iterable[Job],
    partition_qos: Mapping[str, str] | None = None,
    nodes: Iterable[Node] = (),
) -> tuple[Limit, ...]:
    """Return the limits of jobs that run or are pending; limits of no job are left out.

    Args:
        qos: all QOS.
        associations: all associations.
        jobs: all jobs.
        partition_qos: QOS by name of its partition.
        nodes: of the cluster, for limits that are percentages.
    """
    live = [j for j in jobs if j.state is not JobState.ENDED]
    partition_qos, nodes = partition_qos or {}, tuple(nodes)
    rows = [_absolute(row, partition_qos, nodes) if row.relative else row for row in qos]
    of_jobs = _QosOfJobs(rows, partition_qos)
    return (*_qos_limits(of_jobs, live), *_association_limits(associations, live, of_jobs))


def _absolute(row: QosRow, partition_qos: Mapping[str, str], nodes: Iterable[Node]) -> QosRow:
    """Return a QOS with numbers in place of percentages."""
    own = {name for name, qos in partition_qos.items() if qos == row.name}
    total: dict[str, int] = {}
    for node in nodes:
        if own and own.isdisjoint(node.partitions):
            continue
        gpus = node.gpus + node.unmanaged_gpus
        parts = {"node": 1, "gpu": gpus, "cpu": node.cpus, "mem": node.memory_mb}
        for resource, count in (parts | {f"gpu:{node.gpu_type}": node.gpus}).items():
            total[resource] = total.get(resource, 0) + count

    def of_total(caps: Mapping[str, int]) -> Mapping[str, int]:
        return {r: total[r] * percent // 100 for r, percent in caps.items() if r in total}

    return dataclasses.replace(
        row,
        group=of_total(row.group),
        per_user=of_total(row.per_user),
        per_account=of_total(row.per_account),
        per_job=of_total(row.per_job),
        timed=TimedCaps(node=of_total(row.timed.node)),
    )


class _QosOfJobs:
    """QOS of each job, that of its partition included, and which limits they replace.

    Args:
        rows: all QOS.
        partition_qos: QOS by name of its partition.
    """

    def __init__(self, rows: Iterable[QosRow], partition_qos: Mapping[str, str]) -> None:
        self.rows = {row.name: row for row in rows}
        self._partition_qos = partition_qos
        self._orders: dict[tuple[str, str], tuple[QosRow, ...]] = {}
        self._replaced: dict[tuple[str, str, str], _Replaced] = {}

    def order(self, job: Job) -> tuple[QosRow, ...]:
        """Return the QOS of a job: the limits of each replace those of the next."""
        key = (job.qos, job.partition)
        if key not in self._orders:
            names = [self._partition_qos.get(name, "") for name in job.partition.split(",")]
            partition = [self.rows[name] for name in dict.fromkeys(names) if name in self.rows]
            own = [self.rows[job.qos]] if job.qos in self.rows else []
            first = own and own[0].over_partition
            both = [*own, *partition] if first else [*partition, *own]
            self._orders[key] = tuple({row.name: row for row in both}.values())
        return self._orders[key]

    def replaced_by_earlier(self, job: Job, row: QosRow) -> _Replaced:
        """Return the limits of a QOS of a job that an earlier one replaces.

        While a job has several partitions to start in, no limit counts as replaced: the QOS that
        will count is not known.
        """
        if "," in job.partition:
            return frozenset()
        key = (job.qos, job.partition, row.name)
        if key not in self._replaced:
            rows = self.order(job)
            self._replaced[key] = _kinds(rows[: rows.index(row)])
        return self._replaced[key]

    def replaced_of_associations(self, job: Job) -> _Replaced:
        """Return the limits of a job's associations that its QOS replace."""
        if "," in job.partition:
            return frozenset()
        key = (job.qos, job.partition, "")
        if key not in self._replaced:
            self._replaced[key] = _kinds(self.order(job))
        return self._replaced[key]


def _kinds(rows: Iterable[QosRow]) -> _Replaced:
    return frozenset[tuple[str, str]]().union(*(row.kinds for row in rows))


def _qos_limits(of_jobs: _QosOfJobs, jobs: list[Job]) -> Iterable[Limit]:
    for row in of_jobs.rows.values():
        qos_jobs = [j for j in jobs if row in of_jobs.order(j)]
        replaced = partial(of_jobs.replaced_by_earlier, row=row)
        name = f"QOS {row.name}"
        yield from _limits_of_sums(f"{name} GrpTRES", row.group, qos_jobs, replaced)
        for user in sorted({j.user for j in qos_jobs}) if row.per_user else ():
            limited_jobs = [j for j in qos_jobs if j.user == user]
            yield from _limits_of_sums(
                f"{name} MaxTRESPerUser", row.per_user, limited_jobs, replaced
            )
        for account in sorted({j.account for j in qos_jobs}) if row.per_account else ():
            limited_jobs = [j for j in qos_jobs if j.account == account]
            yield from _limits_of_sums(
                f"{name} MaxTRESPerAccount", row.per_account, limited_jobs, replaced
            )
        yield from _limits_of_each_job(name, row, qos_jobs, replaced)


def _association_limits(
    rows: Iterable[AssociationRow], jobs: list[Job], of_jobs: _QosOfJobs
) -> Iterable[Limit]:
    rows = tuple(rows)
    parents = {r.account: r.parent for r in rows if not r.user}
    above: dict[str, set[str]] = {}
    for account in {j.account for j in jobs}:
        chain, ancestor = {account}, account
        while parents.get(ancestor) and parents[ancestor] not in chain:
            ancestor = parents[ancestor]
            chain.add(ancestor)
        above[account] = chain
    of_users = {(r.account, r.user, r.partition) for r in rows if r.user}

    def own(job: Job) -> tuple[str, str, str] | None:
        """Return the association of a job: that of its partition, if there is one."""
        keys = ((job.account, job.user, job.partition), (job.account, job.user, ""))
        return next((key for key in keys if key in of_users), None)

    for row in rows:
        if not (row.group or row.per_job or row.wall_s is not None or row.timed != TimedCaps()):
            continue
        key = (row.account, row.user, row.partition)
        if row.user:
            association_jobs = [j for j in jobs if own(j) == key]
            each = association_jobs
        else:
            association_jobs = [j for j in jobs if row.account in above[j.account]]
            each = [j for j in association_jobs if own(j) is None]
        name = f"association {row.account}{'/' + row.user if row.user else ''}"
        yield from _limits_of_sums(
            f"{name} GrpTRES", row.group, association_jobs, of_jobs.replaced_of_associations
        )
        yield from _limits_of_each_job(name, row, each, of_jobs.replaced_of_associations)


def _limits_of_sums(
    name: str, caps: Mapping[str, int], jobs: list[Job], replaced: Callable[[Job], _Replaced]
) -> Iterable[Limit]:
    """Yield caps over the sum of all jobs, less what jobs use for which others replace them."""
    kind = name.rpartition(" ")[2]
    for resource, cap in caps.items():
        bound = [j for j in jobs if (kind, resource) not in replaced(j)]
        if not bound:
            continue
        ids = frozenset(j.job_id for j in bound)
        others = (j for j in jobs if j.job_id not in ids and j.state is not JobState.PENDING)
        left = max(0, cap - sum(_used(j, resource) for j in others))
        yield Limit(name=_limit_name(name, resource, cap), resource=resource, cap=left, jobs=ids)


def _limits_of_each_job(
    name: str,
    row: QosRow | AssociationRow,
    jobs: list[Job],
    replaced: Callable[[Job], _Replaced],
) -> Iterable[Limit]:
    """Yield caps of each job, by its size, its time limit, and both."""
    for resource, cap in row.per_job.items():
        limit_name = _limit_name(f"{name} MaxTRES", resource, cap)
        for job in jobs:
            if ("MaxTRES", resource) not in replaced(job):
                ids = frozenset({job.job_id})
                yield Limit(name=limit_name, resource=resource, cap=cap, jobs=ids)
    walled = [j for j in jobs if ("MaxWall", "wall") not in replaced(j)]
    if walled and row.wall_s is not None:
        ids = frozenset(j.job_id for j in walled)
        yield Limit(name=f"{name} MaxWall", resource="wall", cap=row.wall_s, jobs=ids)
    yield from _limits_of_time(name, row.timed, jobs, replaced)


def _used(job: Job, resource: str) -> int:
    """Return the amount of a resource that a running job has."""
    if resource == "node":
        return len(job.allocation.shares) if job.allocation else job.min_nodes
    if resource == "cpu":
        return job.cpus
    if resource == "mem":
        return math.ceil(job.memory_per_gpu_mb * job.gpus)
    return job.gpus if resource in ("gpu", f"gpu:{job.gpu_type}") else 0


def _limit_name(name: str, resource: str, cap: int) -> str:
    return f"{name} {resource.replace('gpu', 'gres/gpu')}={cap}"


def _limits_of_time(
    name: str, timed: TimedCaps, jobs: list[Job], replaced: Callable[[Job], _Replaced]
) -> Iterable[Limit]:
    """Yield caps on the GPUs of a node, and on the GPUs that the minutes leave each elastic job.

    A job of which a limit leaves less than it holds keeps what it holds.
    """
    elastic = [j for j in jobs if j.elastic]
    on_node = [j for j in elastic if ("MaxTRESPerNode", "gpu") not in replaced(j)]
    if on_node and "gpu" in timed.node:
        cap, ids = timed.node["gpu"], frozenset(j.job_id for j in on_node)
        limit_name = _limit_name(f"{name} MaxTRESPerNode", "gpu", cap)
        yield Limit(name=limit_name, resource=GPUS_OF_A_NODE, cap=cap, jobs=ids)
    kinds = [(kind, caps["gpu"]) for kind, caps in timed.kinds[1:] if "gpu" in caps]
    if not kinds:
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
        for kind, most in kinds:
            if (kind, "gpu") in replaced(job):
                continue
            minutes = most - (others if kind == "GrpTRESRunMins" else 0)
            cap = max(held, int(minutes // left))
            limit_name, ids = _limit_name(f"{name} {kind}", "gpu", most), frozenset({job.job_id})
            yield Limit(name=limit_name, resource="gpu", cap=cap, jobs=ids)


def _minutes_left(job: Job, now: float) -> int | None:
    """Return the minutes that a job may still run, at least one; None: no limit."""
    if job.time_limit_s is None:
        return None
    ran_s = 0.0 if job.start_time is None else now - job.start_time
    return max(1, math.ceil((job.time_limit_s - ran_s) / 60))
