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
from slurm_elastic.core.cluster import Allocation, Job


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
    used = _held_gpus(jobs)
    for t in live:
        if t.state is not TransitionState.RESERVE:
            used.update(more(t, jobs))
    chosen = set()
    for group in waiting_groups(waiting):
        if _ring_fits(group, used, sizes):
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
            if _ring_fits(ring, used, sizes):
                chosen |= {t.id for t in ring}
    return frozenset(chosen)


def hopeless(
    live: Iterable[Transition], jobs: Mapping[int, Job], sizes: Mapping[str, int]
) -> frozenset[int]:
    """Return the ids of transitions that wait in vain.

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
    used_now = _held_gpus(jobs)
    lost: set[int] = set()
    while True:
        used_after = Counter(used_now)
        for t in left.values():
            job = jobs.get(t.job_id)
            used_after.subtract(_shares(job.allocation if job else None))
            used_after.update(_shares(t.target))
        crowded = {n for n, used in used_after.items() if used > sizes.get(n, 0)}
        out = [
            t.id
            for t in left.values()
            if t.state is TransitionState.RESERVE and not crowded.isdisjoint(_shares(t.target))
        ]
        if not out:
            return frozenset(lost)
        lost.add(max(out))
        del left[max(out)]


def _ring_fits(ring: list[Transition], used: Counter[str], sizes: Mapping[str, int]) -> bool:
    used_after = Counter(used)
    for t in ring:
        used_after.subtract(_shares(t.old))
        used_after.update(_shares(t.target))
    return all(used_after[n] <= sizes.get(n, 0) for t in ring for n in _shares(t.target))


def more(t: Transition, jobs: Mapping[int, Job]) -> dict[str, int]:
    """Return the GPUs of the target that the job does not hold yet, by node."""
    job = jobs.get(t.job_id)
    held = _shares(job.allocation if job else None)
    return {n: g - held.get(n, 0) for n, g in _shares(t.target).items() if g > held.get(n, 0)}


def _held_gpus(jobs: Mapping[int, Job]) -> Counter[str]:
    """Return the GPUs that jobs hold, by node."""
    held = Counter[str]()
    for job in jobs.values():
        held.update(_shares(job.allocation))
    return held


def _shares(allocation: Allocation | None) -> dict[str, int]:
    return dict(allocation.shares) if allocation else {}
