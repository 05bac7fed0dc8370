"""Decisions in words, for `selastic explain`, `plan` and the log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.core.cluster import Allocation, Job, Snapshot
from slurm_elastic.core.plan import Claim
from slurm_elastic.placement.assignment import JobOutcome, minutes
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.site_limits import above_min
from slurm_elastic.placement.victim_selection import Concession
from slurm_elastic.topology import Tier


def gpus(count: int, gpu_type: str = "") -> str:
    """`4 a100`, `1 GPU`."""
    return f"{count} {gpu_type or ('GPU' if count == 1 else 'GPUs')}"


def whose(job: Job) -> str:
    """A job as people call it: `bob's 4722`."""
    return f"{job.user}'s {job.display_id}"


def givers_give(givers: Sequence[str]) -> str:
    """`bob's 4711 gives way`, for one or several."""
    return f"{' and '.join(givers)} {'gives' if len(givers) == 1 else 'give'} way"


def gives(way: Concession, snapshot: Snapshot) -> str:
    """Why a job gives way."""
    job, current = way.beneficiary, way.tenant.current
    waited = minutes(max(0.0, snapshot.time - job.submit_time))
    kind = "elastic" if job.submission else "rigid"
    who = f"{whose(job)} ({kind}, waiting {waited})"
    if way.target is None:
        return f"waits so that {who}, of higher priority, can start"
    freed = (current.gpus if current else 0) - way.target.gpus
    if freed > 0:
        return f"gives {gpus(freed)} so that {who} can start"
    return f"moves to {', '.join(way.target.nodes)} so that {who} finds {gpus(job.gpus)} together"


def awaits(tenant: RoundJob, claim: Claim | None, givers: Sequence[str]) -> str:
    """What a pending elastic job waits for."""
    least = tenant.job.gpus or tenant.directive.min_gpus
    wants = gpus(least, tenant.job.gpu_type)
    if givers:
        return f"{wants}: {givers_give(givers)}"
    if claim is not None:
        return f"{wants}, kept for it on {', '.join(n for n, _ in claim.shares)}"
    if tenant.standing is Eligibility.OURS:
        return f"{wants}: not even its MIN has room, and nobody can give way"
    return tenant.why


def notes(
    snapshot: Snapshot, claims: Iterable[Claim], givers: Mapping[int, list[str]]
) -> tuple[str, ...]:
    """Which jobs give way to whom, a line for each job that gets something."""
    return tuple(
        f"{whose(snapshot.job[claim.job_id])} gets {gpus(snapshot.job[claim.job_id].gpus)} on"
        f" {', '.join(n for n, _ in claim.shares)}: {givers_give(givers[claim.job_id])}"
        for claim in claims
        if claim.job_id in givers
    )


class Explainer:
    """Says why a job has neither more nor fewer GPUs nor others."""

    def __init__(self, frame: NodeArrays, idle: Mapping[str, int], claims: Iterable[Claim]) -> None:
        self._frame = frame
        self._idle = idle
        self._kept: dict[str, Claim] = {}
        for claim in claims:
            for name, _ in claim.shares:
                self._kept.setdefault(frame.snapshot.node[name].gpu_type, claim)

    def why_not_more(
        self,
        tenant: RoundJob,
        holds: Allocation,
        outcome: JobOutcome | None,
        way: Concession | None,
    ) -> str:
        """What keeps a job from growing; "" when it is left alone for another reason."""
        directive, name = tenant.directive, holds.gpu_type
        sizes = directive.sizes(name)
        if sizes and holds.gpus >= sizes[-1]:
            return f"{holds.gpus} is its MAX"
        if way is not None:
            return f"{whose(way.beneficiary)} needs {gpus(way.beneficiary.gpus)}"
        snapshot = self._frame.snapshot
        capped = self._capped(tenant, holds)
        if capped or outcome is None or outcome.refusals:
            return capped or (outcome.refusals[0] if outcome else "")
        for limit in snapshot.limits:
            if tenant.job.job_id in limit.jobs and limit.resource in ("gpu", f"gpu:{name}"):
                held = (snapshot.job[j].allocation for j in limit.jobs if j in snapshot.job)
                if not limit.spared and sum(a.gpus for a in held if a) >= limit.cap:
                    return f"{limit.name} is reached"
        claim = self._kept.get(name)
        idle = self._idle.get(name, 0)
        if claim is not None and not idle:
            job = snapshot.job[claim.job_id]
            return f"{whose(job)} needs {gpus(job.gpus)} and freed ones are kept for it"
        if not idle:
            return f"no {name or 'GPU'} is idle, and no other job would lose less than it gains"
        return f"none of the {gpus(idle, name)} that are idle would help it enough"

    def _capped(self, tenant: RoundJob, holds: Allocation) -> str:
        """Which share of the site's GPUs is used up, or ""."""
        job_id, snapshot = tenant.job.job_id, self._frame.snapshot
        sizes = tenant.directive.sizes(holds.gpu_type)
        more = next((s for s in sizes if s > holds.gpus), holds.gpus)
        for limit in snapshot.limits:
            if limit.spared and job_id in limit.jobs:
                used = above_min(limit, snapshot)
                if more - max(limit.spared.get(job_id, 0), holds.gpus) > limit.cap - used:
                    return f"{limit.name}, and {used} are in use"
        return ""

    def why_not_fewer(self, tenant: RoundJob, holds: Allocation, outcome: JobOutcome | None) -> str:
        """What its last GPUs are good for, compared with others if they were compared."""
        sizes = tenant.directive.sizes(holds.gpu_type)
        smaller = max((s for s in sizes if s < holds.gpus), default=None) if sizes else None
        if smaller is None:
            return f"{holds.gpus} is its MIN" if sizes and holds.gpus == sizes[0] else ""
        model, last = tenant.model, holds.gpus - smaller
        nodes = len(holds.nodes)
        now = model.speed(holds.gpu_type, holds.gpus, nodes)
        each = (now - model.speed(holds.gpu_type, smaller, min(nodes, smaller))) / last
        if each <= 0:
            return ""
        gain = f"{each:.3g} {model.unit}" if model.measured else f"{each / now:.0%} of its speed"
        which = f"each of its last {last} GPUs" if last > 1 else "its last GPU"
        compared = ", and no other job would gain more from it" if outcome else ""
        return f"{which} adds {gain}{compared}"

    def why_here(
        self, tenant: RoundJob, holds: Allocation, outcome: JobOutcome | None = None
    ) -> str:
        """What its place is worth."""
        if outcome is not None and outcome.stays and holds == tenant.current:
            return outcome.stays
        tree = self._frame.topology
        known = [n for n in holds.nodes if n in self._frame.index]
        if tree.tier(known) <= Tier.NODE or not known:
            return ""
        racks = tree.racks_of(known)
        if len(racks) == 1:
            return f"its {len(known)} nodes share one rack" if racks[0] else ""
        here = tenant.model.speed(holds.gpu_type, holds.gpus, len(known), len(racks))
        there = tenant.model.speed(holds.gpu_type, holds.gpus, len(known), 1)
        return (
            f"across {len(racks)} racks it runs at {here / there:.2f} of its speed in one,"
            " which had no room or was not worth the move"
        )
