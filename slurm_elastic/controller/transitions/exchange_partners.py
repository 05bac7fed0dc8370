"""Transitions of jobs that exchange GPUs: when each of them may go on. Pure.

Each job moves into GPUs that another one holds. So all save before the first is requeued, and each
keeps its old shape until the others have left their GPUs: if they do not, or if the controller
dies, it starts again as it was (placement/exchanges.py chooses the jobs).
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_elastic.controller.state.transition import Transition, TransitionState

#: Seconds that jobs of an exchange wait for the others: to save, and to leave their GPUs. Less than
#: the two minutes after which Slurm starts a requeued job, and a program that has saved goes on.
EXCHANGE_S = 90.0
_BEFORE_REQUEUE = (TransitionState.RESERVE, TransitionState.NOTIFY)
_IN_OLD_SHAPE = (*_BEFORE_REQUEUE, TransitionState.REQUEUE, TransitionState.DRAIN)


def partners(t: Transition, live: Iterable[Transition]) -> list[Transition]:
    """Return the other transitions of the same exchange that are under way."""
    return [p for p in live if p.job_id in t.exchange and t.job_id in p.exchange and p.state.live]


def refused(t: Transition, live: Iterable[Transition]) -> bool:
    """Return whether a job of the same exchange goes back to what it had."""
    return any(p.given_up for p in partners(t, live))


def broken(t: Transition, live: Iterable[Transition]) -> bool:
    """Return whether a job of the same exchange goes back, or is not under way any more."""
    live = tuple(live)
    return refused(t, live) or len(partners(t, live)) < len(t.exchange)


def all_saved(t: Transition, live: Iterable[Transition]) -> bool:
    """Return whether the other jobs of an exchange have saved, or have left their GPUs already."""
    return all(p.state not in _BEFORE_REQUEUE or "saved" in p.entered for p in partners(t, live))


def goes_back_with(t: Transition, other: Transition) -> bool:
    """Return whether another transition is given up as soon as `t` is: it has its old shape."""
    return other.job_id in t.exchange and other.state in _IN_OLD_SHAPE


def waiting_groups(waiting: Iterable[Transition]) -> list[list[Transition]]:
    """Return the transitions of each exchange of which all wait."""
    by_job = {t.job_id: t for t in waiting if t.exchange}
    groups = []
    for t in by_job.values():
        job_ids = (t.job_id, *t.exchange)
        if t.job_id == min(job_ids) and by_job.keys() >= set(job_ids):
            groups.append([by_job[i] for i in job_ids])
    return groups
