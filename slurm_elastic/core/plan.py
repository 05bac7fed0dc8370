"""From wishes to decisions: what policy, placement and controller hand to each other.

A policy answers with a `Proposal` for each elastic job: alternatives, best
first. Placement turns them into a `Plan`: for each job one `Decision` that
says which GPUs it shall hold, why, and what that gains and costs.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from slurm_elastic.core.application import Learned
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.reason import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to run a job that its policy would accept.

    Attributes:
        gpu_type: "" only on clusters without types.
        gpus: 0 means: let it wait (it keeps its checkpoint and a lease).
        value: the policy's own measure, comparable within one round only.
        reason: why, for `selastic explain`; None: nothing to say.
        shares: a finished place, (node, GPUs) pairs: exactly that one or none; (): placement
            looks for one.
        batch: samples per step that go with it, where the policy chooses batches itself.
        dropped: with no GPUs: it was turned away for good, and is left pending (the simulator
            counts it as dropped).
    """

    gpu_type: str
    gpus: int
    value: float
    reason: Reason | None = None
    shares: tuple[tuple[str, int], ...] = ()
    batch: int | None = None
    dropped: bool = False

    @property
    def place(self) -> Allocation | None:
        """The finished place; None: placement looks for one."""
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
        gpus, cpus, memory_mb: negative where more is promised than is there.
        limits: what is left of each of `Snapshot.limits`, in their order and units.
    """

    gpus: tuple[int, ...]
    cpus: tuple[int, ...]
    memory_mb: tuple[int, ...]
    limits: tuple[float, ...]


class Action(enum.Enum):
    """What a decision does to a job."""

    KEEP = "keep"
    START = "start"
    GROW = "grow"
    SHRINK = "shrink"
    MOVE = "move"
    PREEMPT = "preempt"
    #: No decision of a round: the progress guard's (docs/reliability.md).
    HOLD = "hold"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one elastic job shall hold.

    Attributes:
        target: None: it shall wait.
        reason: why it gets this.
        why_not_more, why_not_fewer, why_here: for `selastic explain`; None: nothing to say.
        gain: relative speed after against before, 0.25 = a quarter faster (negative when it
            gives way to somebody).
        cost_s: expected seconds without training, times GPUs held: GPU seconds.
        waiting_for: what holds a better allocation back, or None.
        batch: samples per step that it is to have with the target, where the policy chooses them.
        dropped: it was turned away for good.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """GPUs kept for a pending job that is not ours to start (rigid, or below its own MIN).

    Nobody grows into them until the job runs or `until` (epoch s) has passed.
    """

    job_id: int
    shares: tuple[tuple[str, int], ...]
    since: float
    until: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One round's outcome.

    Attributes:
        wake: when to decide again at the latest (epoch s): a job that waits for a near place
            then takes a farther one; None: nobody's wait ends.
    """

    time: float
    decisions: tuple[Decision, ...] = ()
    claims: tuple[Claim, ...] = ()
    notes: tuple[Reason, ...] = ()
    wake: float | None = None

    @cached_property
    def decision(self) -> Mapping[int, Decision]:
        """Decisions by job id."""
        return {d.job_id: d for d in self.decisions}

    @property
    def changes(self) -> tuple[Decision, ...]:
        """Decisions that do something."""
        return tuple(d for d in self.decisions if d.action is not Action.KEEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Speed seen in one shape: `samples_per_s` over `steps` steps.

    Attributes:
        racks: that its nodes were in.
        compute_s: of one step there, forward, backward and optimizer; None: not told.
        sync_s: what a step stood still for the others, waiting for slower ranks included.
        reports: that told these two, which are running means over about five of them.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """What is known of a job beyond the snapshot: from reports, people and past transitions.

    Attributes:
        measurements: at most one per (type, GPUs, nodes, racks), the latest.
        proven: it has written a checkpoint and read it back: it may be resized.
        reporting: it has reported during the present attempt.
        checkpoint_s, restart_s: measured cost of a save, and from notice to first step in the
            new shape; None until seen.
        last_change: when its allocation last changed through us or by starting (epoch s).
        changes: times (epoch s) of past resizes, oldest first, for the budget.
        held: `selastic hold`: leave it as it is.
        deaf_until: it did not save in time when it was asked, and is left alone until then.
        in_transition: a transition is under way towards `target`.
        leased: the controller makes it wait (preempted, or not yet started) by BeginTime.
        resizes: changes made to it in its life.
        stopped: why the crash-loop guard holds it; None: it does not.
        learned: what goodput models are fitted to; None: nothing is known but `measurements`.
        gradient_bytes: what its ranks reduce in each step: bytes of the parameters that are
            trained; None: not told, or it is not data-parallel alone.
        extended_s: by how much its present time limit is longer than what it would have left.
    """

    job_id: int
    measurements: tuple[Measurement, ...] = ()
    proven: bool = False
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
    stopped: Reason | None = None
    learned: Learned | None = None
    gradient_bytes: float | None = None
    extended_s: int = 0

    def change_s(self, assumed_s: float) -> float:
        """Seconds without training that a change costs: a save, and a restart.

        Args:
            assumed_s: for the restart, until one was measured.
        """
        restart_s = assumed_s if self.restart_s is None else self.restart_s
        return restart_s + (self.checkpoint_s or 0.0)
