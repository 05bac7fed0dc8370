"""Bytes of GPU memory that an execution plan needs, on the GPU that needs most.

Per parameter, mixed precision with Adam: 2 bytes of weight, 2 of gradient, 12 of optimizer (the
weight in single precision, two moments). They are divided among stages and by `tensor`; replicas
divide the optimizer's part (`shard=optimizer`, with it the gradients, as ZeRO stage 2), or all
three (`shard=full`, which gathers one layer at a time); with `shard=offload` optimizer and
gradients are in the host's memory, and one layer's gradients wait to be copied.

Activations of a transformer's layer, for m samples of s tokens, hidden size h, a heads, tensor
degree t, in half precision (Korthikanti et al., 2205.05198, without sequence parallelism):

    s m h (10 + 24/t + 5 a s / (h t))      all that the backward pass needs
    2 s m h                                with `recompute`: only the layer's input, and one layer's
                                           activations at a time

The first stage holds those of as many micro-batches as there are stages, or in a step. The last
layer adds 6 bytes of logits and their gradient per token and entry of the vocabulary. `reserve`
stands for the context of the GPU, buffers of the exchange and fragmentation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding

GIB = 1 << 30
#: Context of CUDA, buffers of NCCL and fragmentation: our choice.
RESERVE = 4 * GIB
_LOGITS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformerSize:
    """Sizes of a transformer.

    Attributes:
        parameters: their number.
        layers: number of layers.
        hidden: hidden size.
        heads: attention heads.
        tokens: of a sample.
        vocabulary: entries; 0: no logits per token, as of an image.
    """

    parameters: float
    layers: int
    hidden: int
    heads: int
    tokens: int
    vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class StateBytes:
    """Bytes per parameter of weights, gradients and optimizer; by default mixed precision, Adam."""

    weight: float = 2.0
    gradient: float = 2.0
    optimizer: float = 12.0


@dataclass(frozen=True, slots=True)
class MemoryParts:
    """Bytes on the GPU that needs most, and on the host for each of its GPUs."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    reserve: float
    host: float

    @property
    def gpu(self) -> float:
        """Bytes on the GPU in all."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.activations
            + self.logits
            + self.reserve
        )


def plan_memory(
    plan: ExecutionPlan,
    size: TransformerSize,
    *,
    share: int,
    state: StateBytes | None = None,
    reserve: float = RESERVE,
) -> MemoryParts:
    """Return the bytes that a plan needs.

    Args:
        plan: without spatial groups; its `accumulation` divides the share, None counts as 0.
        size: of the model.
        share: samples of a replica in a step.
        state: bytes per parameter.
        reserve: see the module.

    Raises:
        ValueError: a plan with space=N, or no samples.
    """
    if plan.space > 1:
        raise ValueError(f"plan {plan} is invalid: expected one without spatial groups")
    if share < 1:
        raise ValueError(f"share={share} is invalid: expected at least 1 sample")
    micro_batches = min(share, (plan.accumulation or 0) + 1)
    micro_batch = -(-share // micro_batches)
    state = state or StateBytes()
    stages, tensor = plan.stages, plan.tensor
    parameters = size.parameters
    weights, gradients, optimizer, host = divided_state(
        plan,
        weights=parameters * state.weight,
        gradients=parameters * state.gradient,
        optimizer=parameters * state.optimizer,
        layers=size.layers,
    )
    layers = -(-size.layers // stages)
    input_bytes = 2 * size.tokens * micro_batch * size.hidden
    whole = (
        size.tokens
        * micro_batch
        * size.hidden
        * (10 + 24 / tensor + 5 * size.heads * size.tokens / (size.hidden * tensor))
    )
    kept = input_bytes if plan.recompute else whole
    activations = kept * layers * min(stages, micro_batches) + (whole if plan.recompute else 0)
    logits = _LOGITS * size.tokens * micro_batch * size.vocabulary / tensor
    return MemoryParts(
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        # The first stage of several has no logits, the last has few micro-batches.
        logits=logits if stages == 1 else 0.0,
        reserve=reserve,
        host=host,
    )


def divided_state(
    plan: ExecutionPlan, *, weights: float, gradients: float, optimizer: float, layers: int
) -> tuple[float, float, float, float]:
    """Return bytes of weights, gradients and optimizer on a GPU, and of the host's part.

    Args:
        plan: divides them.
        weights: bytes of the whole model.
        gradients: likewise.
        optimizer: likewise.
        layers: of the model, of equal size.
    """
    replicas, parts = plan.replicas, plan.stages * plan.tensor
    weights, gradients, optimizer = weights / parts, gradients / parts, optimizer / parts
    layer = 1 / -(-layers // plan.stages)
    if plan.sharding is Sharding.OPTIMIZER:
        return weights, gradients / replicas, optimizer / replicas, 0.0
    if plan.sharding is Sharding.FULL:
        kept = 1 / replicas + layer
        return weights * kept, gradients * kept, optimizer / replicas, 0.0
    if plan.sharding is Sharding.OFFLOAD:
        return weights, gradients * layer, 0.0, (gradients + optimizer) / replicas
    return weights, gradients, optimizer, 0.0


def least_accumulation(
    plan: ExecutionPlan,
    size: TransformerSize,
    *,
    share: int,
    gpu_bytes: float,
    state: StateBytes | None = None,
) -> int | None:
    """Return the least accumulation with which a plan fits into a GPU; None: with none.

    Args:
        plan: its own `accumulation` does not count.
        size: of the model.
        share: samples of a replica in a step.
        gpu_bytes: memory of the GPU.
        state: bytes per parameter.
    """
    for accumulation in range(share):
        divided = replace(plan, accumulation=accumulation)
        if plan_memory(divided, size, share=share, state=state).gpu <= gpu_bytes:
            return accumulation
    return None


def most_samples(
    plan: ExecutionPlan,
    size: TransformerSize,
    *,
    batch: int,
    gpu_bytes: float,
    state: StateBytes | None = None,
) -> int:
    """Return the most samples that fit through a GPU at once, up to a batch; 0: not even one.

    Args:
        plan: its own `accumulation` does not count.
        size: of the model.
        batch: samples of a step.
        gpu_bytes: memory of the GPU.
        state: bytes per parameter.
    """
    at_once = replace(plan, accumulation=0)
    samples = 0
    while samples < batch and (
        plan_memory(at_once, size, share=samples + 1, state=state).gpu <= gpu_bytes
    ):
        samples += 1
    return samples
