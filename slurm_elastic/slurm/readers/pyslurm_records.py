"""Conversion of pyslurm's records into values of this project. Pure; no pyslurm needed.

Strings that users can write are hostile: one that is not UTF-8 reads as empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from slurm_elastic.core.cluster import Allocation, Job, JobState, Node, Partition
from slurm_elastic.core.directive_grammar import is_slice
from slurm_elastic.core.nodelist import expand
from slurm_elastic.core.reason import Reason
from slurm_elastic.slurm import power_states

_UNUSABLE = (
    "DOWN",
    "DRAIN",
    "FAIL",
    "MAINT",
    "REBOOT",
    "POWER",
    "FUTURE",
    "UNKNOWN",
    "RESPOND",
    "INVAL",
)
#: Slurm itself holds a job that it could not launch; as squeue shows it.
LAUNCH_FAILED = "launch_failed_requeued_held"
#: Descriptions that Slurm puts in place of a reason.
_DESCRIPTIONS = {
    "launch failed requeued held": LAUNCH_FAILED,
    "user env retrieval failed requeued held": LAUNCH_FAILED,  # from 25.05 on
    "job requeued in held state": "JobHeldUser",
}
#: Slurm's reason of a job that waits for free GPUs only, while one of our reservations is for a
#: few seconds on nodes that it could get.
_BEHIND_OURS = "ReqNodeNotAvail, May be reserved for other job"
#: Slurm's reason when some nodes are down. A job without a node list waits for free GPUs on the
#: others; Slurm keeps this reason long after the nodes have come back.
_SOME_DOWN = "ReqNodeNotAvail, UnavailableNodes:"


#: Generic resources that are parts of a GPU. Slurm does not count a GPU of which jobs hold parts as
#: allocated, and yet gives it to no job that asks for whole ones. A job holds parts of one GPU on
#: each node (unless SelectTypeParameters has MULTIPLE_SHARING_GRES_PJ).
PARTS_OF_GPUS = ("shard", "mps")

#: Fields from which a `Job` is made, without those that `mark` adds.
COMPARED = (
    *("id", "state", "submit_time", "start_time", "end_time", "eligible_time", "requeue_count"),
    *("admin_comment", "comment", "extra", "name", "user_id", "partition", "account", "qos"),
    *("priority", "nice", "time_limit", "state_reason", "reservation", "constraints"),
    *("dependencies", "required_nodes", "excluded_nodes", "allocated_nodes", "num_nodes"),
    *("cpus", "memory_per_node", "memory_per_cpu", "memory_per_gpu", "gres_per_node"),
    *("is_requeueable", "is_batch_job", "heterogeneous_id", "exit_code", "exit_code_signal"),
    *("array_id", "array_task_id", "array_tasks_waiting", "licenses", "wckey"),
    "resource_sharing",
)
_compared = attrgetter(*COMPARED)
#: States in which the requested resources of a job cannot change any more.
_FIXED = frozenset({"RUNNING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT"})


def mark(raw: Any, now: float) -> tuple[Any, ...]:
    """Return a mark of a job's record: records with equal marks make equal `Job`s.

    Reading the requested resources takes as long as all other fields together: they are left out
    where they cannot change. The GPUs that a running job holds change only with its nodes.

    Args:
        raw: record of pyslurm.
        now: epoch s; whether the job's begin time has passed is part of the mark.

    Returns:
        Values to compare; the job's id comes first.

    Raises:
        UnicodeError: a field is not UTF-8.
    """
    compared: tuple[Any, ...] = _compared(raw)
    if raw.state in _FIXED:
        return compared
    tres = raw.requested_tres
    return (
        *compared,
        requested_gpus(raw, tres),
        min_nodes(raw, tres),
        (raw.eligible_time or 0) > now,
    )


def unmanageable(raw: Any) -> Reason | None:
    """Return why an elastic job cannot be managed, or None."""
    if not raw.is_batch_job:
        return Reason("interactive")
    if raw.heterogeneous_id:
        return Reason("heterogeneous")
    if not raw.is_requeueable:
        return Reason("no-requeue")
    if raw.state == "RUNNING" and text(raw, "state_reason").startswith("JobHeld"):
        return Reason("held-while-running")
    if raw.state == "PENDING" and raw.array_id is not None and raw.array_tasks_waiting:
        return Reason("array-waits")
    return None


def node(
    raw: Any,
    used_by_jobs: int,
    *,
    sharing_jobs: int = 0,
    barred: bool,
    domains: tuple[tuple[int, ...], ...] = (),
) -> Node:
    """Convert the record of a node.

    Args:
        raw: record of pyslurm.
        used_by_jobs: GPUs that jobs hold on it; slurmctld itself counts them only with
            AccountingStorageTRES=gres/gpu.
        sharing_jobs: number of jobs that hold parts of its GPUs.
        barred: no elastic job may be placed on it: in a reservation that is not ours, or just lost.
        domains: its link domains (`slurm.gres`).
    """
    gres = {k: int(v) for k, v in (raw.configured_gres or {}).items()}
    gpus = {k: v for k, v in gres.items() if k == "gpu" or k.startswith("gpu:")}
    is_managed = len(gpus) == 1 and not is_slice(next(iter(gpus)).partition(":")[2])
    (name, count) = next(iter(gpus.items())) if is_managed else ("", 0)
    allocated = {k: int(v) for k, v in (raw.allocated_gres or {}).items()}
    held = max(allocated.get("gpu", 0), used_by_jobs)
    # pyslurm, which is used if no node has parts of GPUs when the controller starts, does not tell
    # of which GPUs jobs hold parts: each job may hold those of another one.
    shared = getattr(raw, "shared_gpus", None)
    in_parts = min(sharing_jobs, max(0, count - held)) if shared is None else len(shared)
    state = str(raw.state or "UNKNOWN")
    return Node(
        name=str(raw.name),
        gpu_type=name.partition(":")[2],
        gpus=count,
        unmanaged_gpus=0 if is_managed else sum(gpus.values()),
        cpus=int(raw.effective_cpus or raw.total_cpus or 0),
        memory_mb=int(raw.real_memory or 0)
        - int(getattr(raw, "memory_reserved_for_system", None) or 0),
        used_gpus=held + in_parts,
        shared_gpus=shared or (),
        shards=_shards_of_each_gpu(gres, count, getattr(raw, "shards_of_gpus", ())),
        used_cpus=int(raw.allocated_cpus or 0),
        used_memory_mb=int(raw.allocated_memory or 0),
        partitions=frozenset(raw.partitions or ()),
        features=frozenset(raw.active_features or raw.available_features or ()),
        available=not barred and usable(state),
        planned="PLANNED" in state,
        asleep=not barred and power_states.can_wake(state),
        state=state,
        owner=str(getattr(raw, "owner", None) or ""),
        domains=domains if sum(map(len, domains)) == count else (),
    )


def _shards_of_each_gpu(gres: Mapping[str, int], gpus: int, by_gpu: Iterable[int]) -> int:
    """Return the shards of each GPU of a node; 0 if it has none, or its GPUs differ in them.

    Args:
        gres: configured resources, by name.
        gpus: of the node.
        by_gpu: shards of each GPU, as gres.conf may set them one by one; empty: not known.
    """
    shards = sum(v for k, v in gres.items() if k.partition(":")[0] == "shard")
    differ = len(set(by_gpu)) > 1
    return shards // gpus if gpus and shards % gpus == 0 and not differ else 0


def has_parts_of_gpus(raw: Any) -> bool:
    """Return whether jobs may ask a node for parts of GPUs."""
    return any(name.partition(":")[0] in PARTS_OF_GPUS for name in raw.configured_gres or {})


def unreadable(raw: Any, state: JobState, error: str) -> Job:
    """Return an unmanaged job for a record that cannot be parsed; its GPUs count as used."""
    layout = (
        {} if state in (JobState.PENDING, JobState.ENDED) else raw.get_resource_layout_per_node()
    )
    held = allocation(layout)
    return Job(
        job_id=int(raw.id),
        display_id=str(raw.id),
        name="",
        user=str(raw.user_id),
        uid=int(raw.user_id or 0),
        state=state,
        partition="",
        managed=False,
        unmanaged_reason=Reason("record-unreadable", error=error),
        allocation=held,
        devices=devices(layout),
        parts=parts(layout),
        gpus=held.gpus if held else 0,
        gpu_type=held.gpu_type if held else "",
    )


def usable(state: str) -> bool:
    """Return whether Slurm starts jobs on a node in this state."""
    return not any(word in state for word in _UNUSABLE)


def partition(raw: Any) -> Partition:
    """Convert the record of a partition."""
    return Partition(
        name=str(raw.name),
        nodes=expand(raw.nodes or ""),
        up=str(raw.state) == "UP",
        max_time_s=limit_s(raw.max_time),
        min_nodes=max(1, number(getattr(raw, "min_nodes", None)) or 0),
        max_nodes=number(raw.max_nodes),
        max_cpus_per_node=number(getattr(raw, "max_cpus_per_node", None)) or None,
        max_memory_per_node_mb=number(getattr(raw, "max_memory_per_node", None)) or None,
        has_cpus_per_gpu=bool(number(getattr(raw, "default_cpus_per_gpu", None))),
        exclusive_user=bool(getattr(raw, "is_user_exclusive", False)),
        whole_nodes=getattr(raw, "oversubscribe", None) == "EXCLUSIVE",
        tier=number(getattr(raw, "priority_tier", None)) or 0,
    )


def allocation(layout: Mapping[str, Mapping[str, Any]]) -> Allocation | None:
    """Return GPUs per node; None without GPUs, or with more than one type."""
    types = gpu_types(layout)
    if len(types) != 1:
        return None
    shares: dict[str, int] = {}
    for node, _, count in _gpus_held(layout):
        shares[node] = shares.get(node, 0) + count
    return Allocation.of(types.pop(), shares)


def gpu_types(layout: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """Return the types of the GPUs held; "" for GPUs without a type."""
    return {gpu_type for _, gpu_type, _ in _gpus_held(layout)}


def _gpus_held(layout: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, int]]:
    """Yield node, type and number of the GPUs held."""
    for node, name, count, _ in _resources_held(layout):
        kind, _, type_and_socket = name.partition(":")
        if kind == "gpu" and count:
            yield node, type_and_socket.partition(":")[0], count


def devices(layout: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Return the indexes of the GPUs held on each node, in Slurm's notation."""
    return tuple(
        (node, indexes)
        for node, name, _, indexes in _resources_held(layout)
        if name.partition(":")[0] == "gpu" and indexes[:1].isdigit()
    )


def parts(layout: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, int], ...]:
    """Return (node, index) of each GPU of which a job holds a part; -1: its index is not known."""
    held = []
    for node, name, count, _ in _resources_held(layout):
        if count and name.partition(":")[0] in PARTS_OF_GPUS:
            gres = layout[node]["gres"][name]
            known = gres.get("parts", ()) if isinstance(gres, Mapping) else ()
            held += [(node, index) for index, _, _ in known] or [(node, -1)]
    return tuple(held)


def half_of_gpu(
    layout: Mapping[str, Mapping[str, Any]], type_of: Mapping[str, str]
) -> Allocation | None:
    """Return the allocation of a job that holds half of the shards of one GPU, and no other GPU.

    Args:
        layout: of the job.
        type_of: GPU types of the nodes, by name.
    """
    if len(layout) != 1 or gpu_types(layout):
        return None
    ((node, content),) = layout.items()
    gres = content.get("gres") or {}
    shards = [g for name, g in gres.items() if name.partition(":")[0] == "shard"]
    known: Any = shards[0].get("parts", ()) if shards and isinstance(shards[0], Mapping) else ()
    if len(shards) != 1 or len(known) != 1 or 2 * known[0][1] != known[0][2]:
        return None
    return Allocation.of(type_of.get(node, ""), {node: 1}, half=True)


def requested_shards(raw: Any) -> int:
    """Return the shards that a job requests on each node; 0 if it also requests GPUs."""
    per_node = {k.removeprefix("gres/"): int(v) for k, v in (raw.gres_per_node or {}).items()}
    if any(name.partition(":")[0] == "gpu" for name in per_node):
        return 0
    return sum(v for name, v in per_node.items() if name.partition(":")[0] == "shard")


def _resources_held(
    layout: Mapping[str, Mapping[str, Any]],
) -> Iterator[tuple[str, str, int, str]]:
    """Yield node, name, number and indexes of the generic resources held."""
    for node, content in layout.items():
        for name, gres in (content.get("gres") or {}).items():
            if isinstance(gres, Mapping):
                yield node, name, int(gres.get("count", 0)), str(gres.get("indexes") or "")
            else:  # pyslurm: resources without indexes, such as shards
                yield node, name, int(gres), ""


def requested_gpus(raw: Any, tres: Any) -> tuple[int, str]:
    """Return the GPUs that a job requests over all nodes, and their type ("" for any).

    Args:
        raw: pyslurm's record.
        tres: its `requested_tres`; pyslurm parses that anew at each access.
    """
    total_gres = {k: int(v.count) for k, v in (tres.gres if tres else {}).items()}
    per_node = {k.removeprefix("gres/"): int(v) for k, v in (raw.gres_per_node or {}).items()}
    gpus = {k: v for k, v in per_node.items() if k == "gpu" or k.startswith("gpu:")}
    # Slurm counts types only where AccountingStorageTRES names them.
    named = [k for k in total_gres if k.startswith("gpu:")] or list(gpus)
    gpu_type = named[0].partition(":")[2] if len(named) == 1 else ""
    if total_gres.get("gpu"):
        return total_gres["gpu"], gpu_type
    total = sum(gpus.values()) * int(raw.num_nodes or 1)
    return total, next((k.partition(":")[2] for k in gpus), "") if len(gpus) == 1 else ""


def shared_request(raw: Any, tres: Any) -> tuple[int, str]:
    """Return the GPUs of which a job requests parts over all nodes, and their type ("" for any)."""
    for name in raw.gres_per_node or {}:
        kind, _, gpu_type = name.removeprefix("gres/").partition(":")
        if kind in PARTS_OF_GPUS:
            return min_nodes(raw, tres), gpu_type
    return 0, ""


def min_nodes(raw: Any, tres: Any) -> int:
    """Return the smallest number of nodes that a job requests.

    Read from its resources: `num_nodes` is wrong after a restart of slurmctld.
    """
    requested = int(tres.node.count or 0) if tres and tres.node else 0
    return requested or int(raw.num_nodes or 1)


def memory(raw: Any, gpus: int) -> int:
    """Return the memory that a pending job requests, in MB over all nodes."""
    if raw.memory_per_node:
        return int(raw.memory_per_node) * int(raw.num_nodes or 1)
    if raw.memory_per_cpu:
        return int(raw.memory_per_cpu) * int(raw.cpus or 1)
    per_gpu = raw.memory_per_gpu
    return int(per_gpu) * gpus if per_gpu else 0


def takes_all_memory(raw: Any) -> bool:
    """Return whether a job asks for no memory, and so gets all of its nodes."""
    return not (raw.memory_per_node or raw.memory_per_cpu or raw.memory_per_gpu)


def display_id(raw: Any) -> str:
    """Return the id that users type: `4711`, `4711_3`."""
    if raw.array_id is None:
        return str(raw.id)
    # a pending array has no task number yet; pyslurm shows task 0 as None as well
    task = raw.array_task_id
    if task is None and raw.array_tasks_waiting:
        return f"{raw.array_id}_[{raw.array_tasks_waiting}]"
    return f"{raw.array_id}_{task or 0}"


def text(raw: Any, name: str) -> str:
    """Return a field that users may have written; "" if it is not UTF-8."""
    try:
        value = str(getattr(raw, name) or "")
        value.encode()
    except UnicodeError:
        return ""
    return value


def whole_nodes(raw: Any) -> bool:
    """Return whether a job gets whole nodes (--exclusive)."""
    return str(raw.resource_sharing or "") == "NO"


def wckey(raw: Any) -> str:
    """Return the wckey that a job's user gave; "" for none and for the default, which has a *."""
    key = text(raw, "wckey")
    return "" if key.startswith("*") else key


def named_nodes(raw: Any, name: str) -> tuple[str, ...]:
    """Return the nodes that a user named; () if the list cannot be parsed."""
    try:
        return expand(text(raw, name))
    except ValueError:
        return ()


def reason(raw: Any) -> str:
    """Return why a job waits, in Slurm's notation."""
    state_reason = text(raw, "state_reason")
    state_reason = _DESCRIPTIONS.get(state_reason, state_reason)
    any_node = state_reason.startswith(_SOME_DOWN) and not text(raw, "required_nodes")
    return "Resources" if state_reason == _BEHIND_OURS or any_node else state_reason


def exit_code(raw: Any) -> int:
    """Return the last attempt's exit code: 128 + n for signal n; 0 if none or requeued."""
    signal = int(raw.exit_code_signal or 0)
    return 128 + signal if signal else int(raw.exit_code or 0)


def number(value: Any) -> int | None:
    """Return a count; None for Slurm's words such as UNLIMITED."""
    return int(value) if isinstance(value, int) else None


def limit_s(minutes: Any) -> int | None:
    """Return the seconds of a time limit in minutes; None for unlimited."""
    value = number(minutes)
    return value * 60 if value is not None else None


def epoch(value: Any) -> float | None:
    """Return a point in time as float; None for none."""
    return float(value) if value else None
