"""GPUs that jobs hand over to each other in one plan: when each change may go on. Pure.

A job may grow by companions into GPUs that companions of others are about to leave. Its new
companions are submitted, placed and released before these leave: first in the queue, and in a
reservation, they start with the event that frees the GPUs, and no other job gets them between. The
others train on meanwhile, and so does the job: if one side is given up, the other loses nothing.

A change that only gives up companions never waits for GPUs, so that no ring can form.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from slurm_elastic.controller.state.transition import Transition, TransitionState
from slurm_elastic.core.cluster import Job

#: Seconds for which companions stay until those that get their GPUs are released.
HANDOVER_S = 45.0
_BEFORE_RELEASE = (TransitionState.RESERVE, TransitionState.ASK, TransitionState.PIN)


def givers(t: Transition, live: Iterable[Transition]) -> list[Transition]:
    """Return the changes that are still to give GPUs to a growing job."""
    return [
        p
        for p in live
        if p.job_id in t.givers
        and p.state.live
        and p.by_companions
        and not (p.given_up or p.joins or t.given_up)
    ]


def takers_unready(t: Transition, live: Iterable[Transition]) -> bool:
    """Return whether a job that gets GPUs of this one has companions that are not released yet."""
    return any(
        t.job_id in p.givers
        and p.by_companions
        and p.joins
        and not p.given_up
        and (p.state in _BEFORE_RELEASE or (p.state is TransitionState.START and not p.tries))
        for p in live
    )


def given(t: Transition, live: Iterable[Transition], jobs: Mapping[int, Job]) -> Counter[str]:
    """Return the GPUs, by node, that others still hold and are about to leave for a growing job."""
    leaving = Counter[str]()
    for giver in givers(t, live):
        job = jobs.get(giver.job_id)
        kept = dict(giver.target.shares) if giver.target else {}
        for node, gpus in job.allocation.shares if job and job.allocation else ():
            leaving[node] += max(0, gpus - kept.get(node, 0))
    return leaving
