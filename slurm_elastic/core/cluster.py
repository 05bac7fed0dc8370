"""The cluster at one instant, as frozen values.

A `Snapshot` holds all input of a decision: nodes with their use, jobs, the switch tree, partitions
and limits. The live reader (`slurm_elastic.slurm.readers.cluster_reader`) and the simulator both
build it.

>>> a = Allocation.of("a100", {"g02": 4, "g01": 4})
>>> a.gpus, a.nodes
(8, ('g01', 'g02'))
>>> str(a)
'8 a100 on g01, g02'
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.member_orders import CompanionComment
from slurm_elastic.core.nodelist import expand
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.submission import Submission


@dataclass(frozen=True, slots=True)
class Allocation:
    """GPUs of one type on named nodes.

    Attributes:
        gpu_type: Slurm's gres type, as in `gres/gpu:a100`.
        shares: (node, GPUs) pairs, sorted by node, GPUs > 0.
        half: half of one GPU, by shards; another job may hold the other half.
    """

    gpu_type: str
    shares: tuple[tuple[str, int], ...]
    half: bool = False

    @classmethod
    def of(cls, gpu_type: str, shares: Mapping[str, int], *, half: bool = False) -> Allocation:
        """Build from a mapping node → GPUs; zero shares are dropped."""
        return cls(gpu_type, tuple(sorted((n, g) for n, g in shares.items() if g)), half)

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        body = {"gpu_type": self.gpu_type, "shares": dict(self.shares)}
        return body | {"half": True} if self.half else body

    @classmethod
    def from_body(cls, body: Mapping[str, Any] | None) -> Allocation | None:
        """Return it from the ledger's JSON; None for none."""
        if not body:
            return None
        return cls.of(body["gpu_type"], body["shares"], half=bool(body.get("half")))

    @property
    def whole(self) -> Allocation:
        """The same GPUs, undivided."""
        return Allocation(self.gpu_type, self.shares)

    @property
    def gpus(self) -> int:
        """GPUs over all nodes."""
        return sum(g for _, g in self.shares)

    @property
    def amount(self) -> float:
        """GPUs as they are accounted for: half of one is 0.5."""
        return 0.5 if self.half else self.gpus

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node names, sorted."""
        return tuple(n for n, _ in self.shares)

    def on(self, node: str) -> int:
        """GPUs on one node, 0 when it has none."""
        return dict(self.shares).get(node, 0)

    def __str__(self) -> str:
        amount = "half of 1" if self.half else str(self.gpus)
        return f"{amount} {self.gpu_type or 'GPUs'} on {', '.join(self.nodes)}"


def shape_parameters(held: Allocation | None) -> dict[str, Any]:
    """Return the parameters of a reason that say which GPUs a job holds; None: it holds none."""
    if held is None:
        return {"gpus": 0, "gpu_type": ""}
    return {
        "gpus": held.gpus, "gpu_type": held.gpu_type, "gpu_part": 0.5 if held.half else None,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Companion:
    """Job that holds further GPUs for a job that was grown in place; on one node.

    Attributes:
        start_time: epoch s; 0: not known.
    """

    job_id: int
    allocation: Allocation
    start_time: float = 0.0


class JobState(enum.Enum):
    """Slurm's base states, folded to those that a decision distinguishes."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    COMPLETING = "COMPLETING"
    SUSPENDED = "SUSPENDED"
    ENDED = "ENDED"


#: States of a job that has started and is not about to end.
STARTED = (JobState.RUNNING, JobState.SUSPENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node and its use.

    Attributes:
        gpu_type: its one GPU type; "" when untyped, without GPUs or not managed.
        gpus: of that type; 0 on a node whose GPUs are not managed.
        unmanaged_gpus: GPUs and slices of GPUs (MIG) on a node that has GPUs of several types, or
            slices: no elastic job grows onto it, and jobs there are not resized; else 0.
        available: up, not drained, draining, down, just back, planned for maintenance or in a
            foreign reservation: elastic jobs may be placed here.
        planned: reserved by Slurm's backfill for a pending job (PLANNED): no growth into it.
        asleep: idle and without power, or booting: not available, but Slurm starts pending jobs
            there after a boot.
        used_gpus, used_cpus, used_memory_mb: in use by all jobs, completing ones included; a GPU
            of which jobs hold parts (shards, MPS) is in use.
        shared_gpus: indexes of the GPUs of which jobs hold parts; () if none, or not known.
        shards: of each GPU; 0: its GPUs are not divided, or not equally.
        owner: user whose jobs alone may start there, while one runs (ExclusiveUser); "": none.
        domains: indexes of the GPUs of each link domain, from gres.conf; () if not stated there.
    """

    name: str
    gpu_type: str = ""
    gpus: int = 0
    unmanaged_gpus: int = 0
    cpus: int = 0
    memory_mb: int = 0
    used_gpus: int = 0
    used_cpus: int = 0
    used_memory_mb: int = 0
    shared_gpus: tuple[int, ...] = ()
    shards: int = 0
    partitions: frozenset[str] = frozenset()
    features: frozenset[str] = frozenset()
    available: bool = True
    planned: bool = False
    asleep: bool = False
    state: str = "IDLE"
    owner: str = ""
    domains: tuple[tuple[int, ...], ...] = ()

    @property
    def free_gpus(self) -> int:
        """GPUs that are not in use; 0 on a node that is not available."""
        return max(0, self.gpus - self.used_gpus) if self.available else 0


@dataclass(frozen=True, slots=True)
class UnusableNodes:
    """Names of nodes on which no job may start.

    Attributes:
        all: down, drained, planned for maintenance or just back.
        lost: those of them that slurmctld has given up, and those that are just back.
    """

    all: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job (or array task), elastic or not.

    Attributes:
        job_id: Slurm's raw id; `display_id` as people name it (`4711`, `4711_3`).
        submission: directive and submitted shape from AdminComment; None for a rigid job.
        record_replaced: AdminComment has another text by now; `submission` is what it had before.
        override: directive that replaces the submitted one, as `selastic update` has set it or
            without the shapes that the job is not to get now; None: none.
        managed: False for an elastic job that must not be changed; see `unmanaged_reason`
            (interactive, heterogeneous, held by its owner, …).
        run: restart count; together with `key` it names one attempt.
        submit_time: of the present attempt: Slurm sets it anew at a requeue.
        allocation: GPUs held (also while COMPLETING), those of its companions included; None while
            pending.
        companions: jobs that hold a part of `allocation` for it.
        companion: base, attempt and change of which it is itself a companion, from AdminComment
            or else from Comment, which its owner may have written; None: it is none.
        companion_recorded: whether AdminComment says so.
        gpus: GPUs held or, while pending, requested.
        cpus_per_gpu, memory_per_gpu_mb: CPUs and memory for each GPU on a node, from the
            submission (from the allocation while running).
        cpus_follow_gpus: Slurm computes its CPUs from its GPUs, by a default of the site
            (DefCpuPerGPU).
        takes_all_memory: it asks for none, in a site without a default: where Slurm counts memory,
            it gets all of its nodes, whatever its GPUs are.
        time_limit_s: of the present run; None for unlimited.
        begin_time: earliest start (epoch s) when a pending job has one ahead, else None.
        required_nodes, excluded_nodes, features: the constraints in force now; the user's own
            are in `submission`.
        gpu_type: type that a pending job requests, "" for any.
        min_nodes: fewest nodes that a pending job requests.
        exit_code: of the last attempt of a job that ended, or failed and was requeued for that,
            128 + n for signal n; else 0.
        end_state: Slurm's state of a job that ended: COMPLETED, FAILED, TIMEOUT, …; else "".
        devices: indexes of the GPUs held on each node, as Slurm writes them (`0-2,5`); nodes
            without this information are left out.
        parts: (node, index) of each GPU of which the job holds a part (shards, MPS); index -1: not
            known.
        shards: number that a pending job requests on a node.
        whole_nodes: it gets all GPUs and CPUs of its nodes (--exclusive).
        wckey: the accounting key that its user gave (--wckey); "": none, or the user's default.
    """

    job_id: int
    display_id: str
    name: str
    user: str
    uid: int
    state: JobState
    partition: str
    account: str = ""
    qos: str = ""
    reason: str = ""
    priority: int = 0
    nice: int = 0
    submit_time: float = 0.0
    start_time: float | None = None
    end_time: float | None = None
    begin_time: float | None = None
    time_limit_s: int | None = None
    run: int = 0
    submission: Submission | None = None
    record_replaced: bool = False
    override: Directive | None = None
    managed: bool = True
    unmanaged_reason: Reason | None = None
    allocation: Allocation | None = None
    companions: tuple[Companion, ...] = ()
    companion: CompanionComment | None = None
    companion_recorded: bool = False
    gpus: int = 0
    gpu_type: str = ""
    min_nodes: int = 1
    cpus: int = 0
    cpus_per_gpu: float = 1.0
    cpus_follow_gpus: bool = False
    memory_per_gpu_mb: float = 0.0
    takes_all_memory: bool = False
    required_nodes: tuple[str, ...] = ()
    excluded_nodes: tuple[str, ...] = ()
    features: str = ""
    reservation: str = ""
    dependency: str = ""
    comment: str = ""
    extra: str = ""
    requeueable: bool = True
    exit_code: int = 0
    end_state: str = ""
    devices: tuple[tuple[str, str], ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    shards: int = 0
    whole_nodes: bool = False
    wckey: str = ""

    @property
    def indexes(self) -> Mapping[str, tuple[int, ...]]:
        """`devices` by node; entries that cannot be read are left out."""
        indexes = {}
        for node, text in self.devices:
            try:
                indexes[node] = tuple(int(i) for i in expand(f"[{text}]"))
            except ValueError:
                continue
        return indexes

    @property
    def base_allocation(self) -> Allocation | None:
        """GPUs held by this job itself, without its companions."""
        if self.allocation is None or not self.companions:
            return self.allocation
        shares = dict(self.allocation.shares)
        for companion in self.companions:
            for node, gpus in companion.allocation.shares:
                shares[node] -= gpus
        return Allocation.of(self.allocation.gpu_type, shares)

    @property
    def elastic(self) -> bool:
        """Whether the controller may shape this job."""
        return self.submission is not None and self.managed

    @property
    def directive(self) -> Directive | None:
        """The directive to go by, None for a rigid job: `override`, else the submitted one."""
        return self.override or (self.submission.directive if self.submission else None)

    @property
    def key(self) -> str:
        """Identifier of this job over requeues and restarts of slurmctld, which may reuse ids.

        It does not use Slurm's submit time, as a requeue changes that.
        """
        return f"{self.job_id}@{self.submission.submitted if self.submission else self.uid}"


@dataclass(frozen=True, slots=True)
class Switch:
    """One switch of topology/tree (or block): direct children and all nodes below."""

    name: str
    level: int
    nodes: tuple[str, ...]
    children: tuple[str, ...] = ()
    link_speed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """One partition and its limits.

    Attributes:
        up: jobs start in it; one that is requeued while it is not waits.
        max_cpus_per_node: of all its jobs on a node together.
        max_memory_per_node_mb: of each job.
        has_cpus_per_gpu: it has a default of the CPUs of each GPU (DefCpuPerGPU).
        exclusive_user: a node has jobs of one user only.
        whole_nodes: each job gets all GPUs and CPUs of its nodes (OverSubscribe=EXCLUSIVE).
        tier: jobs of a higher tier are scheduled first, whatever their priority.
    """

    name: str
    nodes: tuple[str, ...] = ()
    up: bool = True
    max_time_s: int | None = None
    min_nodes: int = 1
    max_nodes: int | None = None
    max_cpus_per_node: int | None = None
    max_memory_per_node_mb: int | None = None
    has_cpus_per_gpu: bool = False
    exclusive_user: bool = False
    whole_nodes: bool = False
    tier: int = 0


#: Resource of a `Limit` on the GPUs that each job may have on each node.
GPUS_OF_A_NODE = "gpus-of-a-node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A cap on one resource over a set of jobs, from an association, a QOS or a partition.

    Slurm lets an operator's update exceed CPU and memory limits, so placement checks all of
    them here.

    Attributes:
        name: as shown to people: `QOS normal MaxTRESPerUser gres/gpu=8`; of a share of the site,
            the partition or the user, "" for the whole site.
        scope: of a share: `site`, `partition` or `user`; "": Slurm's own limit.
        resource: "gpu", "gpu:TYPE", "node", "cpu" or "mem" (MB); "wall" (s) and `GPUS_OF_A_NODE`,
            which are of each job.
        cap: largest sum over `jobs`.
        jobs: ids of jobs counted against it, running or pending.
        spared: GPUs of each job that are not counted.
    """

    name: str
    resource: str
    cap: int
    jobs: frozenset[int]
    spared: Mapping[int, int] = field(default_factory=dict)
    scope: str = ""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """The cluster at `time` (epoch s). Node names and job ids are unique."""

    time: float
    nodes: tuple[Node, ...]
    jobs: tuple[Job, ...]
    switches: tuple[Switch, ...] = ()
    partitions: tuple[Partition, ...] = ()
    limits: tuple[Limit, ...] = ()
    reservations: tuple[Reservation, ...] = field(default=())

    @cached_property
    def node(self) -> Mapping[str, Node]:
        """Nodes by name."""
        return {n.name: n for n in self.nodes}

    @cached_property
    def per_node(self) -> Mapping[str, int]:
        """GPUs of the largest node of each type."""
        largest: dict[str, int] = {}
        for node in self.nodes:
            if node.gpus > largest.get(node.gpu_type, 0):
                largest[node.gpu_type] = node.gpus
        return largest

    @cached_property
    def smallest(self) -> Mapping[str, Mapping[str, int]]:
        """GPUs on the smallest node of each type, by partition."""
        sizes_by_partition: dict[str, dict[str, int]] = {}
        for partition in self.partitions:
            sizes = sizes_by_partition.setdefault(partition.name, {})
            for name in partition.nodes:
                node = self.node.get(name)
                if node and node.gpus:
                    sizes[node.gpu_type] = min(sizes.get(node.gpu_type, node.gpus), node.gpus)
        return sizes_by_partition

    @cached_property
    def named(self) -> Mapping[str, tuple[int, ...]]:
        """Raw ids by the names in use: `4711`, `4711_3`, an array's number for all its tasks."""
        exact: dict[str, list[int]] = {}
        arrays: dict[str, list[tuple[int, str, int]]] = {}
        for job in self.jobs:
            exact.setdefault(job.display_id, []).append(job.job_id)
            array, task, number = job.display_id.partition("_")
            if task:
                place = int(number) if number.isdecimal() else -1
                arrays.setdefault(array, []).append((place, number, job.job_id))
        tasks = {name: [job_id for *_, job_id in sorted(rows)] for name, rows in arrays.items()}
        return {name: tuple(ids) for name, ids in (tasks | exact).items()}

    @cached_property
    def job(self) -> Mapping[int, Job]:
        """Jobs by raw id."""
        return {j.job_id: j for j in self.jobs}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """One of Slurm's reservations; `ours`: made by the controller."""

    name: str
    nodes: tuple[str, ...]
    start_time: float
    end_time: float
    users: tuple[str, ...] = ()
    comment: str = ""
    ours: bool = False
