"""What a job trains, and what has been measured of it: the values that models are fitted to.

An `Application` is what stays the same from attempt to attempt: which class of
job it is, how far its batch may go, what one GPU of each type does. `Learned`
adds what the job's reports (or the simulator's truth) have shown so far.
Frozen and hashable: equal knowledge gives the same, cached model.

Words: a *micro-batch* is what one replica computes at once; one optimiser step
takes `1 + accumulation` of them on each replica; *global batch* = replicas times
micro-batch times (1 + accumulation). A replica is one GPU unless `units` says more.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class JobClass(enum.Enum):
    """What a scheduler may choose (Sia, section 3.2)."""

    #: GPUs, type and batch.
    ADAPTIVE = "adaptive"
    #: GPUs and type; the batch is the user's.
    STRONG_SCALING = "strong-scaling"
    #: Only type and time; GPUs and batch are the user's.
    RIGID = "rigid"


@dataclass(frozen=True, slots=True)
class Observation:
    """Times measured in one configuration.

    Attributes:
        gpu_type: of all its GPUs.
        nodes: nodes it ran on.
        gpus: GPUs over all nodes.
        micro_batch: samples per replica and micro-step.
        step_s: one optimiser step without accumulation.
        micro_step_s: that step less its gradient synchronisation: one accumulation micro-step.
    """

    gpu_type: str
    nodes: int
    gpus: int
    micro_batch: int
    step_s: float
    micro_step_s: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Gradient statistics at the initial batch: squared norm, and variance."""

    sqr: float
    var: float


@dataclass(frozen=True, slots=True)
class TypeProfile:
    """One application on one GPU type.

    Attributes:
        gpu_type: the type.
        least, most: micro-batches possible per replica; `most` is bound by memory.
        single: samples/s of one replica, from a profile run or an earlier job; None: not known.
        rate: steps/s in the requested shape (gpus, batch), for policies of rigid jobs, comparable
            between the types of one job; None: not known.
        unit: GPUs per replica (pipeline stages).
    """

    gpu_type: str
    least: int
    most: int
    single: float | None = None
    rate: float | None = None
    unit: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """What is known of a job's training before it runs.

    Attributes:
        name: jobs of the same name share what was learned of GPU types.
        job_class: what may be chosen for it.
        initial_batch: global batch at which `Noise` is stated and progress counts 1 per step.
        max_batch: largest global batch that a policy may count on.
        batch: global batch that the user asked for.
        gpus: GPUs that the user asked for.
        accumulation: whether micro-batches may be accumulated.
        micro_batches: micro-batches in flight per replica and step; > 1 only with pipelines.
        types: what is known of each type; a type that is missing cannot run it.
    """

    name: str
    job_class: JobClass = JobClass.ADAPTIVE
    initial_batch: int
    max_batch: int
    batch: int
    gpus: int = 1
    accumulation: bool = True
    micro_batches: int = 1
    types: tuple[TypeProfile, ...] = ()

    def on(self, gpu_type: str) -> TypeProfile | None:
        """What is known of it on a type; None: it cannot run there."""
        return next((t for t in self.types if t.gpu_type == gpu_type), None)


@dataclass(frozen=True, slots=True)
class Learned:
    """An application and what has been seen of one of its jobs.

    Attributes:
        application: what was known before.
        observations: at most one per configuration, in the order of their measurement.
        noise: the latest; None: not measured, the batch's efficiency is unknown.
    """

    application: Application
    observations: tuple[Observation, ...] = ()
    noise: Noise | None = None
