"""A job's shape as fields of `scontrol update`, and the check that Slurm applied it.

Every submit form (`--gres`, `--gpus`, `--gpus-per-task`, …) becomes one: GPUs
per node and one Slurm task per node; esrun starts the ranks inside. Pure.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.nodelist import fold

#: Priority above every one that Slurm computes, so that a resized job is scheduled first.
FIRST = "4000000000"

Fields = dict[str, str]


def sized(job: Job, target: Allocation, *, time_limit_s: int | None, shards: int = 0) -> Fields:
    """Return the fields that give a pending job the size of `target`, on nodes set later.

    Args:
        job: pending, with its submission.
        target: GPUs on nodes, one type.
        time_limit_s: time left for the job; None: keep its limit.
        shards: of half of a GPU, for a target that is one.
    """
    counts = {g for _, g in target.shares}
    per_node = max(counts)
    nodes = len(target.shares)
    kind = f"gres/gpu:{target.gpu_type}" if target.gpu_type else "gres/gpu"
    equal_shares = len(counts) == 1
    fields = {
        "NumNodes": f"{nodes}-{nodes}",
        "NumTasks": str(nodes),
        "TresPerNode": f"{kind}:{per_node}" if equal_shares else "",
        "TresPerJob": "" if equal_shares else f"{kind}:{target.gpus}",
        "TresPerTask": "",
        **_without_sockets(job),
    }
    if target.half:
        fields["TresPerNode"] = f"gres/shard:{shards}"
    return fields | _cpus_and_memory(job, per_node) | time_fields(job, time_limit_s)


def pinned(target: Allocation, *, reservation: str) -> Fields:
    """Return the fields that start a job, already of the right size, on its planned nodes now."""
    return {
        "ReqNodeList": ",".join(target.nodes),
        "ReservationName": reservation,
        "StartTime": "now",
        "Priority": FIRST,
    }


def placed_companion(base: Job, place: Allocation, *, reservation: str, now: float) -> Fields:
    """Return the fields that put a held companion on its node; it starts once it is released.

    Its time limit is what its base has left, in whole minutes, rounded up. It has the
    wckey of its base.

    Args:
        base: running.
        place: one node.
        reservation: the one that its GPUs are in; "": none.
        now: epoch seconds.
    """
    ((node, gpus),) = place.shares
    kind = f"gres/gpu:{place.gpu_type}" if place.gpu_type else "gres/gpu"
    left_s = remaining_s(base, now)
    limit = {} if left_s is None else {"TimeLimit": _duration(math.ceil(left_s / 60))}
    wckey = {"WCKey": base.wckey} if base.wckey else {}
    return {
        "NumNodes": "1-1",
        "ReqNodeList": node,
        "TresPerNode": f"{kind}:{gpus}",
        "StartTime": "now",
        "ReservationName": reservation,
        **limit,
        **wckey,
    }


def queued(job: Job, directive: Directive, *, gpus_per_node: Mapping[str, int]) -> Fields:
    """Return the fields that queue a pending job as its user submitted it, at its smallest size.

    Restores the submitted node list and reservation.

    Args:
        job: pending, with its submission.
        directive: directive in force.
        gpus_per_node: GPUs of the partition's smallest node, by type.
    """
    shape = _shape(job)
    gpus = _smallest(directive, shape, gpus_per_node)
    types = [t for t in directive.types or sorted(gpus_per_node) if directive.allows(gpus, t)]
    gpu_type = types[0] if len(types) == 1 else submitted_type(shape)
    node_sizes = [
        gpus_per_node[t] for t in ([gpu_type] if gpu_type else types) if t in gpus_per_node
    ]
    node_size = min(node_sizes, default=gpus)
    if gpus > node_size and not gpu_type and types:  # several nodes might mean several types
        gpu_type, node_size = types[0], gpus_per_node.get(types[0], gpus)
    nodes = next((n for n in range(math.ceil(gpus / node_size), gpus + 1) if gpus % n == 0), gpus)
    kind = f"gres/gpu:{gpu_type}" if gpu_type else "gres/gpu"
    return {
        "NumNodes": f"{nodes}-{nodes}",
        "NumTasks": str(nodes),
        "TresPerNode": f"{kind}:{gpus // nodes}",
        "TresPerJob": "",
        "TresPerTask": "",
        "ReqNodeList": str(shape.get("req_nodes", "")),
        "ReservationName": str(shape.get("reservation", "")),
        **_without_sockets(job),
    } | _cpus_and_memory(job, gpus // nodes)


def _without_sockets(job: Job) -> Fields:
    """Return the field that clears a request for GPUs of each socket, if the job has one."""
    return {"TresPerSocket": ""} if _shape(job).get("tres_per_socket") else {}


def _smallest(
    directive: Directive, shape: Mapping[str, int | str], gpus_per_node: Mapping[str, int]
) -> int:
    """Return the smallest size on any type that the job may have; MIN where there is none."""
    submitted = submitted_type(shape)
    types = directive.types or sorted(gpus_per_node) or [""]
    if submitted and directive.sizes(submitted):
        types = [submitted]
    sizes = [found[0] for t in types if (found := directive.sizes(t))]
    return min(sizes, default=directive.min_gpus)


def remaining_s(job: Job, now: float, *, spare_s: int = 0) -> int | None:
    """Return the seconds left of a running job's time limit, which holds for all attempts together.

    Args:
        job: running.
        now: epoch seconds.
        spare_s: `rounded_off_s` of this attempt's limit when it was set.
    """
    if job.time_limit_s is None or job.start_time is None:
        return job.time_limit_s
    return max(60, int(job.time_limit_s + spare_s - (now - job.start_time)))


def rounded_off_s(seconds: int | None) -> int:
    """Return the seconds that `time_fields` rounds off; a later attempt gets them."""
    return seconds % 60 if seconds is not None and seconds > 60 else 0


def difference(job: Job, target: Allocation) -> str:
    """Return how a pending job's shape differs from `target`, as Slurm reports it; "" if equal."""
    if job.gpus != target.gpus:
        return f"asks for {job.gpus} GPUs instead of {target.gpus}"
    if target.half != bool(job.shards):
        held, wanted = ("half of a", "a whole") if job.shards else ("a whole", "half of a")
        return f"asks for {held} GPU instead of {wanted} one"
    if not target.half and target.gpu_type and job.gpu_type != target.gpu_type:
        return f"asks for type {job.gpu_type or 'any'} instead of {target.gpu_type}"
    if job.min_nodes != len(target.nodes):
        return f"asks for {job.min_nodes} nodes instead of {len(target.nodes)}"
    return ""


def per_gpu(job: Job) -> tuple[float | None, float | None]:
    """Return (CPUs, MB) that the user requests per GPU; None: Slurm scales it itself.

    It does so, too, where the site has a default for each GPU (DefCpuPerGPU): a number of ours
    would replace that.
    """
    shape = _shape(job)
    gpus = max(1, submitted_gpus(job))
    nodes = int(shape.get("min_nodes", 1))
    tasks = int(shape.get("num_tasks") or int(shape.get("ntasks_per_node", 1)) * nodes)
    cpus: float | None = tasks * int(shape.get("cpus_per_task", 1)) / gpus
    memory: float | None = None
    if "min_mem_per_node" in shape and "mem_per_tres" not in shape:
        memory = int(shape["min_mem_per_node"]) * nodes / gpus
    if "cpus_per_tres" in shape or job.cpus_follow_gpus:
        cpus = None
    return cpus, memory


def _cpus_and_memory(job: Job, gpus_on_node: int) -> Fields:
    """Return the fields for CPUs and memory that go with so many GPUs on one node."""
    cpus, memory = per_gpu(job)
    fields: Fields = {}
    if cpus is not None:
        count = str(max(1, math.ceil(cpus * gpus_on_node - 1e-9)))
        fields |= {"CPUsPerTask": count, "MinCPUsNode": count}
    if "ntasks_per_node" in _shape(job) and (cpus is not None or job.cpus_follow_gpus):
        fields["TasksPerNode"] = "1"
    if memory is not None:
        fields["MinMemoryNode"] = str(math.ceil(memory * gpus_on_node - 1e-9))
    return fields


def time_fields(job: Job, seconds: int | None) -> Fields:
    """Return TimeLimit in whole minutes, rounded down; nothing for an unlimited job.

    A shortest time that its user gave (`--time-min`) must not exceed it.
    """
    if seconds is None:
        return {}
    minutes = max(1, seconds // 60)
    least = int(_shape(job).get("time_min", 0))
    fields = {"TimeMin": _duration(min(least, minutes))} if least else {}
    return {"TimeLimit": _duration(minutes), **fields}


def _duration(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}:00"


def _shape(job: Job) -> Mapping[str, int | str]:
    return job.submission.shape if job.submission else {}


def submitted_gpus(job: Job) -> int:
    """Return the GPUs that the job was submitted with, from its shape, else MIN."""
    shape = _shape(job)
    nodes = int(shape.get("min_nodes", 1))
    tasks = int(shape.get("num_tasks") or int(shape.get("ntasks_per_node", 1)) * nodes)
    sockets = nodes * int(shape.get("sockets_per_node", 1))
    fields = (("tres_per_job", 1), ("tres_per_node", nodes), ("tres_per_task", tasks))
    for field, times in (*fields, ("tres_per_socket", sockets)):
        count = _gpus_in(str(shape.get(field, "")))[0]
        if count:
            return count * times
    return job.submission.directive.min_gpus if job.submission else 1


def submitted_type(shape: Mapping[str, int | str]) -> str:
    """Return the GPU type that a job was submitted for; "" for any."""
    for field in ("tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket"):
        name = _gpus_in(str(shape.get(field, "")))[1]
        if name:
            return name
    return ""


def _gpus_in(text: str) -> tuple[int, str]:
    """Return (count, type) of `gres/gpu:a100:4`, `gres/gpu:4`, `gres:gpu`; (0, "") without GPUs."""
    for item in text.split(","):
        parts = item.replace("=", ":").replace("/", ":").split(":")
        if parts[:2] != ["gres", "gpu"]:
            continue
        type_and_count = parts[2:]
        has_count = type_and_count and re.fullmatch("[0-9]{1,9}", type_and_count[-1])
        count = int(type_and_count.pop()) if has_count else 1
        return count, type_and_count[0] if type_and_count else ""
    return 0, ""


def describe(target: Allocation | None) -> str:
    """Return `8 a100 on g[01-02]`, or `the queue`, for logs."""
    if target is None:
        return "the queue"
    if target.half:
        return f"half of 1 {target.gpu_type or 'GPU'} on {fold(target.nodes)}"
    return f"{target.gpus} {target.gpu_type or 'GPUs'} on {fold(target.nodes)}"
