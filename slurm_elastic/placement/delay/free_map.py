"""Free GPUs by link domain, node and rack: the places of gangs, and how far apart they reach.

A *domain* is a set of GPUs of one node that reach each other without leaving
their own links (NVLink island, PCIe switch); a *place* says how many GPUs of
which domains. Indices of domains run over nodes, and of nodes over racks, so
that neighbours have neighbouring indices.

>>> room = FreeMap(NodeLayout.regular(racks=2, nodes=2, gpus=4, domains=2))
>>> room.free_total, room.sites.per_node, room.sites.per_rack
(16, 4, 8)
>>> room.sites.span(((0, 2), (1, 2))), room.sites.span(((1, 1), (7, 1)))
((1, 1, 2), (2, 2, 2))
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

#: (domain, GPUs) pairs, sorted by domain, GPUs > 0.
Place = tuple[tuple[int, int], ...]


class GangTier(enum.IntEnum):
    """Highest link that a gang's communication crosses; lower is faster."""

    SINGLE = 0
    NODE = 1
    RACK = 2
    NETWORK = 3


@dataclass(frozen=True)
class NodeLayout:
    """Domains, nodes and racks of the cluster; fixed.

    Attributes:
        size: GPUs of each domain.
        node_of: node of each domain, ascending.
        rack_of: rack of each node, ascending.
    """

    size: tuple[int, ...]
    node_of: tuple[int, ...]
    rack_of: tuple[int, ...]

    @classmethod
    def regular(cls, *, racks: int, nodes: int, gpus: int, domains: int = 1) -> NodeLayout:
        """Return equal racks of equal nodes; `domains` link domains share the GPUs of a node.

        Raises:
            ValueError: the domains do not divide a node's GPUs, or something is below 1.
        """
        if min(racks, nodes, gpus, domains) < 1 or gpus % domains:
            raise ValueError(
                f"{racks}x{nodes}x{gpus} with {domains} link domains per node is invalid:"
                f" expected numbers from 1 on, and domains that divide the {gpus} GPUs of a node"
            )
        total = racks * nodes
        return cls(
            size=(gpus // domains,) * (total * domains),
            node_of=tuple(n for n in range(total) for _ in range(domains)),
            rack_of=tuple(r for r in range(racks) for _ in range(nodes)),
        )

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(self.size)

    @cached_property
    def domains_of(self) -> tuple[tuple[int, ...], ...]:
        """Domains of each node."""
        domains: list[list[int]] = [[] for _ in self.rack_of]
        for domain, node in enumerate(self.node_of):
            domains[node].append(domain)
        return tuple(map(tuple, domains))

    @cached_property
    def nodes_of(self) -> tuple[tuple[int, ...], ...]:
        """Nodes of each rack."""
        nodes: list[list[int]] = [[] for _ in range(max(self.rack_of, default=-1) + 1)]
        for node, rack in enumerate(self.rack_of):
            nodes[rack].append(node)
        return tuple(map(tuple, nodes))

    @cached_property
    def per_node(self) -> int:
        """GPUs of the largest node."""
        return max((sum(self.size[d] for d in ds) for ds in self.domains_of), default=0)

    @cached_property
    def per_rack(self) -> int:
        """GPUs of the largest rack."""
        return max(
            (
                sum(self.size[d] for n in nodes for d in self.domains_of[n])
                for nodes in self.nodes_of
            ),
            default=0,
        )

    def span(self, place: Place) -> tuple[int, int, int]:
        """Return the number of (racks, nodes, domains) that a place covers."""
        nodes = {self.node_of[d] for d, _ in place}
        return len({self.rack_of[n] for n in nodes}), len(nodes), len(place)

    def tier(self, place: Place) -> GangTier:
        """Return the tier of a place."""
        racks, nodes, _ = self.span(place)
        if racks > 1:
            return GangTier.NETWORK
        if nodes > 1:
            return GangTier.RACK
        return GangTier.NODE if sum(g for _, g in place) > 1 else GangTier.SINGLE


class FreeMap:
    """Free GPUs of each domain, node and rack. Mutable.

    Attributes:
        free: by domain; `node` and `rack` are the sums over nodes and racks.
    """

    def __init__(self, sites: NodeLayout, free: Sequence[int] | None = None) -> None:
        self.sites = sites
        self.free = list(sites.size if free is None else free)
        self.node = [sum(self.free[d] for d in ds) for ds in sites.domains_of]
        self.rack = [sum(self.node[n] for n in ns) for ns in sites.nodes_of]
        self.free_total = sum(self.free)

    def copy(self) -> FreeMap:
        """Return an independent map with the same contents."""
        duplicate = object.__new__(FreeMap)
        duplicate.sites, duplicate.free_total = self.sites, self.free_total
        duplicate.free, duplicate.node, duplicate.rack = (
            list(self.free),
            list(self.node),
            list(self.rack),
        )
        return duplicate

    def take(self, place: Place) -> None:
        """Allocate a place.

        Raises:
            ValueError: it is not free.
        """
        self._move(place, -1)

    def give(self, place: Place) -> None:
        """Free a place."""
        self._move(place, 1)

    def holds(self, place: Place) -> bool:
        """Return whether a place is free."""
        return all(self.free[d] >= g for d, g in place)

    def fill(self, domains: Iterable[int], gpus: int) -> Place:
        """Return a place in these domains, each used up before the next; () without room."""
        shares = []
        for domain in domains:
            share = min(self.free[domain], gpus)
            if share > 0:
                shares.append((domain, share))
                gpus -= share
                if not gpus:
                    return tuple(sorted(shares))
        return ()

    def in_node(self, node: int, gpus: int) -> Place:
        """Return a place in one node, in order of its domains."""
        return self.fill(self.sites.domains_of[node], gpus)

    def in_rack(self, rack: int, gpus: int) -> Place:
        """Return a place in one rack, in order of its domains."""
        domains = (d for n in self.sites.nodes_of[rack] for d in self.sites.domains_of[n])
        return self.fill(domains, gpus)

    def anywhere(self, gpus: int) -> Place:
        """Return the first free GPUs, in order of domains."""
        return self.fill(range(len(self.free)), gpus)

    def _move(self, place: Place, sign: int) -> None:
        for domain, gpus in place:
            left = self.free[domain] + sign * gpus
            if not 0 <= left <= self.sites.size[domain]:
                raise ValueError(f"domain {domain} has {self.free[domain]} free, not {gpus}")
            node = self.sites.node_of[domain]
            self.free[domain] = left
            self.node[node] += sign * gpus
            self.rack[self.sites.rack_of[node]] += sign * gpus
            self.free_total += sign * gpus
