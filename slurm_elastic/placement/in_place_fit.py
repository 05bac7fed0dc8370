"""Places that a running job can reach in place: its base stays, whole companions stay or leave.

Shapes are those of binding proposals (pack.py): whole nodes, and what remains on one node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from slurm_elastic.core.cluster import Allocation, Job, Node, Snapshot
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
    base_shares, shares_held = dict(base.shares), dict(held.shares)
    own = sorted(
        (n for n in room if n in shares_held),
        key=lambda n: (-base_shares.get(n, 0), -shares_held[n]),
    )
    others = [n for n in room if n not in shares_held]
    order = [*own, *others]
    for last in _last_nodes(own, others, remainder, room):
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


class FreeRoom:
    """Free GPUs of a snapshot, for `place_in_place`; nodes that make no difference are left out."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._names: dict[tuple[str, str], dict[int, list[str]]] = {}

    def of(self, job: Job, nodes: int) -> dict[str, int]:
        """Return the GPUs of its type that a running job may hold now, by node.

        Args:
            job: running.
            nodes: most nodes that it may get.
        """
        held = job.allocation
        if held is None:
            return {}
        names = self._by_free_gpus(job.partition, held.gpu_type)
        whole = self._snapshot.per_node.get(held.gpu_type, 0)
        free: dict[str, int] = {}
        for gpus, equal in names.items():
            count = (nodes if gpus == whole else 1) + len(held.shares)
            free.update(dict.fromkeys(equal[:count], gpus))
        own = {
            name: gpus + self._free(self._snapshot.node.get(name), job.partition)
            for name, gpus in held.shares
        }
        return free | own

    def _by_free_gpus(self, partition: str, gpu_type: str) -> dict[int, list[str]]:
        names = self._names.get((partition, gpu_type))
        if names is None:
            names = {}
            for node in self._snapshot.nodes:
                gpus = self._free(node, partition)
                if gpus and node.gpu_type == gpu_type:
                    names.setdefault(gpus, []).append(node.name)
            self._names[partition, gpu_type] = names
        return names

    @staticmethod
    def _free(node: Node | None, partition: str) -> int:
        """Return the GPUs into which jobs of a partition may grow."""
        if node is None or node.planned or partition not in node.partitions:
            return 0
        return node.free_gpus


def _last_nodes(
    own: list[str], others: list[str], remainder: int, room: Mapping[str, int]
) -> Iterator[str | None]:
    """Iterate over nodes for what remains: those held, then the one with the least to spare."""
    if not remainder:
        yield None
        return
    yield from (n for n in own if room[n] >= remainder)
    with_room = [n for n in others if room[n] >= remainder]
    if with_room:
        yield min(with_room, key=lambda n: room[n])
