"""Seconds per training step under an execution plan: the model of Rubick (MLSys'25, 2408.08586).

With P parameters in 2**20, g replicas, h threads of the CPU per GPU, times in milliseconds:

    T_bwd  = k_bwd T_fwd                                  T_fwd: of the replica's share, once
    T_comm = c 8 P (g-1)/g / B                            B: of the slowest link, in 2**20 bytes/ms
    T_sync = (T_comm^k_sync + T_bwd^k_sync)^(1/k_sync)    1: nothing is hidden, large: all of it
    T_off  = 4 P/g / B_host                               shard=offload only; then T_sync += k_off
    T_opt  = k_opt P | k_opt P/g | k_host P/(g h)         none | divided | offload
    T_step = f T_fwd + (b-1) T_bwd + T_sync + T_off + T_opt + T_off + k_swap + k_const

f, b and c count forward passes, backward passes and reductions of a step: `PassCounts`. With
stages or tensor=N (pp stages, degree tp, dp replicas, m samples of each, S = sequence length times
hidden size, L layers):

    T_tp   = 32 S (tp-1)/tp m L / 2**20 / B_inside
    T_pp   = 16 S/tp m pp / 2**20 / B_between             0 without stages
    T_dp   = 8 (dp-1)/dp P/(tp pp) / B
    T_step = T_f + (T_dp^k + (k_bwd T_f)^k)^(1/k) + k_opt P/(tp pp) + k_const + T_pp + T_tp

with k = k_sync and T_f = T_fwd dp / (pp 1.15^tp), T_fwd that of one GPU: `staged_forward_ms`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding

_MILLION = 1 << 20
#: Speedup of a forward pass, to the power of the tensor degree, as published.
_TENSOR_GAIN = 1.15


@dataclass(frozen=True, slots=True)
class PlanCoefficients:
    """Fitted numbers of one model; see the module. The order is the published one."""

    k_bwd: float
    k_sync: float
    k_opt: float
    k_host: float
    k_const: float
    k_off: float
    k_swap: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLinks:
    """Speeds in 2**20 bytes per millisecond, about GB/s.

    Attributes:
        host: between GPU and the memory of its host.
        inside: between GPUs of a node.
        between: between nodes.
    """

    host: float
    inside: float
    between: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Work of a training in one step, the same in every plan.

    Attributes:
        parameters: of the model, in 2**20.
        batch: samples.
        width: sequence length times hidden size; 0: no stages and no tensor=N.
        layers: of the model.
    """

    parameters: float
    batch: int
    width: float = 0.0
    layers: int = 1


@dataclass(frozen=True, slots=True)
class PassCounts:
    """Forward passes, backward passes and reductions of a step."""

    forward: float = 1.0
    backward: float = 1.0
    reductions: float = 1.0

    @classmethod
    def of(cls, plan: ExecutionPlan) -> PassCounts:
        """Return those of a plan whose `T_fwd` is of the replica's whole share."""
        return cls(forward=2.0 if plan.recompute else 1.0)


@dataclass(frozen=True, slots=True)
class PlanStepParts:
    """Milliseconds of a step: backward pass with exchange, optimizer, and the whole step."""

    backward_ms: float
    optimizer_ms: float
    step_ms: float


def step_parts(
    plan: ExecutionPlan,
    work: ModelWork,
    *,
    forward_ms: float,
    coefficients: PlanCoefficients,
    links: PlanLinks,
    inside: bool,
    threads: int = 1,
    counts: PassCounts | None = None,
) -> PlanStepParts:
    """Return the predicted times of a step.

    Args:
        plan: without spatial groups.
        work: of the model.
        forward_ms: forward pass of a replica's share; with stages or tensor=N `T_f`.
        coefficients: of the model.
        links: of the cluster.
        inside: whether the replicas exchange gradients within nodes.
        threads: of the CPU, per GPU.
        counts: passes of a step; None: those of the plan.

    Raises:
        ValueError: a plan that the model does not describe, or a time that is not positive.
    """
    if plan.space > 1:
        raise ValueError(f"plan {plan} is invalid: expected one without spatial groups")
    if not forward_ms > 0:
        raise ValueError(f"forward_ms={forward_ms:g} is invalid: expected a number above 0")
    if plan.stages > 1 or plan.tensor > 1:
        return _staged(plan, work, forward_ms, coefficients, links, inside=inside)
    counts = counts or PassCounts.of(plan)
    k, gpus, size = coefficients, plan.replicas, work.parameters
    backward = k.k_bwd * forward_ms
    link = links.inside if inside else links.between
    exchange = counts.reductions * 8 * size * (gpus - 1) / gpus / link
    sync = combined(exchange, backward, k.k_sync)
    offload = 0.0
    if plan.sharding is Sharding.OFFLOAD:
        offload = 4 * size / gpus / links.host
        sync += k.k_off + offload
        optimizer = k.k_host * size / (gpus * threads)
    else:
        optimizer = k.k_opt * size / (1 if plan.sharding is Sharding.NONE else gpus)
    swap = optimizer + k.k_swap + offload
    backward_all = (counts.backward - 1) * backward + sync
    return PlanStepParts(
        backward_all, swap, counts.forward * forward_ms + backward_all + swap + k.k_const
    )


def staged_forward_ms(plan: ExecutionPlan, single_ms: float) -> float:
    """Return the forward pass of a plan with stages or tensor=N, from that of one GPU."""
    return single_ms * plan.replicas / (plan.stages * _TENSOR_GAIN**plan.tensor)


def combined(first_ms: float, second_ms: float, overlap: float) -> float:
    """Return the time of two activities that overlap: (x^k + y^k)^(1/k), k at least 1."""
    larger = max(first_ms, second_ms)
    if larger <= 0:
        return 0.0
    ratio = min(first_ms, second_ms) / larger
    return larger * float((1.0 + ratio**overlap) ** (1.0 / overlap)) if ratio else larger


def _staged(
    plan: ExecutionPlan,
    work: ModelWork,
    forward_ms: float,
    k: PlanCoefficients,
    links: PlanLinks,
    *,
    inside: bool,
) -> PlanStepParts:
    if work.width <= 0:
        raise ValueError(f"plan {plan}: width={work.width:g} is invalid: expected above 0")
    replicas, stages, tensor = plan.replicas, plan.stages, plan.tensor
    samples = math.floor(work.batch / replicas)
    held = work.parameters / tensor / stages
    by_tensor = (
        32 * work.width * (tensor - 1) / tensor * samples * work.layers / _MILLION / links.inside
    )
    by_stages = 0.0
    if stages > 1:
        by_stages = 16 * work.width / tensor * samples * stages / _MILLION / links.between
    exchange = 8 * (replicas - 1) / replicas * held / (links.inside if inside else links.between)
    backward = combined(exchange, k.k_bwd * forward_ms, k.k_sync)
    optimizer = k.k_opt * held
    step = forward_ms + backward + optimizer + k.k_const + by_stages + by_tensor
    return PlanStepParts(backward, optimizer, step)
