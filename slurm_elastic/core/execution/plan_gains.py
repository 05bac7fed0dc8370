"""Speed of a job's execution plans relative to its own choice of a plan (our definition).

A *kind* of plan is its stages, tensor degree and sharding; the replicas follow from the GPUs. In an
allocation in which both were measured, the *gain* of a kind is its speed over that of the job's own
choice. In another allocation it is that of the most similar one: the distance is

    |log2(GPUs / GPUs')| + 1 if only one of them is on a single node + 1/2 if the types differ

and beyond `FARTHEST` nothing is known. A throughput model describes the job's own choice; times its
gains it describes the best plan of each configuration (`PlanGains.factor`).

>>> rows = [PlanGain("a100", 4, 1, PlanKind(tensor=2), 1.4)]
>>> gains = PlanGains(tuple(rows))
>>> gains.factor("a100", nodes=1, gpus=8), gains.factor("a100", nodes=1, gpus=3)
(1.4, 1.0)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding

#: Distance beyond which a measurement says nothing (our choice): GPUs by a factor of four.
FARTHEST = 2.0
_OTHER_LINKS, _OTHER_TYPE = 1.0, 0.5


@dataclass(frozen=True, slots=True)
class PlanKind:
    """An execution plan without the number of its replicas."""

    stages: int = 1
    tensor: int = 1
    sharding: Sharding = Sharding.NONE

    @classmethod
    def of(cls, plan: ExecutionPlan) -> PlanKind:
        """Return the kind of a plan."""
        return cls(plan.stages, plan.tensor, plan.sharding)

    def fits(self, nodes: int, gpus: int) -> bool:
        """Return whether whole replicas fill these GPUs, and ranks sharing weights one node."""
        on_node = gpus // nodes
        return gpus % (self.stages * self.tensor) == 0 and on_node % self.tensor == 0


@dataclass(frozen=True, slots=True)
class PlanSpeed:
    """Measured samples/s of a plan in one allocation; `plan` is its text, "" the job's choice."""

    gpu_type: str
    gpus: int
    nodes: int
    plan: str
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class OversizedPlan:
    """A plan that ran out of memory in one allocation; `plan` as in `PlanSpeed`."""

    gpu_type: str
    gpus: int
    nodes: int
    plan: str


@dataclass(frozen=True, slots=True)
class PlanGain:
    """Measured gain of one kind of plan in one allocation; see the module."""

    gpu_type: str
    gpus: int
    nodes: int
    kind: PlanKind
    gain: float

    def distance(self, gpu_type: str, nodes: int, gpus: int) -> float:
        """Return the distance of another allocation; see the module."""
        return (
            abs(math.log2(gpus / self.gpus))
            + _OTHER_LINKS * ((nodes > 1) != (self.nodes > 1))
            + _OTHER_TYPE * (gpu_type != self.gpu_type)
        )


@dataclass(frozen=True, slots=True)
class PlanGains:
    """Measured gains of a job; hashable, so that models are kept by them."""

    rows: tuple[PlanGain, ...] = ()

    def of(self, kind: PlanKind, gpu_type: str, *, nodes: int, gpus: int) -> float | None:
        """Return the gain of a kind of plan in an allocation; None: not known."""
        distances = [
            (row.distance(gpu_type, nodes, gpus), index)
            for index, row in enumerate(self.rows)
            if row.kind == kind
        ]
        distance, index = min(distances, default=(math.inf, 0))
        return self.rows[index].gain if distance <= FARTHEST else None

    def factor(self, gpu_type: str, *, nodes: int, gpus: int) -> float:
        """Return the gain of the best plan known for an allocation, at least 1."""
        best = 1.0
        for kind in {row.kind for row in self.rows}:
            if kind.fits(nodes, gpus):
                best = max(best, self.of(kind, gpu_type, nodes=nodes, gpus=gpus) or 1.0)
        return best
