"""Admission of waiting transitions: whose jobs are asked to save now. Pure.

A job is asked only when its target is free, so that it stands still as short
as possible. Jobs that wait for each other's GPUs in a ring go together, and those of an exchange
only together. Growing in place, which asks for no stop, begins while others still leave its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.controller.transitions.exchange_partners import waiting_groups
from slurm_elastic.controller.transitions.handovers import given
from slurm_elastic.core.cluster import Job
from slurm_elastic.core.gpu_parts import has_free_half, held_gpus, vacated_gpus


def admitted(
    live: Iterable[Transition], jobs: Mapping[int, Job], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the ids of transitions that may leave RESERVE.

    Args:
        live: all transitions under way.
        jobs: as Slurm shows them now.
        sizes: GPUs of each node.
    """
    live = tuple(live)
    waiting = [t for t in live if t.state is TransitionState.RESERVE]
    if not waiting:
        return frozenset()
    used = held_gpus(jobs.values())
    for t in live:
        if t.state is not TransitionState.RESERVE:
            used.update(more(t, jobs))
    chosen = set()
    for group in waiting_groups(waiting):
        if _ring_fits(group, used, jobs, sizes):
            chosen |= {t.id for t in group}
            for t in group:
                used.update(more(t, jobs))
    waiting = [t for t in waiting if not t.exchange]
    for t in waiting:
        more_gpus, soon_free = more(t, jobs), given(t, live, jobs)
        if all(used[n] + g - soon_free[n] <= sizes.get(n, 0) for n, g in more_gpus.items()):
            chosen.add(t.id)
            used.update(more_gpus)
    if not chosen:
        for name in {t.reservation for t in waiting if not t.by_companions}:
            ring = [t for t in waiting if t.reservation == name and not t.by_companions]
            if _ring_fits(ring, used, jobs, sizes):
                chosen |= {t.id for t in ring}
    return frozenset(chosen)


def hopeless(
    live: Iterable[Transition], jobs: Mapping[int, Job], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the ids of waiting transitions whose targets will never be free.

    Even after all other transitions there is no room for them: for instance one of a ring has been
    undone, and its job stays on the target of another. The youngest is given up first, since its
    job keeps its GPUs.

    Args:
        live: all transitions under way.
        jobs: as Slurm shows them now.
        sizes: GPUs of each node.
    """
    left = {t.id: t for t in live}
    if all(t.state is not TransitionState.RESERVE for t in left.values()):
        return frozenset()
    used_now = held_gpus(jobs.values())
    lost: set[int] = set()
    while True:
        used_after = Counter(used_now)
        for t in left.values():
            used_after.subtract(vacated_gpus(jobs.get(t.job_id), jobs.values()))
            used_after.update(_taken(t, jobs))
        crowded = {n for n, used in used_after.items() if used > sizes.get(n, 0)}
        out = [
            t.id
            for t in left.values()
            if t.state is TransitionState.RESERVE and not crowded.isdisjoint(_taken(t, jobs))
        ]
        if not out:
            return frozenset(lost)
        lost.add(max(out))
        del left[max(out)]


def _ring_fits(
    ring: list[Transition],
    used: Counter[str],
    jobs: Mapping[int, Job],
    sizes: Mapping[str, int],
) -> bool:
    used_after = Counter(used)
    for t in ring:
        used_after.subtract(vacated_gpus(jobs.get(t.job_id), jobs.values()))
        used_after.update(_taken(t, jobs))
    return all(used_after[n] <= sizes.get(n, 0) for t in ring for n in _taken(t, jobs))


def more(t: Transition, jobs: Mapping[int, Job]) -> dict[str, int]:
    """Return the GPUs of the target that the job does not hold yet, by node."""
    held = vacated_gpus(jobs.get(t.job_id), jobs.values())
    return {n: g - held.get(n, 0) for n, g in _taken(t, jobs).items() if g > held.get(n, 0)}


def _taken(t: Transition, jobs: Mapping[int, Job]) -> dict[str, int]:
    """Return the GPUs of the target by node, without one of which another job holds half."""
    if t.target is None:
        return {}
    if t.target.half and has_free_half(t.target.nodes[0], jobs.values(), t.job_id):
        return {}
    return dict(t.target.shares)
