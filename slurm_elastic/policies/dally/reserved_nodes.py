"""Nodes kept in a round for gangs that waited long: those where their GPUs come free first.

As simulator/gangs/reserve.py, for nodes of different sizes and for even shares. Only idle GPUs are
kept; gangs that run there go on, without a new lease, until all of it is free at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.core.cluster import JobState
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.policies.dally.candidates import RoundCandidates
from slurm_elastic.policies.dally.job_state import GangState

#: (when, GPUs) by node.
Coming = Mapping[str, Sequence[tuple[float, int]]]


class Awaited:
    """Gangs that await nodes."""

    def __init__(
        self, candidates: RoundCandidates, everyone: Iterable[GangState], lease_s: float
    ) -> None:
        self._candidates = candidates
        self._until_s = {b.job_id: b.until_s for b in everyone}
        self._lease_s = lease_s
        self._now = candidates.frame.snapshot.time
        self._gang_of: dict[str, GangState] = {}
        self._coming: dict[str, Coming] = {}

    def on(self, nodes: Iterable[str]) -> GangState | None:
        """Return the gang that awaits one of these nodes, None if none does."""
        return next((self._gang_of[n] for n in nodes if n in self._gang_of), None)

    def keep(self, bidder: GangState, gpu_type: str, gpus: int) -> bool:
        """Keep idle GPUs where a gang's GPUs come free within a lease; False: nowhere do they."""
        sites, names = self._candidates.nodes(gpu_type)
        candidates = self._candidates.of_type(bidder, gpu_type)
        unit = bidder.directive.unit_for(gpu_type)
        coming = self._coming_on(gpu_type)
        idle_gpus, all_gpus = candidates.idle.room.node, candidates.empty.room.node
        for count, each in even_splits(gpus, sites.per_node, unit)[:1]:
            times: dict[int, float] = {}
            for n, name in enumerate(names):
                if name in self._gang_of or all_gpus[n] < each:
                    continue
                at = _free_time(idle_gpus[n], coming.get(name, ()), each, self._now)
                if at is not None and at <= self._now + self._lease_s:
                    times[n] = at
            racks = [sorted((times[n], n) for n in ns if n in times) for ns in sites.nodes_of]
            racks_with_room = [r[:count] for r in racks if len(r) >= count]
            chosen = min(racks_with_room, key=lambda r: r[-1], default=[])
            if not chosen and not any(
                sum(all_gpus[n] >= each for n in ns) >= count for ns in sites.nodes_of
            ):
                chosen = sorted((at, n) for n, at in times.items())[:count]
            if len(chosen) == count:
                self._gang_of.update((names[n], bidder) for _, n in chosen)
                idle_shares = {names[n]: min(each, idle_gpus[n]) for _, n in chosen if idle_gpus[n]}
                self._candidates.keep(gpu_type, idle_shares)
                return True
        return False

    def _coming_on(self, gpu_type: str) -> Coming:
        """Return when GPUs of each node come free: by leases of gangs, else by time limits."""
        cached = self._coming.get(gpu_type)
        if cached is not None:
            return cached
        coming: dict[str, list[tuple[float, int]]] = {}
        for job in self._candidates.frame.snapshot.jobs:
            held = job.allocation
            if held is None or held.gpu_type != gpu_type or job.state is JobState.ENDED:
                continue
            until = self._until_s.get(job.job_id)
            if until is None and job.start_time is not None and job.time_limit_s:
                until = job.start_time + job.time_limit_s
            if until is not None:
                for name, gpus in held.shares:
                    coming.setdefault(name, []).append((max(self._now, until), gpus))
        self._coming[gpu_type] = coming
        return coming


def _free_time(
    free: int, coming: Iterable[tuple[float, int]], gpus: int, now_s: float
) -> float | None:
    """Return when a node has this many GPUs free; None: unknown."""
    if free >= gpus:
        return now_s
    for at_s, count in sorted(coming):
        free += count
        if free >= gpus:
            return at_s
    return None
