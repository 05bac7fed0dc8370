"""Nodes of the cluster by rack, and the row of each GPU in map and picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Command whose output `racks` parses.
SINFO = 'sinfo -h -N -o "%N %f %G"'


@dataclass(frozen=True, slots=True)
class Node:
    """One node."""

    name: str
    gpu_type: str
    gpus: int


@dataclass(frozen=True, slots=True)
class Rack:
    """Nodes under one switch."""

    name: str
    nodes: tuple[Node, ...]


def racks(sinfo: str) -> tuple[Rack, ...]:
    r"""Parse the output of SINFO; racks in the order of their first nodes.

    >>> racks("g01 a100,rack1 gpu:a100:4\ng02 v100,rack1 gpu:v100:4")[0].nodes[1].gpu_type
    'v100'
    """
    nodes_by_rack: dict[str, list[Node]] = {}
    for line in sorted(set(sinfo.splitlines())):
        name, features, gres = line.split()
        rack = next((f for f in features.split(",") if f.startswith("rack")), "")
        _, gpu_type, count = gres.split("(")[0].split(":")
        nodes_by_rack.setdefault(rack, []).append(Node(name, gpu_type, int(count)))
    return tuple(Rack(name, tuple(nodes)) for name, nodes in nodes_by_rack.items())


def rows(racks: Sequence[Rack]) -> dict[tuple[str, int], int]:
    """Return the row number of each (node, GPU), from the top."""
    gpus = [(node.name, i) for rack in racks for node in rack.nodes for i in range(node.gpus)]
    return {gpu: row for row, gpu in enumerate(gpus)}
