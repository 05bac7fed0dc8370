"""Nodes kept for gangs that have waited too long, so that their wait ends.

A gang that has waited long enough gets the nodes on which its GPUs become free first: one node if
it fits into one, else as many as it needs in one rack, else anywhere. What is free on them, up to
its share, is given to no other gang; as every lease ends, it has its GPUs within one lease and one
batch.
Several gangs are served in the order of their waits, on different nodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from slurm_elastic.placement.delay.free_map import FreeMap, Place

#: (node, GPUs on it).
Wanted = tuple[tuple[int, int], ...]


class NodeReserve:
    """Times at which GPUs become free on each node, and the nodes kept already."""

    def __init__(self, room: FreeMap, ends: Iterable[tuple[float, Place]], now_s: float) -> None:
        """Prepare.

        Args:
            room: what is free; `keep` takes from it.
            ends: (end of the lease, place) of each gang that runs.
            now_s: the time.
        """
        self.room = room
        self._free_at: list[list[tuple[float, int]]] = [[(now_s, free)] for free in room.node]
        for until_s, place in ends:
            for domain, gpus in place:
                self._free_at[room.sites.node_of[domain]].append((until_s, gpus))
        for entries in self._free_at:
            entries.sort()
        self._kept: set[int] = set()

    def keep(self, gpus: int) -> Place:
        """Return a gang's place if its GPUs are free now; else keep nodes for it and return ().

        Kept GPUs are taken from the room, a returned place is not.
        """
        wanted = self._soonest(gpus)
        self._kept.update(node for node, _ in wanted)
        if wanted and all(self.room.node[node] >= share for node, share in wanted):
            shares = (self.room.in_node(node, share) for node, share in wanted)
            return tuple(sorted(pair for share in shares for pair in share))
        for node, share in wanted:
            free = min(share, self.room.node[node])
            if free:
                self.room.take(self.room.in_node(node, free))
        return ()

    def _soonest(self, gpus: int) -> Wanted:
        """Return the nodes on which that many GPUs are free first; () when no nodes are left."""
        sites = self.room.sites
        count = -(-gpus // sites.per_node)
        per_node, remainder = divmod(gpus, count)
        need = per_node + bool(remainder)
        open_nodes = [n for n in range(len(sites.rack_of)) if n not in self._kept]
        times = {
            n: free_at_s for n in open_nodes if (free_at_s := self._free_from(n, need)) < math.inf
        }
        racks = (sorted((times[n], n) for n in nodes if n in times) for nodes in sites.nodes_of)
        chosen = min((r[:count] for r in racks if len(r) >= count), key=lambda r: r[-1], default=[])
        if not chosen:
            chosen = sorted((free_at_s, n) for n, free_at_s in times.items())[:count]
        if len(chosen) == count:
            return tuple((n, per_node + (i < remainder)) for i, (_, n) in enumerate(chosen))
        return self._largest_nodes(gpus, open_nodes)

    def _largest_nodes(self, gpus: int, nodes: Sequence[int]) -> Wanted:
        """Return whole nodes of different sizes, the largest first."""
        size = {n: sum(count for _, count in self._free_at[n]) for n in nodes}
        shares = []
        for node in sorted(nodes, key=lambda n: (-size[n], n)):
            share = min(size[node], gpus)
            if share:
                shares.append((node, share))
                gpus -= share
            if not gpus:
                return tuple(shares)
        return ()

    def _free_from(self, node: int, gpus: int) -> float:
        free = 0
        for at_s, count in self._free_at[node]:
            free += count
            if free >= gpus:
                return at_s
        return math.inf
