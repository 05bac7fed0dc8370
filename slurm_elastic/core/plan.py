"""Values between policy, placement and controller: proposals, decisions, plans.

A policy returns a `Proposal` for each elastic job: alternatives, best first. Placement turns them
into a `Plan`: for each job one `Decision` with the GPUs it gets, the reason, gain and cost.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slurm_elastic.core.application import Learned
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.execution.plan_gains import OversizedPlan, PlanSpeed
from slurm_elastic.core.prediction.duration_estimate import DurationEstimate
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import (
    ResizeKind,
    change_by_restart,
    change_in_place,
    smaller_sizes,
)

#: Seconds that training is assumed to stand still in a change in place until that is measured: of
#: the order of what 100 million parameters took (docs/training-in-place.md).
ASSUMED_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to run a job that its policy would accept.

    Attributes:
        gpu_type: "" only on clusters without types.
        gpus: 0: the job waits (it keeps its checkpoint and a lease).
        value: the policy's own measure, comparable within one round only.
        reason: shown by `selastic explain`; None: no reason.
        shares: fixed nodes, (node, GPUs) pairs: these or none; (): placement chooses.
        batch: samples per step, where the policy chooses batches itself.
        dropped: with 0 GPUs: rejected for good, and left pending (the simulator counts it as
            dropped).
        in_place: it was weighed as a change in place, and is refused if it needs a requeue.
        half: another job is to have half of its one GPU: it starts on half, where that is possible.
        urgent: a job that is to start chooses its place before jobs that move, and takes one
            however far spread, also under `[placement] mode = "delay"`; one that runs is not
            suspended to exchange GPUs with another.
    """

    gpu_type: str
    gpus: int
    value: float
    reason: Reason | None = None
    shares: tuple[tuple[str, int], ...] = ()
    batch: int | None = None
    dropped: bool = False
    in_place: bool = False
    half: bool = False
    urgent: bool = False

    def __post_init__(self) -> None:
        """Accept a sentence as reason, as sites' own policies for 0.1.0 give it."""
        reason: object = self.reason
        if isinstance(reason, str):
            object.__setattr__(self, "reason", Reason("text", text=reason) if reason else None)

    @property
    def place(self) -> Allocation | None:
        """The allocation of `shares`; None: placement chooses."""
        return Allocation.of(self.gpu_type, dict(self.shares)) if self.shares else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A policy's answer for one job; `alternatives` best first, never empty."""

    job_id: int
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FreeCapacity:
    """Free resources of each node, in the order of `Snapshot.nodes`.

    Attributes:
        gpus, cpus, memory_mb: negative where more is promised than exists.
        limits: the rest of each of `Snapshot.limits`, in their order and units.
    """

    gpus: tuple[int, ...]
    cpus: tuple[int, ...]
    memory_mb: tuple[int, ...]
    limits: tuple[float, ...]


class Action(enum.Enum):
    """Effect of a decision on a job."""

    KEEP = "keep"
    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    MOVE = "move"
    PREEMPT = "preempt"
    #: Decided by the crash-loop guard instead of a round (docs/reliability-failed-changes.md).
    HOLD = "hold"
    #: Nor this: a requeue that shows whether a script resumes (docs/esrun-proven.md).
    REHEARSE = "rehearsal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision for one elastic job.

    Attributes:
        target: allocation it gets; None: it waits.
        reason: why it gets this.
        why_not_more, why_not_fewer, why_here: shown by `selastic explain`; None: no reason.
        gain: relative change of speed, 0.25 = a quarter faster (negative when it gives GPUs to
            other jobs).
        cost_s: expected seconds without training, times GPUs held: GPU seconds.
        waiting_for: what prevents a better allocation at present, or None.
        batch: samples per step with the target, where the policy chooses batches.
        dropped: rejected for good.
        exchange: jobs with which it exchanges GPUs: these changes begin together, or none does.
        givers: jobs that give up companions in the same plan, whose GPUs its own companions get:
            it begins only with them.
    """

    job_id: int
    current: Allocation | None
    target: Allocation | None
    action: Action
    reason: Reason
    why_not_more: Reason | None = None
    why_not_fewer: Reason | None = None
    why_here: Reason | None = None
    gain: float = 0.0
    cost_s: float = 0.0
    waiting_for: Reason | None = None
    batch: int | None = None
    dropped: bool = False
    exchange: tuple[int, ...] = ()
    givers: tuple[int, ...] = ()

    @property
    def requires(self) -> tuple[int, ...]:
        """Jobs without whose changes this one does not begin."""
        return self.exchange + self.givers


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """GPUs kept for a pending job that Slurm starts (rigid, or below its own MIN).

    No job grows into them until that job runs or `until` (epoch s) has passed.
    """

    job_id: int
    shares: tuple[tuple[str, int], ...]
    since: float
    until: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Result of one round.

    Attributes:
        left_to_slurm: pending elastic jobs that Slurm starts.
        wake: latest time of the next round (epoch s): a job that waits for near nodes then takes
            farther ones; None: no wait ends.
    """

    time: float
    decisions: tuple[Decision, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[Reason, ...] = ()
    left_to_slurm: frozenset[int] = frozenset()
    wake: float | None = None

    @cached_property
    def decision(self) -> Mapping[int, Decision]:
        """Decisions by job id."""
        return {d.job_id: d for d in self.decisions}

    @property
    def changes(self) -> tuple[Decision, ...]:
        """Decisions that change an allocation."""
        return tuple(d for d in self.decisions if d.action is not Action.KEEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Speed measured in one shape: `samples_per_s` over `steps` steps.

    Attributes:
        racks: number of racks of its nodes.
        compute_s: seconds of forward, backward and optimizer in one step; None: not reported.
        sync_s: seconds of one step spent waiting for other ranks, or by which their exchange
            lengthens it.
        reports: reports with these two, which are running means over about five of them.
        exchange: kind of the schedule of exchange in these reports, as in `Observation`.
    """

    gpu_type: str
    gpus: int
    nodes: int
    samples_per_s: float
    steps: int
    racks: int = 1
    compute_s: float | None = None
    sync_s: float | None = None
    reports: int = 0
    exchange: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Data of a job beside the snapshot: from reports, commands and past transitions.

    Attributes:
        measurements: at most one per (type, GPUs, nodes, racks), the latest.
        proven: it has written a checkpoint and read it back, so it may be resized.
        unproven: why that was not found, as far as it is known.
        reporting: it has reported during the present attempt.
        checkpoint_s, restart_s: measured cost of a save, and from notice to first step in the
            new shape; None until measured.
        last_change: when its allocation last changed by a transition or start (epoch s).
        changes: times (epoch s) of past resizes, oldest first, for the budget.
        held: `selastic hold`: its allocation is not changed.
        deaf_until: it did not save in time after a notice; no notice is sent until then.
        in_transition: a transition is under way towards `target`.
        leased: the controller makes it wait (preempted, or not yet started) by BeginTime.
        resizes: number of changes in its life.
        resizes_in_place: of these, changes in place.
        in_place: it can be changed in place now: its training supports it, site and job allow it,
            and no failed attempt bars it.
        not_in_place: why it cannot; None: it can, it does not run, or the site does not allow it.
        pause_s: measured time that training stood still in its last change in place; None until
            measured.
        restarts: all its ranks can be started again on other companions now, without a requeue.
        ranks_restart_s: measured cost of that, from notice to first step; None until measured.
        stopped: why the crash-loop guard holds it; None: it does not.
        learned: input of the goodput models; None: only `measurements` are known.
        gradient_bytes: bytes that the ranks reduce in each step (of the parameters that are
            trained); None: not reported, or the job is not purely data-parallel.
        extended_s: seconds by which its time limit was extended.
        on_trial: since when (epoch s) its attempt lacks a checkpoint newer than its last change;
            None: it has one.
        failed: how its attempt failed on trial; it is about to go back.
        barred: shapes in which it failed: (type, GPUs, how).
        half_barred: how it failed on half of a GPU, so that it gets no other; None: it has not.
        jump: what jumped in its training over a change; "": nothing that is known.
        ordered_plan: execution plan that the controller has chosen for it; "": its own choice.
        plan_speeds: speeds of its plans, where they were tried.
        oversized_plans: plans that ran out of memory, and where.
        length: run time predicted at its submission, for the size that it asked for; None: there
            is no prediction.
    """

    job_id: int
    measurements: tuple[Measurement, ...] = ()
    proven: bool = False
    unproven: Reason | None = None
    reporting: bool = False
    checkpoint_s: float | None = None
    restart_s: float | None = None
    progress: float | None = None
    last_change: float | None = None
    changes: tuple[float, ...] = field(default=())
    held: bool = False
    deaf_until: float | None = None
    in_transition: bool = False
    target: Allocation | None = None
    leased: bool = False
    resizes: int = 0
    resizes_in_place: int = 0
    in_place: bool = False
    not_in_place: Reason | None = None
    pause_s: float | None = None
    restarts: bool = False
    ranks_restart_s: float | None = None
    stopped: Reason | None = None
    learned: Learned | None = None
    gradient_bytes: float | None = None
    extended_s: int = 0
    on_trial: float | None = None
    failed: Reason | None = None
    barred: tuple[tuple[str, int, Reason], ...] = ()
    half_barred: Reason | None = None
    jump: str = ""
    length: DurationEstimate | None = None
    ordered_plan: str = ""
    plan_speeds: tuple[PlanSpeed, ...] = ()
    oversized_plans: tuple[OversizedPlan, ...] = ()

    def change_s(self, assumed_s: float) -> float:
        """Return the seconds without training of a requeue: a save and a restart.

        Args:
            assumed_s: seconds of a restart that has not been measured.
        """
        restart_s = assumed_s if self.restart_s is None else self.restart_s
        return restart_s + (self.checkpoint_s or 0.0)

    def cost_s(self, kind: ResizeKind, assumed_s: float) -> float:
        """Return the seconds without training of a change of this kind.

        Args:
            kind: a restart of the ranks counts as a requeue until it has been measured.
            assumed_s: seconds of a restart that has not been measured.
        """
        if kind is ResizeKind.IN_PLACE:
            return ASSUMED_PAUSE_S if self.pause_s is None else self.pause_s
        if kind is ResizeKind.RESTART and self.ranks_restart_s is not None:
            return self.ranks_restart_s
        return self.change_s(assumed_s)

    @property
    def by_companions(self) -> bool:
        """Whether companions can be added and removed without a requeue."""
        return self.in_place or self.restarts

    def costs_s(self, job: Job, sizes: Iterable[int], assumed_s: float) -> dict[int, float]:
        """Return the seconds without training of a change to each of these sizes.

        On the type that the job holds, by the cheapest kind of change. Whether a growth finds room
        beside the job is left to placement.

        Args:
            job: this one, running.
            sizes: numbers of GPUs.
            assumed_s: seconds of a restart that has not been measured.
        """
        requeue_s = self.change_s(assumed_s)
        base, held = job.base_allocation, job.allocation
        if not self.by_companions or base is None or held is None:
            return dict.fromkeys(sizes, requeue_s)
        kind = ResizeKind.IN_PLACE if self.in_place else ResizeKind.RESTART
        cheap_s = self.cost_s(kind, assumed_s)
        smaller = smaller_sizes(base, [c.allocation for c in job.companions])
        return {n: cheap_s if n > held.gpus or n in smaller else requeue_s for n in sizes}

    def kind_of(self, job: Job, target: Allocation | None) -> ResizeKind:
        """Return the cheapest kind of change that brings its job to a target."""
        if not self.by_companions or target is None:
            return ResizeKind.REQUEUE
        if self.in_place:
            kind, change = ResizeKind.IN_PLACE, change_in_place(job, target)
        else:
            kind, change = ResizeKind.RESTART, change_by_restart(job, target)
        return ResizeKind.REQUEUE if change is None else kind
