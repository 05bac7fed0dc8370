"""Site limits on elasticity: shares of the GPUs, and resizes per hour. Pure.

*Above MIN* (our definition) are the GPUs that an elastic job holds beyond the MIN of its directive
in force: MIN is never refused. A share is a cap on their sum, so that it holds for
every policy as the limits of Slurm's own accounting do. Resizes so that a pending job can start
are never refused, but count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.config import schema
from slurm_elastic.core.cluster import Job, JobState, Limit, Snapshot
from slurm_elastic.core.plan import Action, Decision, JobRecord, Plan
from slurm_elastic.core.reason import Reason

HOUR_S = 3600.0
_RESIZES = frozenset((Action.GROW, Action.SHRINK, Action.MOVE, Action.PREEMPT))


def shares(snapshot: Snapshot, limits: schema.LimitSettings) -> tuple[Limit, ...]:
    """Return caps on GPUs above MIN: of the site, of each partition named, of each user.

    Args:
        snapshot: nodes for the totals; elastic jobs, also unmanaged ones.
        limits: `[limits]`.
    """
    if limits.share >= 1 and limits.user_share >= 1 and not limits.partition_shares:
        return ()
    spared = {
        job.job_id: directive.min_gpus
        for job in snapshot.jobs
        if job.state is not JobState.ENDED and (directive := job.directive) is not None
    }
    jobs = [j for j in snapshot.jobs if j.job_id in spared]
    total = sum(n.gpus for n in snapshot.nodes)
    caps = []
    if limits.share < 1:
        caps.append(_cap("site", "", limits.share * total, jobs, spared))
    for partition in snapshot.partitions:
        share = limits.partition_shares.get(partition.name)
        if share is not None:
            size = sum(snapshot.node[n].gpus for n in partition.nodes if n in snapshot.node)
            counted = [j for j in jobs if j.partition == partition.name]
            caps.append(_cap("partition", partition.name, share * size, counted, spared))
    if limits.user_share < 1:
        for user in sorted({j.user for j in jobs}):
            counted = [j for j in jobs if j.user == user]
            caps.append(_cap("user", user, limits.user_share * total, counted, spared))
    return tuple(caps)


def above_min(limit: Limit, snapshot: Snapshot) -> int:
    """Return the GPUs of a job that count against such a cap now."""
    held = ((j, snapshot.job[j].allocation) for j in limit.jobs if j in snapshot.job)
    return sum(max(0, a.gpus - limit.spared.get(j, 0)) for j, a in held if a)


def resized(
    snapshot: Snapshot, records: Mapping[int, JobRecord]
) -> Mapping[str, tuple[float, ...]]:
    """Return the times (epoch s) at which the snapshot's jobs were resized, by user."""
    times: dict[str, tuple[float, ...]] = {}
    for job in snapshot.jobs:
        record = records.get(job.job_id)
        if record and record.changes:
            times[job.user] = times.get(job.user, ()) + record.changes
    return times


def refused(
    plan: Plan,
    snapshot: Snapshot,
    *,
    concessions: Iterable[int],
    spent: Mapping[str, Sequence[float]],
    limits: schema.LimitSettings,
    all_others: bool = False,
) -> Mapping[int, Reason]:
    """Return the jobs that must stay unchanged for the plan to keep to the resizes of this hour.

    Args:
        plan: made without regard to them.
        snapshot: it was made for.
        concessions: ids of jobs that are resized so that a pending job can start: never refused.
        spent: by user, when jobs were resized (epoch s).
        limits: `[limits]`.
        all_others: whether no other job may change either, so that the next plan keeps to the
            limits whatever its policy proposes.

    Returns:
        Why, by job id: all other running jobs of the same users as well, or they would change
        in place of the refused ones. Empty: the plan keeps to the limits as it is.
    """
    if limits.resizes_per_user >= schema.UNLIMITED and limits.resizes >= schema.UNLIMITED:
        return {}
    since, giving = snapshot.time - HOUR_S, set(concessions)
    recent = {user: sorted(t for t in times if t > since) for user, times in spent.items()}
    every = sorted(t for times in recent.values() for t in times)
    left_all = limits.resizes - len(every)
    left: dict[str, int] = {}
    resizes = [d for d in plan.changes if d.action in _RESIZES and d.job_id not in giving]
    allowed, over = set[int](), Counter[str]()
    for decision in resizes:
        user = snapshot.job[decision.job_id].user
        left.setdefault(user, limits.resizes_per_user - len(recent.get(user, ())))
        if left[user] > 0 and left_all > 0:
            left[user] -= 1
            left_all -= 1
            allowed.add(decision.job_id)
        else:
            over[user] += 1
    if not over:
        return {}
    all_users = all_others or left_all <= 0
    reasons = {}
    meant = {d.job_id: d for d in resizes}
    for job in snapshot.jobs:
        if job.job_id in allowed or job.allocation is None or job.submission is None:
            continue
        if not all_users and job.user not in over:
            continue
        by_user = left.get(job.user, 1) <= 0
        times, most = (
            (recent.get(job.user, []), limits.resizes_per_user)
            if by_user
            else (every, limits.resizes)
        )
        owner = job.user if by_user else None
        reasons[job.job_id] = _used_up(meant.get(job.job_id), owner, times, most)
    return reasons


def _used_up(
    decision: Decision | None, user: str | None, times: Sequence[float], most: int
) -> Reason:
    """Return why a job may not change; of the site without a user."""
    reason = Reason(
        "resizes-used",
        scope="user" if user is not None else "site",
        user=user,
        used=min(len(times), most),
        most=most,
        until=times[-most] + HOUR_S if 0 < most <= len(times) else None,
    )
    if decision is None:
        return reason
    return Reason(
        "change-refused",
        action=decision.action.value,
        gpus=decision.target.gpus if decision.target else 0,
        gpu_type=decision.target.gpu_type if decision.target else "",
        reason=reason,
    )


def _cap(
    scope: str,
    name: str,
    cap: float,
    jobs: Sequence[Job],
    spared: Mapping[int, int],
) -> Limit:
    ids = frozenset(j.job_id for j in jobs)
    return Limit(
        name=name,
        resource="gpu",
        cap=math.floor(cap + 1e-9),
        jobs=ids,
        spared={i: spared[i] for i in ids},
        scope=scope,
    )
