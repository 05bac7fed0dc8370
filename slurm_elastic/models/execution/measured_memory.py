"""Bytes of GPU memory that the plans of a training need, by what its ranks have reported.

Weights, gradients and the state of the optimizer are divided as in `plan_memory`. Activations are
in proportion to the samples that pass through the model at once: their bytes for a sample are the
measured peak less that state. So plans of any model can be compared, without its width and heads.
Our choices, for what is not measured:

- With recomputation 0.3 of the activations are kept. Transformers keep less: 0.06 of them and one
  layer's (`plan_memory`).
- Ranks that share layers keep 0.3 + 0.7/N of them, as transformers do.
- Replicas that divide the state of the optimizer only keep whole gradients, and take in those of
  the others for what they own: twice the bytes.
- A pipeline whose micro-batches are not known has four for each stage.
- `slowdown`: the time of a step over that of the same replicas without options.

>>> memory = MeasuredMemory(weights=4e9, optimizer=8e9, sample=1e9, layers=12)
>>> own = ExecutionPlan.parse("2x1")
>>> memory.gpu_bytes(own, batch=32) / 1e9
32.0
>>> memory.gpu_bytes(ExecutionPlan.parse("2x1+accumulation=3"), batch=32) / 1e9
20.0
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.models.execution.plan_memory import divided_state

_KEPT_INPUTS = 0.3
_WHOLE_ON_ALL = 0.3
_MICRO_BATCHES = 4
_RECOMPUTED, _SHARDED, _SLICED, _SHARED, _STAGED, _ACCUMULATED = 1.33, 1.15, 1.1, 1.2, 1.15, 1.03


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredMemory:
    """Memory of one training.

    Attributes:
        weights: bytes of all parameters; their gradients have as many.
        optimizer: bytes of its whole state.
        sample: bytes of the activations of one sample.
        layers: of the model; 0: not known.
        micro_batch: most samples through the model at once by the script's choice; 0: all of a
            replica's share.
    """

    weights: float
    optimizer: float
    sample: float
    layers: int = 0
    micro_batch: int = 0

    def gpu_bytes(self, plan: ExecutionPlan, *, batch: int) -> float:
        """Return the bytes on the GPU that needs most.

        Args:
            plan: without spatial groups.
            batch: samples of a step.
        """
        return self.state_bytes(plan) + self.sample * self.kept_samples(plan, batch=batch)

    def state_bytes(self, plan: ExecutionPlan) -> float:
        """Return the bytes of weights, gradients and optimizer."""
        weights, gradients, optimizer, _ = divided_state(
            plan,
            weights=self.weights,
            gradients=self.weights,
            optimizer=self.optimizer,
            layers=self.layers or 12,
        )
        if plan.sharding is Sharding.OPTIMIZER:
            gradients *= 2 * plan.replicas
        return weights + gradients + optimizer

    def kept_samples(self, plan: ExecutionPlan, *, batch: int) -> float:
        """Return for how many samples of the whole model activations are kept at once."""
        share, stages = -(-batch // plan.replicas), plan.stages
        if plan.accumulation is not None:
            micro_batches = plan.accumulation + 1
        elif self.micro_batch:
            micro_batches = -(-share // self.micro_batch)
        else:
            micro_batches = 1 if stages == 1 else _MICRO_BATCHES * stages
        micro_batch = math.ceil(share / min(micro_batches, share))
        kept = micro_batch * min(stages, micro_batches) / stages
        kept *= _KEPT_INPUTS if plan.recompute else 1.0
        return kept * (_WHOLE_ON_ALL + (1 - _WHOLE_ON_ALL) / plan.tensor)


def slowdown(plan: ExecutionPlan) -> float:
    """Return the time of a step over that of as many GPUs without options: see the module."""
    factor = _RECOMPUTED if plan.recompute else 1.0
    factor *= _SHARDED if plan.sharding is Sharding.FULL else 1.0
    factor *= _SLICED if plan.sharding is Sharding.OPTIMIZER else 1.0
    factor *= _SHARED ** math.log2(plan.tensor) * _STAGED ** math.log2(plan.stages)
    return float(factor * _ACCUMULATED ** math.log2((plan.accumulation or 0) + 1))
