"""The switch tree: which rack a node is in, and how near to each other an allocation's nodes are.

The graph is Slurm's own (topology/tree or block): an edge leads from a switch
to each child switch and from the lowest switches to their nodes. A *rack* is
what hangs below one lowest switch. Without any switch all nodes count as one
rack; a node that no switch names is a rack of its own, as Slurm cannot reach
it from the others either.

>>> from slurm_elastic.cluster import Switch
>>> tree = Topology(
...     (Switch("s0", 0, ("a", "b")), Switch("s1", 0, ("c",)),
...      Switch("top", 1, ("a", "b", "c"), ("s0", "s1"))), ("a", "b", "c"))
>>> [tree.tier(nodes).name for nodes in (("a",), ("a", "b"), ("b", "c"))]
['NODE', 'RACK', 'SPINE']
>>> tree.racks_of(("b", "c"))
('s0', 's1')
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from functools import lru_cache

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from slurm_elastic.cluster import Allocation, Snapshot, Switch


class Tier(enum.IntEnum):
    """The highest link that an allocation's communication crosses; lower is faster."""

    NODE = 0
    RACK = 1
    SPINE = 2


class Topology:
    """One switch tree; immutable once built.

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

    @classmethod
    def of(cls, snapshot: Snapshot) -> Topology:
        """The tree of a snapshot; kept between rounds while switches and nodes are the same."""
        return _cached(snapshot.switches, tuple(n.name for n in snapshot.nodes))

    def rack_of(self, node: str) -> str:
        """Name of the rack that a node is in; "" where there are no switches."""
        return self.racks[self._rack_of[node]]

    def racks_of(self, nodes: Iterable[str]) -> tuple[str, ...]:
        """Names of the racks that these nodes are in, in the tree's order."""
        return tuple(self.racks[i] for i in sorted({self._rack_of[n] for n in nodes}))

    def tier(self, where: Allocation | Iterable[str]) -> Tier:
        """The tier of an allocation or of a set of nodes."""
        nodes = where.nodes if isinstance(where, Allocation) else tuple(where)
        if len(nodes) <= 1:
            return Tier.NODE
        return Tier.RACK if len({self._rack_of[n] for n in nodes}) == 1 else Tier.SPINE

    def spread(self, where: Allocation | Iterable[str]) -> tuple[int, int]:
        """(nodes, racks) that an allocation spans."""
        nodes = where.nodes if isinstance(where, Allocation) else tuple(where)
        return len(nodes), len({self._rack_of[n] for n in nodes})


def _vertex(switch: str) -> str:
    """A switch may carry the name of a node."""
    return f"switch:{switch}"


@lru_cache(maxsize=4)
def _cached(switches: tuple[Switch, ...], nodes: tuple[str, ...]) -> Topology:
    return Topology(switches, nodes)
