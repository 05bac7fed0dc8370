"""The switch tree: the rack of each node, and the distance between nodes of an allocation.

The graph is Slurm's own (topology/tree or block): an edge leads from a switch to each child switch
and from the lowest switches to their nodes. A *rack* is the nodes of one lowest switch. Without
switches all nodes are one rack; a node that no switch names is a rack of its own, as Slurm does
not connect it with the others either.

>>> from slurm_elastic.core.cluster import Switch
>>> tree = Topology(
...     (Switch("s0", 0, ("a", "b")), Switch("s1", 0, ("c",)),
...      Switch("top", 1, ("a", "b", "c"), ("s0", "s1"))), ("a", "b", "c"))
>>> [tree.tier(nodes).name for nodes in (("a",), ("a", "b"), ("b", "c"))]
['NODE', 'RACK', 'SPINE']
>>> tree.racks_of(("b", "c"))
('s0', 's1')
>>> tree.distance("a", "b"), tree.distance("b", "c")
(2, 4)
>>> tree.links(("b", "c"))
('b', 'c', 'switch:s0', 'switch:s1')
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.cluster import Allocation, Snapshot, Switch
from slurm_elastic.core.errors import InvalidInputError


class TopologyError(InvalidInputError):
    """An invalid switch tree; the message names the switch or node and the remedy."""


class Tier(enum.IntEnum):
    """Highest link that an allocation's communication crosses; lower is faster."""

    DOMAIN = 0
    NODE = 1
    RACK = 2
    SPINE = 3


class Topology:
    """A switch tree; immutable.

    Attributes:
        graph: the directed networkx graph; nodes and switches carry `kind`.
        racks: names of the racks, in order of the first node of each.
        rack: index into `racks` of each node, in the order of `nodes`.
    """

    def __init__(self, switches: Sequence[Switch], nodes: Sequence[str]) -> None:
        self.graph: nx.DiGraph[str] = nx.DiGraph()
        above: dict[str, str] = {}
        for switch in sorted(switches, key=lambda s: (s.level, s.name)):
            self.graph.add_node(_vertex(switch.name), kind="switch", level=switch.level)
            self.graph.add_edges_from((_vertex(switch.name), _vertex(c)) for c in switch.children)
            if not switch.children:
                for name in switch.nodes:
                    above.setdefault(name, switch.name)
        self.graph.add_nodes_from(nodes, kind="node")
        self.graph.add_edges_from((_vertex(above[n]), n) for n in nodes if n in above)
        index: dict[str, int] = {}
        rack = []
        for name in nodes:
            key = above.get(name, f"({name})" if switches else "")
            rack.append(index.setdefault(key, len(index)))
        self.racks: tuple[str, ...] = tuple(index)
        self.rack: NDArray[np.int64] = np.array(rack, dtype=np.int64)
        self._rack_of = dict(zip(nodes, rack, strict=True))
        self._index = {name: i for i, name in enumerate(nodes)}
        self._speed = {_vertex(s.name): s.link_speed for s in switches}
        self._nodes = tuple(nodes)

    @classmethod
    def of(cls, snapshot: Snapshot) -> Topology:
        """Return the tree of a snapshot; cached while switches and nodes are the same."""
        return _cached(snapshot.switches, tuple(n.name for n in snapshot.nodes))

    def has(self, node: str) -> bool:
        """Return whether this is a node of the cluster."""
        return node in self._rack_of

    def rack_of(self, node: str) -> str:
        """Return the name of a node's rack; "" without switches."""
        return self.racks[self._rack_of[node]]

    def racks_of(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Return the names of the racks of these nodes, in the tree's order."""
        return tuple(self.racks[i] for i in sorted({self._rack_of[n] for n in nodes}))

    def tier(self, where: Allocation | Iterable[str], *, linked: bool = False) -> Tier:
        """Return the tier of an allocation or of a set of nodes.

        Args:
            where: allocation or node names.
            linked: whether its GPUs are known to be in one link domain (`Fabric.in_one_domain`).
        """
        nodes = where.nodes if isinstance(where, Allocation) else tuple(where)
        if len(nodes) <= 1:
            return Tier.DOMAIN if linked else Tier.NODE
        return Tier.RACK if len({self._rack_of[n] for n in nodes}) == 1 else Tier.SPINE

    def spread(self, where: Allocation | Iterable[str]) -> tuple[int, int]:
        """Return the numbers of nodes and racks that an allocation spans."""
        nodes = where.nodes if isinstance(where, Allocation) else tuple(where)
        return len(nodes), len({self._rack_of[n] for n in nodes})

    def distance(self, first: str, second: str) -> int:
        """Return the links between two nodes: 0 for the same node, 2 within a rack, else 4 or more.

        For nodes that no switch connects it is the sum of their depths.
        """
        if first == second:
            return 0
        below = self._below
        i, j = self._index[first], self._index[second]
        common = below.counts[below.member[:, i] & below.member[:, j]]
        if not len(common):
            return 2 if not len(below.names) else int(below.above[[i, j]].sum()) + 2
        shared = len(common)
        return int(below.above[i] + below.above[j]) - 2 * shared + 2

    def links(self, where: Allocation | Iterable[str]) -> tuple[str, ...]:
        """Return the uplinks that an allocation's communication crosses, named by their lower end.

        These are the link of each node, and that of each switch with some, but not all, of the
        nodes below it. Switches are named `switch:NAME`.
        """
        nodes = where.nodes if isinstance(where, Allocation) else tuple(dict.fromkeys(where))
        if len(nodes) <= 1:
            return ()
        below = self._below
        own_counts = below.member[:, [self._index[n] for n in nodes]].sum(axis=1)
        crossed = np.flatnonzero((own_counts > 0) & (own_counts < len(nodes)))
        return (*sorted(nodes), *(below.names[i] for i in crossed))

    def users(self, wheres: Mapping[int, Allocation | Iterable[str]]) -> dict[str, tuple[int, ...]]:
        """Return the jobs that communicate over each uplink in use; links and jobs sorted."""
        users: dict[str, list[int]] = {}
        for job_id, where in sorted(wheres.items()):
            for link in self.links(where):
                users.setdefault(link, []).append(job_id)
        return {link: tuple(jobs) for link, jobs in sorted(users.items())}

    def link_speed(self, link: str) -> int:
        """Return Slurm's LinkSpeed of a switch's uplink; 1 for a node's own link."""
        return self._speed.get(link, 1)

    @cached_property
    def _below(self) -> _Below:
        names = [v for v, data in self.graph.nodes(data=True) if data.get("kind") == "switch"]
        member = np.zeros((len(names), len(self._nodes)), dtype=bool)
        for row, name in enumerate(names):
            descendants = nx.descendants(self.graph, name)
            member[row, [i for v in descendants if (i := self._index.get(v)) is not None]] = True
        return _Below(tuple(names), member, member.sum(axis=1), member.sum(axis=0))


@dataclass(frozen=True)
class _Below:
    """Nodes below each switch.

    Attributes:
        names: [S] vertices of the switches.
        member: [S, N] whether node n is below switch s.
        counts: [S] nodes below each switch.
        above: [N] switches above each node.
    """

    names: tuple[str, ...]
    member: NDArray[np.bool_]
    counts: NDArray[np.int64]
    above: NDArray[np.int64]


def problems(switches: Sequence[Switch]) -> tuple[str, ...]:
    """Return the errors of a switch tree, one line each; () if it is valid.

    Errors are loops, switches below two others, switches that do not exist, and nodes below two
    lowest switches.
    """
    names = {s.name for s in switches}
    errors: list[str] = []
    parents: dict[str, list[str]] = {}
    racks: dict[str, list[str]] = {}
    for switch in switches:
        for child in switch.children:
            parents.setdefault(child, []).append(switch.name)
        if not switch.children:
            for node in switch.nodes:
                racks.setdefault(node, []).append(switch.name)
    graph: nx.DiGraph[str] = nx.DiGraph((s.name, c) for s in switches for c in s.children)
    if not nx.is_directed_acyclic_graph(graph):
        loop = [vertex for vertex, _ in nx.find_cycle(graph)]
        errors.append(
            f"switches {' > '.join([*loop, loop[0]])} form a loop; remove one from Switches="
        )
    for child, above in sorted(parents.items()):
        if child not in names:
            errors.append(
                f"switch {above[0]} names {child}, which does not exist; add or remove it"
            )
        elif len(above) > 1:
            errors.append(
                f"switch {child} is below {' and '.join(sorted(above))}; name it in one of them"
            )
    errors += [
        f"node {node} is in two racks, {' and '.join(sorted(above))}; name it in one of them"
        for node, above in sorted(racks.items())
        if len(above) > 1
    ]
    return tuple(errors)


def check(switches: Sequence[Switch]) -> None:
    """Reject a tree with `problems`.

    Raises:
        TopologyError: the first of them.
    """
    for problem in problems(switches):
        raise TopologyError(problem)


def _vertex(switch: str) -> str:
    """Return the vertex of a switch, which may have the same name as a node."""
    return f"switch:{switch}"


@lru_cache(maxsize=4)
def _cached(switches: tuple[Switch, ...], nodes: tuple[str, ...]) -> Topology:
    return Topology(switches, nodes)
