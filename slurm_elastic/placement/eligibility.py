"""Eligibility of elastic jobs: which ones a round may change, and why not the others."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.config.schema import Config
from slurm_elastic.core import gpu_parts
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot, shape_parameters
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.limit_rivals import limit_rivals, rival_reason
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind
from slurm_elastic.models.link_estimates import LinkEstimates
from slurm_elastic.models.links import CommunicationCost, Links, stalls
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement.best_fit import NodeDemand
from slurm_elastic.placement.free_resources import ResourceNeed
from slurm_elastic.placement.node_arrays import NodeArrays

_HOUR_S = 3600.0
#: A job has to have this time left after a change.
_LEAST_S = 60.0
#: A running job is not spread over more than this many times the fewest nodes that take it.
SPRAWL = 2


class Eligibility(enum.Enum):
    """Permission of a round to change an elastic job."""

    #: Running: the policy decides.
    FREE = "free"
    #: Running, unchanged by the policy, but gives way to a job that cannot start otherwise.
    YIELDS = "yields"
    #: Unchanged.
    FIXED = "fixed"
    #: A transition is under way: its target counts as held.
    MOVING = "moving"
    #: Pending: the controller starts it.
    OURS = "ours"
    #: Pending: Slurm starts it.
    SLURMS = "slurm's"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundJob:
    """One elastic job with all that a round needs of it.

    Attributes:
        current: what it holds, None while pending.
        reason: of an eligibility other than FREE and OURS.
        cost_s: seconds without training that a requeue costs.
        window_s: over how long a change has to pay back: `payback_s`, or less when the job
            ends sooner.
        group_reach: how far its spatial groups may reach, "domain" or "node"; "": anywhere, or it
            has none.
        partner: the other job on its GPU; None: it holds no half of a GPU, or the other half is
            free, and `current` is the whole one.
        separable: it holds half of a GPU, and may be requeued to part from its partner.
    """

    job: Job
    record: JobRecord
    directive: Directive
    model: SpeedModel
    eligibility: Eligibility
    reason: Reason | None
    need: ResourceNeed
    current: Allocation | None
    cost_s: float
    window_s: float
    group_reach: str = ""
    partner: Job | None = None
    separable: bool = False

    def demand(self, frame: NodeArrays, *, away: bool = True) -> NodeDemand:
        """Return its demands on nodes; `away` False: only the nodes that it holds."""
        required, *_ = frame.own_constraints(self.job)
        partition = frame.partition(self.job.partition)
        allowed = frame.allowed(self.job)
        own = frame.shares(self.current.shares) if self.current else {}
        return NodeDemand(
            need=self.need,
            allowed=allowed if away else allowed & False,
            own=own,
            required=tuple(frame.index[n] for n in required if n in frame.index),
            min_nodes=partition.min_nodes if partition else 1,
            max_nodes=partition.max_nodes if partition else None,
            most_on=frame.most_on_nodes(self.job, own),
            most_racks=most_racks(self.job),
            whole_nodes=frame.takes_whole_nodes(self.job),
            closed=frame.closed(self.job, own),
            sprawl=SPRAWL if self.current else None,
            group_reach=self.group_reach,
            held_indexes={
                frame.index[n]: indexes
                for n, indexes in (self.job.indexes if self.group_reach else {}).items()
                if n in frame.index
            },
        )

    def allowed(self, allocation: Allocation) -> bool:
        """Return whether its directive in force allows this shape."""
        return self.directive.allows(allocation.gpus, allocation.gpu_type)

    def change_cost_s(self, target: Allocation | None) -> float:
        """Return the seconds without training of a change to a target, by its kind."""
        kind = self.record.kind_of(self.job, target)
        if kind is ResizeKind.REQUEUE:
            return self.cost_s
        if kind is ResizeKind.RESTART and self.record.ranks_restart_s is None:
            return self.cost_s
        return self.record.cost_s(kind, self.cost_s)

    def speed(self, frame: NodeArrays, allocation: Allocation | None) -> float:
        """Return the predicted speed on an allocation; a new one shares uplinks with other jobs.

        On the present one the measurements contain them, and no job moves only to avoid them: jobs
        that do so together would share an uplink again.
        """
        if allocation is None or not allocation.shares:
            return 0.0
        names = [n for n in allocation.nodes if n in frame.index]
        nodes, racks = (max(1, count) for count in frame.topology.spread(names))
        kind, gpus = allocation.gpu_type, allocation.gpus
        share = 1.0
        if racks > 1 and self.model.toll is not None and allocation != self.current:
            share = 1.0 / (1 + frame.crowd(names, self.job.job_id))
        return self.model.speed(kind, gpus, nodes, racks, share=share)

    def most_gain(self, frame: NodeArrays, allocation: Allocation) -> float:
        """Return the largest relative gain from as many GPUs of this type, nearer together.

        That is the part of its steps spent waiting for other ranks, as measured in a shape like
        this (our definition); infinity where it was not measured.
        """
        nodes, racks = frame.topology.spread(n for n in allocation.nodes if n in frame.index)
        shape = (allocation.gpu_type, allocation.gpus, nodes, racks)
        measurements = [m for m in stalls(self.record) if _shape(m) == shape]
        return max(
            ((m.sync_s or 0.0) / (m.compute_s or 1.0) for m in measurements), default=float("inf")
        )


def elastic_jobs(
    frame: NodeArrays,
    records: Mapping[int, JobRecord],
    config: Config,
    stay: Mapping[int, Reason] | None = None,
) -> dict[int, RoundJob]:
    """Return all elastic jobs that have not ended, managed or not, by id in the snapshot's order.

    Args:
        frame: the cluster.
        records: what is known of them.
        config: the site's.
        stay: jobs that may only give way, and why.
    """
    jobs = {}
    partners = gpu_parts.partners(frame.snapshot.jobs)
    link_estimates = links_seen(frame.snapshot, records, config.topology.speeds)
    rivals = limit_rivals(frame.snapshot)
    for job in frame.snapshot.jobs:
        record = records.get(job.job_id) or JobRecord(job_id=job.job_id)
        directive = job.directive
        if directive is None or job.submission is None or job.state is JobState.ENDED:
            continue
        eligibility, reason = eligibility_of(job, record, config, frame.snapshot.time)
        partition = frame.partition(job.partition)
        if eligibility in (Eligibility.FREE, Eligibility.YIELDS) and partition and not partition.up:
            eligibility = Eligibility.FIXED
            reason = Reason("partition-down", partition=partition.name)
        if eligibility in (Eligibility.FREE, Eligibility.YIELDS) and (
            unmanaged := frame.unmanaged_node(job)
        ):
            # Policies count no GPUs there: some would take all of them from the job.
            eligibility, reason = Eligibility.FIXED, Reason("gpus-not-managed", node=unmanaged)
        if eligibility is Eligibility.OURS and frame.only_slurm_can_start(job):
            eligibility, reason = Eligibility.SLURMS, Reason("slurm-starts")
        by_requeue = eligibility is Eligibility.FREE and not record.by_companions
        if by_requeue and (limit := rival_reason(job, rivals)):
            # It gives way all the same: else users could keep what they hold, by another job.
            eligibility, reason = Eligibility.YIELDS, Reason("limit-awaited", slurm_reason=limit)
        if eligibility is Eligibility.FREE and stay and job.job_id in stay:
            eligibility, reason = Eligibility.YIELDS, stay[job.job_id]
        partner = next(iter(partners.get(job.job_id, ())), None)
        separable = partner is not None and eligibility is Eligibility.FREE
        if partner and eligibility in (Eligibility.FREE, Eligibility.YIELDS):
            eligibility = Eligibility.FIXED
            reason = Reason("shares-gpu", job=partner.display_id, user=partner.user)
        jobs[job.job_id] = RoundJob(
            job=job,
            record=record,
            directive=directive,
            model=SpeedModel.fit(
                config.speedup,
                record.measurements,
                CommunicationCost.of(
                    record, link_estimates.of_owner(job.user), config.speedup.types
                ),
            ),
            eligibility=eligibility,
            reason=reason,
            need=ResourceNeed.of(job),
            current=_counted(job.allocation, partner),
            cost_s=record.change_s(config.resize.restart_s),
            window_s=min(config.resize.payback_s, remaining_s(job, record, frame.snapshot.time)),
            group_reach=_group_reach(directive, config),
            partner=partner,
            separable=separable,
        )
    return jobs


def most_racks(job: Job) -> int | None:
    """Return over how many racks an elastic job may be spread, by its user; None: any number.

    With --switches Slurm lets a job wait that is to start on more of them.
    """
    count = job.submission.shape.get("req_switch") if job.submission else None
    return int(count) if count else None


def _counted(held: Allocation | None, partner: Job | None) -> Allocation | None:
    """Return the allocation; half of a GPU whose other half is free counts as a whole one."""
    return held.whole if held is not None and held.half and partner is None else held


def _group_reach(directive: Directive, config: Config) -> str:
    """Return how far spatial groups of a job may reach; "": anywhere, or it has none."""
    reach = config.topology.spatial_reach
    return reach if directive.parallel == "spatial" and reach != "any" else ""


def links_seen(
    snapshot: Snapshot, records: Mapping[int, JobRecord], speeds: Mapping[str, float]
) -> LinkEstimates:
    """Return the link speeds: configured, else estimated from the jobs' stalls.

    Args:
        snapshot: for the jobs' owners.
        records: of its jobs.
        speeds: `[topology] speeds`.
    """
    owned = ((j.user, records[j.job_id]) for j in snapshot.jobs if j.job_id in records)
    return LinkEstimates.of(owned, Links.configured(speeds))


def _shape(m: Measurement) -> tuple[str, int, int, int]:
    return m.gpu_type, m.gpus, m.nodes, m.racks


def remaining_s(job: Job, record: JobRecord, now: float) -> float:
    """Return the seconds that a job still runs at most, by time limit and by progress.

    The estimate from progress is too long for a job that waited; it only
    serves to refuse changes that cannot pay back.
    """
    left = float("inf")
    if job.start_time is not None and job.time_limit_s is not None:
        left = job.start_time + job.time_limit_s - now
    since = float(job.submission.submitted if job.submission else 0)
    if job.run == 0 and job.start_time is not None:
        since = job.start_time
    if record.progress and since:
        left = min(left, (now - since) * (1 - record.progress) / record.progress)
    return max(0.0, left)


def eligibility_of(
    job: Job, record: JobRecord, config: Config, now: float
) -> tuple[Eligibility, Reason | None]:
    """Return whether a round may change an elastic job, and why not."""
    partitions = config.controller.partitions
    pending = job.state is JobState.PENDING
    if record.in_transition:
        return Eligibility.MOVING, Reason("change-under-way")
    if not job.managed:
        return (
            Eligibility.SLURMS if pending else Eligibility.FIXED,
            job.unmanaged_reason or Reason("not-managed"),
        )
    if partitions and job.partition not in partitions:
        reason = Reason("partition-not-managed", partition=job.partition)
        return Eligibility.SLURMS if pending else Eligibility.FIXED, reason
    if pending:
        if config.controller.queue == "controller" and not record.held:
            return Eligibility.OURS, None
        return Eligibility.SLURMS, Reason("slurm-starts")
    return _running(job, record, config, now)


def _running(
    job: Job, record: JobRecord, config: Config, now: float
) -> tuple[Eligibility, Reason | None]:
    obstacle = _obstacle(job, record, now)
    if obstacle is not None:
        return Eligibility.FIXED, obstacle
    resize = config.resize
    late = time_limit_near(job, record, config, now)
    if late:
        return Eligibility.FIXED, late
    recent = [t for t in record.changes if t > now - _HOUR_S]
    if len(recent) >= resize.per_hour:
        if not recent:
            return Eligibility.FIXED, Reason("resizes-forbidden")
        until = sorted(recent)[len(recent) - resize.per_hour] + _HOUR_S
        return Eligibility.FIXED, Reason("job-resizes-used", most=resize.per_hour, until=until)
    held = job.allocation
    if held and job.override and not job.override.allows(held.gpus, held.gpu_type):
        return Eligibility.FREE, None  # its owner has ruled out what it holds
    last = record.last_change if record.last_change is not None else job.start_time
    if record.on_trial is not None:  # a notice makes it write the checkpoint that is missing
        return Eligibility.YIELDS, Reason("change-on-trial", since=record.on_trial)
    if last is not None and now < last + resize.min_interval_s:
        return Eligibility.YIELDS, Reason("minimum-interval", until=last + resize.min_interval_s)
    return Eligibility.FREE, None


def _obstacle(  # noqa: PLR0911 - one after the other
    job: Job, record: JobRecord, now: float
) -> Reason | None:
    """Return the obstacle to any change of a running job, or None."""
    if job.state is JobState.COMPLETING:
        return Reason("job-ending")
    if job.state is JobState.SUSPENDED:
        return Reason("job-suspended")
    if job.allocation is None:
        return Reason("gpus-unknown")
    if record.failed is not None:  # until it goes back to where it worked
        held = shape_parameters(job.allocation)
        return Reason("change-failed", **held, reason=record.failed)
    if not job.requeueable:
        return Reason("no-requeue")
    if record.held:
        return Reason("held-by-command")
    # Without esrun a job never proves anything: not reporting is its first obstacle.
    if not record.reporting and record.unproven is None:
        return Reason("no-report")
    if not record.proven:
        return record.unproven or Reason("not-proven")
    if record.jump:
        return Reason("training-jumped", difference=record.jump)
    if not record.reporting:
        return Reason("no-report")
    if record.deaf_until and now < record.deaf_until:
        return Reason("save-missed", until=record.deaf_until)
    return None


def time_limit_near(job: Job, record: JobRecord, config: Config, now: float) -> Reason | None:
    """Return why a change comes too late in a job's life, or None: it would lose what is left.

    Slurm counts limits in minutes: what is left after a change has to be one at least, or the job
    would get more than it asked for.
    """
    if job.start_time is None or job.time_limit_s is None:
        return None
    left = job.start_time + job.time_limit_s - now
    needs = 2 * record.change_s(config.resize.restart_s) + _LEAST_S
    if left >= needs:
        return None
    return Reason("time-limit-near", until=now + left)
