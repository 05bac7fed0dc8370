"""Reasons of decisions that concern other jobs, sizes and places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.core.cluster import Allocation, Job, Snapshot
from slurm_elastic.core.plan import Claim
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.assignment import Assignment, JobOutcome
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.node_arrays import NodeArrays
from slurm_elastic.placement.site_limits import above_min
from slurm_elastic.placement.victim_selection import Concession
from slurm_elastic.topology import Tier


def gives(concession: Concession, snapshot: Snapshot) -> Reason:
    """Return why a job gives way."""
    job, current = concession.beneficiary, concession.round_job.current
    other = {
        "job": job.display_id,
        "user": job.user,
        "elastic": job.submission is not None,
        "waited_s": max(0.0, snapshot.time - job.submit_time),
    }
    if concession.target is None:
        return Reason("waits-for-job", **other)
    freed = (current.gpus if current else 0) - concession.target.gpus
    if freed > 0:
        return Reason("gives-gpus", gpus=freed, **other)
    return Reason("moves-for-job", nodes=concession.target.nodes, gpus=job.gpus, **other)


def awaits(
    round_job: RoundJob, claim: Claim | None, givers: Sequence[Job], assignment: Assignment
) -> Reason | None:
    """Return the reason for which a pending elastic job waits; None: not known."""
    gpus, gpu_type = round_job.job.gpus or round_job.directive.min_gpus, round_job.job.gpu_type
    if givers:
        return Reason("jobs-give-way", gpus=gpus, gpu_type=gpu_type, **_named(givers))
    if claim is not None:
        kept = [n for n, _ in claim.shares]
        nodes = assignment.frame.snapshot.node
        if boots := [n for n in kept if n in nodes and nodes[n].asleep]:
            return Reason("nodes-boot", nodes=boots)
        return Reason("gpus-kept", gpus=gpus, gpu_type=gpu_type, nodes=kept)
    if round_job.eligibility is Eligibility.OURS:
        directive = round_job.directive
        least = ((t, directive.sizes(t)[:1]) for t in directive.types or assignment.frame.types)
        refusals = (assignment.not_linked(round_job, t, s) for t, sizes in least for s in sizes)
        not_linked = next((refusal for refusal in refusals if refusal), None)
        return not_linked or Reason("no-room-for-min", gpus=gpus, gpu_type=gpu_type)
    return round_job.reason


def notes(
    snapshot: Snapshot, claims: Iterable[Claim], givers: Mapping[int, list[Job]]
) -> tuple[Reason, ...]:
    """Return which jobs give way, a note for each job that gets GPUs."""
    return tuple(
        Reason(
            "job-gets-gpus",
            job=snapshot.job[claim.job_id].display_id,
            user=snapshot.job[claim.job_id].user,
            gpus=snapshot.job[claim.job_id].gpus,
            nodes=[n for n, _ in claim.shares],
            **_named(givers[claim.job_id]),
        )
        for claim in claims
        if claim.job_id in givers
    )


def _named(jobs: Iterable[Job]) -> dict[str, list[str]]:
    jobs = tuple(jobs)
    return {"jobs": [j.display_id for j in jobs], "users": [j.user for j in jobs]}


class Explainer:
    """Reasons why a job has neither more nor fewer GPUs, nor GPUs elsewhere."""

    def __init__(self, frame: NodeArrays, idle: Mapping[str, int], claims: Iterable[Claim]) -> None:
        self._frame = frame
        self._idle = idle
        self._kept: dict[str, Claim] = {}
        for claim in claims:
            for name, _ in claim.shares:
                self._kept.setdefault(frame.snapshot.node[name].gpu_type, claim)

    def why_not_more(
        self,
        round_job: RoundJob,
        holds: Allocation,
        outcome: JobOutcome | None,
        concession: Concession | None,
    ) -> Reason | None:
        """Return why a job does not grow; None when it is left alone for another reason."""
        directive, name = round_job.directive, holds.gpu_type
        sizes = directive.sizes(name)
        if sizes and holds.gpus >= sizes[-1]:
            return Reason("holds-max", gpus=holds.gpus)
        if concession is not None:
            job = concession.beneficiary
            return Reason("job-needs-gpus", gpus=job.gpus, job=job.display_id, user=job.user)
        snapshot = self._frame.snapshot
        capped = self._capped(round_job, holds)
        if capped is None and outcome is not None and outcome.refusals:
            return outcome.refusals[0]
        capped = capped or self._limit_reached(round_job, name)
        if capped or outcome is None:
            return capped
        claim = self._kept.get(name)
        idle = self._idle.get(name, 0)
        if claim is not None and not idle:
            job = snapshot.job[claim.job_id]
            return Reason("freed-gpus-kept", gpus=job.gpus, job=job.display_id, user=job.user)
        if not idle:
            return Reason("no-gpu-idle", gpu_type=name)
        return Reason("idle-gpus-useless", gpus=idle, gpu_type=name)

    def _limit_reached(self, round_job: RoundJob, gpu_type: str) -> Reason | None:
        """Return which limit of Slurm on GPUs is used up, or None."""
        snapshot = self._frame.snapshot
        for limit in snapshot.limits:
            if round_job.job.job_id in limit.jobs and limit.resource in ("gpu", f"gpu:{gpu_type}"):
                held = (snapshot.job[j].allocation for j in limit.jobs if j in snapshot.job)
                if not limit.spared and sum(a.gpus for a in held if a) >= limit.cap:
                    return Reason("limit-reached", limit=limit.name)
        return None

    def _capped(self, round_job: RoundJob, holds: Allocation) -> Reason | None:
        """Return which share of the site's GPUs is used up, or None."""
        job_id, snapshot = round_job.job.job_id, self._frame.snapshot
        sizes = round_job.directive.sizes(holds.gpu_type)
        more = next((s for s in sizes if s > holds.gpus), holds.gpus)
        for limit in snapshot.limits:
            if limit.spared and job_id in limit.jobs:
                used = above_min(limit, snapshot)
                if more - max(limit.spared.get(job_id, 0), holds.gpus) > limit.cap - used:
                    return Reason(
                        "share-used",
                        scope=limit.scope,
                        partition=limit.name if limit.scope == "partition" else None,
                        user=limit.name if limit.scope == "user" else None,
                        most=limit.cap,
                        used=used,
                    )
        return None

    def why_not_fewer(
        self, round_job: RoundJob, holds: Allocation, outcome: JobOutcome | None
    ) -> Reason | None:
        """Return the speed that its last GPUs add, beside other jobs' if they were compared."""
        sizes = round_job.directive.sizes(holds.gpu_type)
        smaller = max((s for s in sizes if s < holds.gpus), default=None) if sizes else None
        if smaller is None:
            least = sizes and holds.gpus == sizes[0]
            return Reason("holds-min", gpus=holds.gpus) if least else None
        model, last = round_job.model, holds.gpus - smaller
        nodes = len(holds.nodes)
        speed = model.speed(holds.gpu_type, holds.gpus, nodes)
        each = (speed - model.speed(holds.gpu_type, smaller, min(nodes, smaller))) / last
        if each <= 0:
            return None
        return Reason(
            "last-gpus-worth",
            gpus=last,
            speed=each if model.measured else None,
            unit=model.unit if model.measured else None,
            part=each / speed,
            compared=outcome is not None,
        )

    def why_here(
        self, round_job: RoundJob, holds: Allocation, outcome: JobOutcome | None = None
    ) -> Reason | None:
        """Return why it stays on its nodes, or the racks of these; None: there is no reason."""
        if outcome is not None and outcome.stays and holds == round_job.current:
            return outcome.stays
        tree = self._frame.topology
        nodes = [n for n in holds.nodes if n in self._frame.index]
        if tree.tier(nodes) <= Tier.NODE or not nodes:
            return None
        racks = tree.racks_of(nodes)
        if len(racks) == 1:
            return Reason("nodes-share-rack", count=len(nodes)) if racks[0] else None
        speed_here = round_job.model.speed(holds.gpu_type, holds.gpus, len(nodes), len(racks))
        speed_one_rack = round_job.model.speed(holds.gpu_type, holds.gpus, len(nodes), 1)
        return Reason("across-racks", racks=len(racks), speed=speed_here / speed_one_rack)
