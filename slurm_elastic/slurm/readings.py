"""What one record of pyslurm says, in our own values. Pure; no pyslurm needed.

Strings that users can write are hostile: one that is not UTF-8 reads as empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slurm_elastic.cluster import Allocation, Node, Partition
from slurm_elastic.nodelist import expand

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
#: What Slurm says of a job that only waits for room while a reservation of ours, for a few
#: seconds, lies on the nodes it could get.
_BEHIND_OURS = "ReqNodeNotAvail, May be reserved for other job"
#: What it says when some nodes are down. Without a node list of its own the job waits for room on
#: the others; and Slurm goes on saying so long after the nodes have come back.
_SOME_DOWN = "ReqNodeNotAvail, UnavailableNodes:"


def unmanageable(raw: Any) -> str:
    """Why an elastic job must be left alone, or ""."""
    if not raw.is_batch_job:
        return "interactive: only batch jobs can be requeued"
    if raw.heterogeneous_id:
        return "a component of a heterogeneous job"
    if not raw.is_requeueable:
        return "submitted with --no-requeue"
    if raw.state == "RUNNING" and text(raw, "state_reason").startswith("JobHeld"):
        return "held by its owner or an administrator: a requeue would leave it in the queue"
    if raw.state == "PENDING" and raw.array_id is not None and raw.array_tasks_waiting:
        return "tasks of an array that never ran: Slurm starts them"
    return ""


def node(
    raw: Any,
    used_by_jobs: int,
    *,
    reserved: bool,
    domains: tuple[tuple[int, ...], ...] = (),
) -> Node:
    """One node.

    Args:
        raw: pyslurm's.
        used_by_jobs: GPUs that jobs hold on it; slurmctld itself counts them only with
            AccountingStorageTRES=gres/gpu.
        reserved: in a reservation that is not ours.
        domains: its link domains (`slurm.gres`).
    """
    gres = {k: int(v) for k, v in (raw.configured_gres or {}).items()}
    gpus = {k: v for k, v in gres.items() if k == "gpu" or k.startswith("gpu:")}
    one_type = len(gpus) == 1
    (name, count) = next(iter(gpus.items())) if one_type else ("", 0)
    allocated = {k: int(v) for k, v in (raw.allocated_gres or {}).items()}
    used = max(allocated.get("gpu", 0), used_by_jobs)
    state = str(raw.state or "UNKNOWN")
    return Node(
        name=str(raw.name),
        gpu_type=name.partition(":")[2],
        gpus=count,
        cpus=int(raw.effective_cpus or raw.total_cpus or 0),
        memory_mb=int(raw.real_memory or 0),
        used_gpus=used,
        used_cpus=int(raw.allocated_cpus or 0),
        used_memory_mb=int(raw.allocated_memory or 0),
        partitions=frozenset(raw.partitions or ()),
        features=frozenset(raw.active_features or raw.available_features or ()),
        available=not reserved and usable(state),
        planned="PLANNED" in state,
        state=state,
        domains=domains if sum(map(len, domains)) == count else (),
    )


def usable(state: str) -> bool:
    """Whether Slurm starts jobs on a node in this state."""
    return not any(word in state for word in _UNUSABLE)


def partition(raw: Any) -> Partition:
    """One partition."""
    return Partition(
        name=str(raw.name),
        nodes=expand(raw.nodes or ""),
        up=str(raw.state) == "UP",
        max_time_s=limit_s(raw.max_time),
        max_nodes=number(raw.max_nodes),
    )


def allocation(layout: Mapping[str, Mapping[str, Any]]) -> Allocation | None:
    """None without GPUs, or with more than one type."""
    types: set[str] = set()
    shares: dict[str, int] = {}
    for node, content in layout.items():
        for name, what in (content.get("gres") or {}).items():
            kind, _, rest = name.partition(":")
            if kind == "gpu" and int(what["count"]):
                types.add(rest.partition(":")[0])
                shares[node] = shares.get(node, 0) + int(what["count"])
    return Allocation.of(types.pop(), shares) if len(types) == 1 else None


def devices(layout: Mapping[str, Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Indexes of the GPUs held on each node, in Slurm's words."""
    found = []
    for node, content in layout.items():
        for name, what in (content.get("gres") or {}).items():
            text = str(what.get("indexes") or "")
            if name.partition(":")[0] == "gpu" and text[:1].isdigit():
                found.append((node, text))
    return tuple(found)


def asked(raw: Any) -> tuple[int, str]:
    """GPUs and their type that a job asks for, over all nodes."""
    tres = raw.requested_tres
    found = {k: int(v.count) for k, v in (tres.gres if tres else {}).items()}
    typed = [(k.partition(":")[2], v) for k, v in found.items() if k.startswith("gpu:")]
    if found.get("gpu"):
        return found["gpu"], typed[0][0] if len(typed) == 1 else ""
    per_node = {k.removeprefix("gres/"): int(v) for k, v in (raw.gres_per_node or {}).items()}
    gpus = {k: v for k, v in per_node.items() if k == "gpu" or k.startswith("gpu:")}
    total = sum(gpus.values()) * int(raw.num_nodes or 1)
    return total, next((k.partition(":")[2] for k in gpus), "") if len(gpus) == 1 else ""


def min_nodes(raw: Any) -> int:
    """Nodes that a job asks for at least.

    From its resources: the number shown beside them goes stale when slurmctld is restarted.
    """
    tres = raw.requested_tres
    asked_for = int(tres.node.count or 0) if tres and tres.node else 0
    return asked_for or int(raw.num_nodes or 1)


def memory(raw: Any) -> int:
    """MB over all nodes that a pending job asks for."""
    if raw.memory_per_node:
        return int(raw.memory_per_node) * int(raw.num_nodes or 1)
    if raw.memory_per_cpu:
        return int(raw.memory_per_cpu) * int(raw.cpus or 1)
    per_gpu = raw.memory_per_gpu
    return int(per_gpu) * asked(raw)[0] if per_gpu else 0


def display_id(raw: Any) -> str:
    """What people type: `4711`, `4711_3`."""
    if raw.array_id is None:
        return str(raw.id)
    # a pending array has no task number yet; pyslurm shows task 0 as None as well
    task = raw.array_task_id
    if task is None and raw.array_tasks_waiting:
        return f"{raw.array_id}_[{raw.array_tasks_waiting}]"
    return f"{raw.array_id}_{task or 0}"


def text(raw: Any, name: str) -> str:
    """A field that users may have written; "" when it is not UTF-8."""
    try:
        return str(getattr(raw, name) or "")
    except UnicodeDecodeError:
        return ""


def reason(raw: Any) -> str:
    """Why a job waits, in Slurm's word."""
    said = text(raw, "state_reason")
    for_room = said.startswith(_SOME_DOWN) and not raw.required_nodes
    return "Resources" if said == _BEHIND_OURS or for_room else said


def number(value: Any) -> int | None:
    """A count, None for Slurm's words such as UNLIMITED."""
    return int(value) if isinstance(value, int) else None


def limit_s(minutes: Any) -> int | None:
    """Seconds of a time limit in minutes; None for unlimited."""
    known = number(minutes)
    return known * 60 if known is not None else None


def epoch(value: Any) -> float | None:
    """A point in time, None for none."""
    return float(value) if value else None
