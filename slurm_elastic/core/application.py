"""The training of a job and its measurements: the values that models are fitted to.

An `Application` is the same in all attempts: the class of the job, the range of its batch, the
speed of one GPU of each type. `Learned` adds the measurements of the job's reports, or of the
simulator. Both are frozen and hashable: equal values give the same, cached model.

Terms: a *micro-batch* is computed by one replica at once; one optimiser step
takes `1 + accumulation` of them on each replica; *global batch* = replicas times
micro-batch times (1 + accumulation). A replica is one GPU, or `unit` GPUs.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise

from slurm_elastic.core.execution.plan_gains import PlanGains


class JobClass(enum.Enum):
    """Properties that a scheduler may choose (Sia, section 3.2)."""

    #: GPUs, type and batch.
    ADAPTIVE = "adaptive"
    #: GPUs and type; the batch is the user's.
    STRONG_SCALING = "strong-scaling"
    #: GPUs and batch are the user's; only type and time are chosen.
    RIGID = "rigid"


@dataclass(frozen=True, slots=True)
class Observation:
    """Times measured in one configuration.

    Attributes:
        gpu_type: type of all GPUs.
        nodes: number of nodes.
        gpus: GPUs over all nodes.
        micro_batch: samples per replica and micro-step.
        step_s: one optimiser step without accumulation.
        micro_step_s: that step less its gradient synchronisation: one accumulation micro-step.
        exchange: kind of the schedule by which replicas exchanged gradients; "": after the
            backward pass, or a single replica.
        exchange_s: seconds of that exchange alone, nothing of it hidden; None: not measured.
    """

    gpu_type: str
    nodes: int
    gpus: int
    micro_batch: int
    step_s: float
    micro_step_s: float
    exchange: str = ""
    exchange_s: float | None = None


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
        estimated: `single` was not measured on this type, but follows from other types.
    """

    gpu_type: str
    least: int
    most: int
    single: float | None = None
    rate: float | None = None
    unit: int = 1
    estimated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Application:
    """A job's training, as known before it runs.

    Attributes:
        name: jobs of the same name share measurements of GPU types.
        job_class: properties that may be chosen.
        initial_batch: global batch at which `Noise` is stated and progress counts 1 per step.
        max_batch: largest global batch that a policy may count on.
        batch: global batch that the user requested.
        gpus: GPUs that the user requested.
        accumulation: whether micro-batches may be accumulated.
        micro_batches: micro-batches in flight per replica and step; > 1 only with pipelines.
        types: profile of each type; the job cannot run on a type that is missing.
        profiled: whether their `single` was measured; else it is relative.
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
    profiled: bool = False

    def on(self, gpu_type: str) -> TypeProfile | None:
        """Return the profile on a type; None: the job cannot run there."""
        return next((t for t in self.types if t.gpu_type == gpu_type), None)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer; times in any unit that all layers of a job share.

    Attributes:
        forward_s, backward_s: seconds of the passes.
        parameter_bytes: gradients that are sent for it.
    """

    forward_s: float
    backward_s: float
    parameter_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefixes:
    """Front layers of a job that may be frozen, as its training library reports.

    Attributes:
        layers: number of layers of the model.
        certified: layers from the front that may be frozen.
        frozen: layers that are frozen now.
        penalties: (layers, fraction of useful progress lost), ascending in the layers; the
            penalty of other prefixes is unknown, that of 0 layers is 0.
        max_penalty: the largest penalty that the user accepts; 0 to 1.
        costs: cost of each layer, from the front; () if not measured.

    Raises:
        ValueError: a value is out of range, or values contradict each other.
    """

    layers: int
    certified: int
    max_penalty: float
    frozen: int = 0
    penalties: tuple[tuple[int, float], ...] = ()
    costs: tuple[LayerCost, ...] = ()

    def __post_init__(self) -> None:
        for name, count in (("certified", self.certified), ("frozen", self.frozen)):
            if not 0 <= count <= self.layers:
                raise ValueError(f"{name}={count}: must be from 0 to the {self.layers} layers")
        for text, fraction in (
            ("max_penalty", self.max_penalty),
            *((f"penalty of {n} layers", p) for n, p in self.penalties),
        ):
            if not 0 <= fraction <= 1:
                raise ValueError(f"{text}: {fraction:g} must be a fraction from 0 to 1")
        named = [0, *(n for n, _ in self.penalties), self.layers + 1]
        if any(b <= a for a, b in pairwise(named)):
            raise ValueError(f"penalties of {named[1:-1]} layers: must ascend within the layers")
        if self.costs and len(self.costs) != self.layers:
            raise ValueError(
                f"costs of {len(self.costs)} layers, but the model has {self.layers}:"
                " measure them again"
            )
        for i, cost in enumerate(self.costs, start=1):
            worst = min(cost.forward_s, cost.backward_s, cost.parameter_bytes)
            total = cost.forward_s + cost.backward_s + cost.parameter_bytes
            if not (worst >= 0 and total < float("inf")):
                raise ValueError(f"costs of layer {i}: must be finite and not negative")
        if self.costs and not sum(c.forward_s + c.backward_s for c in self.costs) > 0:
            raise ValueError("costs: the layers take no time at all: measure them again")


@dataclass(frozen=True, slots=True)
class Learned:
    """An application and the measurements of one of its jobs.

    Attributes:
        application: as known before.
        observations: at most one per configuration, in the order of their measurement.
        noise: the latest; None: not measured, the batch's efficiency is unknown.
        prefixes: layers that may be frozen; None: none.
        residuals: whether models correct their fits by what these leave over
            (models/step_residuals.py).
        deviation: of times that are not the job's own, the standard deviation of the job's
            deviation from its application, in logarithms of seconds (models/application_pool.py).
        plan_gains: of execution plans over the job's own choice, which `observations` are of; None:
            the controller chooses no plan for the job.
    """

    application: Application
    observations: tuple[Observation, ...] = ()
    noise: Noise | None = None
    prefixes: Prefixes | None = None
    residuals: bool = False
    deviation: float = 0.0
    plan_gains: PlanGains | None = None
