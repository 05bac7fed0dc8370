"""Places that a running job can reach in place: its base stays, whole companions stay or leave.

Shapes are those of binding proposals (pack.py): whole nodes, and what remains on one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_elastic.core.cluster import Allocation, Job, Snapshot
from slurm_elastic.core.resize_kind import companion_change


def place_in_place(job: Job, gpus: int, most: int, room: Mapping[str, int]) -> Allocation | None:
    """Return a place for so many GPUs that a job reaches in place, or None.

    Args:
        job: running.
        gpus: > 0, on GPUs of the type that it holds.
        most: GPUs of the largest node of the type.
        room: GPUs that the job may hold on each node, those that it holds included; where there is
            a choice, earlier nodes are taken.
    """
    base, held = job.base_allocation, job.allocation
    if base is None or held is None or most <= 0:
        return None
    companions = [c.allocation for c in job.companions]
    full, remainder = divmod(gpus, most)
    # Nodes of the base first, then those of companions, then the others.
    order = sorted(room, key=lambda n: (-base.on(n), -held.on(n)))
    for last in _last_nodes(order, held, remainder, room):
        nodes = [n for n in order if n != last and room[n] >= most][:full]
        if len(nodes) < full:
            continue
        shares = dict.fromkeys(nodes, most)
        if last is not None:
            shares[last] = remainder
        place = Allocation.of(base.gpu_type, shares)
        if companion_change(base, companions, place) is not None:
            return place
    return None


def free_room(job: Job, snapshot: Snapshot) -> dict[str, int]:
    """Return the GPUs of its type that a running job may hold on each node now."""
    held = job.allocation
    if held is None:
        return {}
    room = {}
    for node in snapshot.nodes:
        if node.gpu_type == held.gpu_type:
            open_to_it = not node.planned and job.partition in node.partitions
            room[node.name] = held.on(node.name) + (node.free_gpus if open_to_it else 0)
    return room


def _last_nodes(
    order: list[str], held: Allocation, remainder: int, room: Mapping[str, int]
) -> Iterator[str | None]:
    """Iterate over nodes for what remains: those held, then the one with the least to spare."""
    if not remainder:
        yield None
        return
    yield from (n for n in order if held.on(n) and room[n] >= remainder)
    others = [n for n in order if not held.on(n) and room[n] >= remainder]
    if others:
        yield min(others, key=lambda n: room[n])
