"""Which jobs share: a matching of most total speed among pairs of which none hurts.

A pair is an edge of a graph where both jobs surely reach their gates and their memory fits; its
weight is what sharing gains: the sum of both speeds, less one. What a job is predicted to lose
below `GOOD` counts more, as predictions of slow jobs are the least certain ones (our definition).
networkx finds the matching of most weight (Edmonds' blossom algorithm). Jobs without
a partner stand alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx

#: Least speed of a job that shares, and of one whose owner was guaranteed its own.
GATE, GUARANTEED = 0.9, 1.0
#: Speed below which a loss counts more, and how many more times.
GOOD, CAUTION = 0.95, 2.0
#: Part of the memory that stays free.
_SPARE = 0.1
#: Weights are whole numbers for networkx, so that equal graphs give equal matchings.
_SCALE = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PossiblePair:
    """Two jobs that could share.

    Attributes:
        speeds: predicted, of the first and the second job.
        surely: speeds that are reached with 90 % certainty.
        gates: least speeds.
        memory: part of the memory that both take together.
        caution: how many more times a loss below `GOOD` counts; 0 where speeds are certain.
        cost: of beginning to share, in the unit of `gain`.
    """

    first: int
    second: int
    speeds: tuple[float, float]
    surely: tuple[float, float]
    gates: tuple[float, float] = (GATE, GATE)
    memory: float = 0.0
    caution: float = CAUTION
    cost: float = 0.0

    @property
    def allowed(self) -> bool:
        """Whether both surely reach their gates, and memory is left over."""
        reached = all(s >= g for s, g in zip(self.surely, self.gates, strict=True))
        return reached and self.memory <= 1 - _SPARE

    @property
    def gain(self) -> float:
        """Value of sharing, in GPUs; a speed far below `GOOD` makes it negative."""
        return sum(s - self.caution * max(0.0, GOOD - s) for s in self.speeds) - 1 - self.cost


def matched(pairs: Iterable[PossiblePair], *, all_share: bool = False) -> list[tuple[int, int]]:
    """Return the pairs of jobs that share, by their ids.

    Args:
        pairs: possible ones.
        all_share: as many jobs as can be share, also where a larger sum is possible with fewer.
    """
    graph: nx.Graph[int] = nx.Graph()
    for pair in sorted(pairs, key=lambda p: (p.first, p.second)):
        gain = round(_SCALE * pair.gain)
        if pair.allowed and (gain > 0 or all_share):
            graph.add_edge(pair.first, pair.second, weight=gain)
    matching = nx.max_weight_matching(graph, maxcardinality=all_share)
    return sorted((min(pair), max(pair)) for pair in matching)
