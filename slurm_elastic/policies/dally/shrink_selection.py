"""Selection of elastic gangs that shrink, so that none is preempted.

A gang on one node gives down to its smallest size. One that is spread evenly leaves whole nodes,
the last ones first; if it cannot, it gives as many on each of its nodes. So it keeps an even share
on nodes that it has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.placement.best_fit import evenly
from slurm_elastic.policies.dally.job_state import GangState


@dataclass(frozen=True, slots=True)
class ShrinkCandidate:
    """Elastic gang whose present or new allocation is above its MIN.

    Attributes:
        allocation: present one, or the target of this round.
        offered: most GPUs that it gives, by node.
    """

    bidder: GangState
    allocation: Allocation
    offered: Mapping[str, int]

    def without(self, taken: Mapping[str, int], per_node: int) -> Allocation | None:
        """Return the allocation it keeps when at least these GPUs are taken; None: impossible."""
        legal = set(self.bidder.directive.sizes(self.allocation.gpu_type))
        shares = dict(self.allocation.shares)
        unit = self.bidder.directive.unit_for(self.allocation.gpu_type)
        each = next(iter(shares.values()))
        if len(shares) == 1:
            most = each - sum(taken.values())
            options = [{next(iter(shares)): s} for s in range(most, 0, -1) if s in legal]
        elif all(taken[n] == each for n in taken) and set(taken) <= set(_leaving(self)):
            left = [n for n in shares if n not in taken]
            options = [dict.fromkeys(left[:j], each) for j in range(len(left), 0, -1)]
        else:
            most = each - max(taken.values())
            options = [dict.fromkeys(shares, k) for k in range(most, 0, -1)]
        for option in options:
            if sum(option.values()) in legal and evenly(option.values(), per_node, unit):
                return Allocation.of(self.allocation.gpu_type, option)
        return None


class ShrinkCandidates:
    """Gangs that can give GPUs, by type and id, updated during a round."""

    def __init__(self, now_s: float) -> None:
        self._now = now_s
        self._by_type: dict[str, dict[int, ShrinkCandidate]] = {}
        self._type: dict[int, str] = {}

    def put(self, bidder: GangState, allocation: Allocation | None) -> None:
        """Set a gang's present allocation; None: it has nothing to give."""
        old_type = self._type.pop(bidder.job_id, None)
        if old_type is not None:
            del self._by_type[old_type][bidder.job_id]
        if allocation is None or (bidder.held is not None and self._now < bidder.firm_s):
            return
        offered = _offered(bidder, allocation)
        if offered:
            self._type[bidder.job_id] = allocation.gpu_type
            self._by_type.setdefault(allocation.gpu_type, {})[bidder.job_id] = ShrinkCandidate(
                bidder, allocation, offered
            )

    def of(self, gpu_type: str, taker: GangState) -> list[ShrinkCandidate]:
        """Return all of a type but the gang that takes."""
        candidates = self._by_type.get(gpu_type, {})
        return [g for job_id, g in candidates.items() if job_id != taker.job_id]


def potential(candidates: Iterable[ShrinkCandidate]) -> dict[str, int]:
    """Return the GPUs by node that all of them together can give."""
    gpus_by_node: dict[str, int] = {}
    for giver in candidates:
        for name, gpus in giver.offered.items():
            gpus_by_node[name] = gpus_by_node.get(name, 0) + gpus
    return gpus_by_node


def collect(
    candidates: Iterable[ShrinkCandidate], missing: Mapping[str, int], per_node: int
) -> list[tuple[ShrinkCandidate, Allocation]] | None:
    """Select gangs that free these GPUs on these nodes, with what each keeps; None: too few.

    On each node those that give just enough go first, else those that give most; ties by id.
    """
    pool = [g for g in candidates if any(n in missing for n in g.offered)]
    taken: dict[int, dict[str, int]] = {}
    for name in sorted(missing):
        need = missing[name]
        while need > 0:
            givers = [
                (g, more)
                for g in pool
                if (more := g.offered.get(name, 0) - taken.get(g.bidder.job_id, {}).get(name, 0))
                > 0
            ]
            if not givers:
                return None
            giver, more = min(
                givers, key=lambda a: (a[1] < need, abs(a[1] - need), a[0].bidder.job_id)
            )
            share = min(more, need)
            taken_of_giver = taken.setdefault(giver.bidder.job_id, {})
            taken_here = (
                giver.offered[name]
                if name in _leaving(giver)
                else taken_of_giver.get(name, 0) + share
            )
            need -= taken_here - taken_of_giver.get(name, 0)
            taken_of_giver[name] = taken_here
    shrunk = []
    for giver in pool:
        taken_of_giver = taken.get(giver.bidder.job_id, {})
        if taken_of_giver:
            remaining = giver.without(taken_of_giver, per_node)
            if remaining is None:
                return None
            shrunk.append((giver, remaining))
    return shrunk


def _offered(bidder: GangState, allocation: Allocation) -> dict[str, int]:
    sizes = bidder.directive.sizes(allocation.gpu_type)
    smaller = [s for s in sizes if s < allocation.gpus]
    if not smaller:
        return {}
    shares = dict(allocation.shares)
    each = next(iter(shares.values()))
    if len(shares) == 1:
        return {next(iter(shares)): each - smaller[0]}
    if set(shares.values()) != {each}:
        return {}
    names = list(shares)
    nodes_kept = next((j for j in range(1, len(names)) if j * each in sizes), None)
    if nodes_kept is not None:
        return dict.fromkeys(names[nodes_kept:], each)
    least = next((k for k in range(1, each) if k * len(names) in sizes), None)
    return dict.fromkeys(names, each - least) if least is not None else {}


def _leaving(giver: ShrinkCandidate) -> tuple[str, ...]:
    """Return the nodes that it would leave altogether."""
    return tuple(n for n, g in giver.offered.items() if g == giver.allocation.on(n))
