"""Configurations of Sia: (GPU type, nodes, GPUs), few enough to enumerate, sized to fit together.

Sia (SOSP'23, section 3.3): within a node powers of two, beyond it whole nodes.
Allocations of such sizes always fit together. Ours beyond the
paper: types whose nodes differ in size get the whole-node sizes of each; replicas of
several GPUs (`unit`) get powers of two and whole nodes counted in replicas; above
`whole_nodes` nodes sizes grow by a quarter each instead of by one node.

>>> shapes(((4, 3),), 1, 16, 64)
((1, 1), (1, 2), (1, 4), (2, 8), (3, 12))
>>> shapes(((8, 3),), 3, 16, 64)
((1, 3), (1, 6), (2, 12), (3, 18))
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.cluster import Node
from slurm_elastic.models import goodput

Ints = NDArray[np.int64]
#: One type's nodes: (GPUs of a node, nodes with as many), ascending.
Counts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, eq=False)
class SiaConfigurations:
    """All configurations of one round, as columns.

    Attributes:
        types: names of the GPU types, sorted.
        per_node: GPUs of the largest node of each type.
        kind: (columns,) index into `types`.
        nodes, gpus: (columns,).
        unit: (columns,) 1: for every job whose unit divides `gpus`; else for jobs of this unit;
            0: only for those jobs for which it was added.
    """

    types: tuple[str, ...]
    per_node: tuple[int, ...]
    kind: Ints
    nodes: Ints
    gpus: Ints
    unit: Ints

    def __len__(self) -> int:
        return len(self.gpus)

    def names(self) -> list[str]:
        """Return the type of each column."""
        return [self.types[i] for i in self.kind.tolist()]

    def size_and_type(self, column: int) -> tuple[int, str]:
        """Return the GPUs and the type of a column."""
        return self._sizes_and_types[column]

    @cached_property
    def _sizes_and_types(self) -> list[tuple[int, str]]:
        return [
            (g, self.types[k]) for g, k in zip(self.gpus.tolist(), self.kind.tolist(), strict=True)
        ]

    def shapes(self) -> list[tuple[int, int, int]]:
        """Return (kind, nodes, GPUs) of each column."""
        rows = np.stack([self.kind, self.nodes, self.gpus], axis=1).tolist()
        return [(kind, nodes, gpus) for kind, nodes, gpus in rows]

    def configuration_set(self) -> goodput.ConfigurationSet:
        """Return the columns in the form that goodput models take."""
        return goodput.ConfigurationSet(
            tuple(self.names()), tuple(self.nodes.tolist()), tuple(self.gpus.tolist())
        )

    def extended(self, extra: Iterable[tuple[int, int, int]]) -> SiaConfigurations:
        """Return the set with further columns (kind, nodes, GPUs) that single jobs need."""
        rows = np.array(sorted(set(extra)), dtype=np.int64).reshape(-1, 3)
        if not len(rows):
            return self
        return SiaConfigurations(
            types=self.types,
            per_node=self.per_node,
            kind=np.concatenate([self.kind, rows[:, 0]]),
            nodes=np.concatenate([self.nodes, rows[:, 1]]),
            gpus=np.concatenate([self.gpus, rows[:, 2]]),
            unit=np.concatenate([self.unit, np.zeros(len(rows), dtype=np.int64)]),
        )


def node_counts(nodes: Iterable[Node]) -> dict[str, Counts]:
    """Return the number of available nodes of each size, by GPU type."""
    counts_of: dict[str, Counter[int]] = {}
    for node in nodes:
        if node.gpus > 0:
            counts_of.setdefault(node.gpu_type, Counter())[node.gpus] += node.available
    return {t: tuple(sorted(sizes.items())) for t, sizes in sorted(counts_of.items())}


def configurations(
    counts: Mapping[str, Counts],
    units: Iterable[tuple[str, int]],
    *,
    whole_nodes: int = 16,
    most_gpus: int = 65536,
) -> SiaConfigurations:
    """Return the configuration set of a cluster; the same arguments give the same object.

    Args:
        counts: from `node_counts`.
        units: (type, GPUs per replica) that jobs have; 1 is always among them.
        whole_nodes: see the module.
        most_gpus: no job may have more.
    """
    sorted_units = tuple(sorted(set(units)))
    return _configurations(tuple(counts.items()), sorted_units, whole_nodes, most_gpus)


@lru_cache(maxsize=256)
def _configurations(
    counts: tuple[tuple[str, Counts], ...],
    units: tuple[tuple[str, int], ...],
    whole_nodes: int,
    most_gpus: int,
) -> SiaConfigurations:
    columns: list[tuple[int, int, int, int]] = []
    for kind, (name, sizes) in enumerate(counts):
        plain = shapes(sizes, 1, whole_nodes, most_gpus)
        columns += [(kind, n, g, 1) for n, g in plain]
        for unit in (u for t, u in units if t == name and u > 1):
            own = shapes(sizes, unit, whole_nodes, most_gpus)
            columns += [(kind, n, g, unit) for n, g in own if (n, g) not in plain]
    table = np.array(columns, dtype=np.int64).reshape(-1, 4)
    return SiaConfigurations(
        types=tuple(name for name, _ in counts),
        per_node=tuple(sizes[-1][0] for _, sizes in counts),
        kind=table[:, 0],
        nodes=table[:, 1],
        gpus=table[:, 2],
        unit=table[:, 3],
    )


@lru_cache(maxsize=1024)
def shapes(
    sizes: Counts, unit: int, whole_nodes: int, most_gpus: int
) -> tuple[tuple[int, int], ...]:
    """Return (nodes, GPUs) of one type, ascending in GPUs, each on the fewest nodes.

    Args:
        sizes: its nodes.
        unit: GPUs per replica; a replica that fits into a node never straddles two.
        whole_nodes: see the module.
        most_gpus: the largest.
    """
    nodes_of: dict[int, int] = {}
    largest = max((size for size, count in sizes if count), default=0)
    gpus = unit
    while gpus <= largest:
        nodes_of[gpus] = 1
        gpus *= 2
    for size, _ in sizes:
        count = sum(c for s, c in sizes if s >= size)
        share = size // unit * unit or size
        for nodes in _steps(count, whole_nodes):
            gpus = nodes * share
            if gpus % unit == 0 and nodes_of.get(gpus, nodes) >= nodes:
                nodes_of[gpus] = nodes
    return tuple((nodes, gpus) for gpus, nodes in sorted(nodes_of.items()) if gpus <= most_gpus)


def _steps(count: int, whole_nodes: int) -> list[int]:
    """Return 1, 2, … `whole_nodes`, then a quarter more each time, and all of them."""
    steps = list(range(1, min(count, whole_nodes) + 1))
    while steps and steps[-1] < count:
        steps.append(min(count, max(steps[-1] + 1, steps[-1] * 5 // 4)))
    return steps
