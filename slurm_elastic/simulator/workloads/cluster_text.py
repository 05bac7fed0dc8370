"""Clusters as text: `aws:6x4,dgx-ext:2x8` is six nodes of four `aws` GPUs and two of eight.

>>> [group.gpus for group in parse("aws:6x4,dgx-ext:2x8")]
[24, 16]
>>> parse("aws:6x0")  # doctest: +ELLIPSIS
Traceback (most recent call last):
slurm_elastic...ClusterError: cluster "aws:6x0": aws:6x0 has no GPU; write TYPE:NODESxGPUS...
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from slurm_elastic.core.cluster import Node
from slurm_elastic.core.errors import InvalidInputError

#: Nodes and GPUs of one node are refused beyond these: a typing error, not a cluster.
MAX_NODES = 100_000
MAX_PER_NODE = 64
_GROUP = re.compile(r"([A-Za-z0-9_.-]+):([0-9]{1,9})x([0-9]{1,9})", re.ASCII)
_REMEDY = "write TYPE:NODESxGPUS with both from 1 on, e.g. aws:6x4"


class ClusterError(InvalidInputError):
    """A cluster is invalid; the message names the faulty part and the remedy."""


@dataclass(frozen=True, slots=True)
class Group:
    """Equal nodes.

    Attributes:
        gpu_type: their one type.
        nodes: how many.
        per_node: GPUs on each.
    """

    gpu_type: str
    nodes: int
    per_node: int

    @property
    def gpus(self) -> int:
        """Number of GPUs over all nodes."""
        return self.nodes * self.per_node


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of nodes, one GPU type each; types are distinct, in the order written."""

    groups: tuple[Group, ...]

    def __iter__(self) -> Iterator[Group]:
        return iter(self.groups)

    def __str__(self) -> str:
        return ",".join(f"{g.gpu_type}:{g.nodes}x{g.per_node}" for g in self.groups)

    @property
    def types(self) -> tuple[str, ...]:
        """GPU types in the order written."""
        return tuple(g.gpu_type for g in self.groups)

    @property
    def gpus(self) -> int:
        """Number of GPUs over all types."""
        return sum(g.gpus for g in self.groups)

    def group(self, gpu_type: str) -> Group | None:
        """Return the nodes of a type; None if there are none."""
        return next((g for g in self.groups if g.gpu_type == gpu_type), None)

    def nodes(self, partition: str = "gpu") -> tuple[Node, ...]:
        """Return idle nodes named `TYPE-0001`, in the order written."""
        return tuple(
            Node(
                name=f"{g.gpu_type}-{i:04d}",
                gpu_type=g.gpu_type,
                gpus=g.per_node,
                cpus=g.per_node,
                partitions=frozenset({partition}),
            )
            for g in self.groups
            for i in range(1, g.nodes + 1)
        )


def parse(text: str) -> Cluster:
    """Parse a cluster.

    Raises:
        ClusterError: not `TYPE:NODESxGPUS` with commas between, a type twice, or no GPU at all.
    """
    groups: list[Group] = []
    for part in text.split(","):
        match = _GROUP.fullmatch(part.strip())
        shown = part.strip()[:60] or "an empty part"
        if match is None:
            raise ClusterError(f'cluster "{text[:200]}": {shown} cannot be read; {_REMEDY}')
        name, nodes, per_node = match[1], int(match[2]), int(match[3])
        if not nodes or not per_node:
            raise ClusterError(f'cluster "{text[:200]}": {shown} has no GPU; {_REMEDY}')
        if nodes > MAX_NODES or per_node > MAX_PER_NODE:
            raise ClusterError(
                f'cluster "{text[:200]}": {shown} is beyond {MAX_NODES} nodes of'
                f" {MAX_PER_NODE} GPUs; {_REMEDY}"
            )
        if any(g.gpu_type == name for g in groups):
            raise ClusterError(
                f'cluster "{text[:200]}": type {name} is given twice; write its nodes together,'
                f" all with as many GPUs"
            )
        groups.append(Group(name, nodes, per_node))
    return Cluster(tuple(groups))
