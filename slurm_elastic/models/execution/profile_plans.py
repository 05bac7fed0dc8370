"""Execution plans of a model of which only a layer profile is known: bytes of a GPU, step times.

Plans are those that `plan=auto` may try (`slurm_elastic.core.execution.possible_plans`), with
recomputation and without, each with the fewest micro-batches with which it fits. Bytes are those of
`MeasuredMemory`, with what a profile has: parameters, and the outputs of layers as activations.
`MISSING` names what it has not.

A layout without options has a step time in steady state, by the published costs of PipeDream
(docs/pipeline.md): its slowest stage, cut where `straight` cuts, with V seconds of compute for the
samples of the profile, P bytes of parameters, r replicas, and B of the slowest link in use::

    V batch / (samples r) + 4 (r - 1) P / (B r)

>>> from slurm_elastic.core.layers import Layer, chain
>>> net = chain([Layer("conv", 0.02, 0.04, 8e6, 1e6), Layer("fc", 0.01, 0.01, 4e3, 4e8)])
>>> cluster = ProfiledCluster(node_gpus=2, bandwidths=((2, 1e9),))
>>> plans = profiled_plans(net, cluster, samples=8, batch=16, gpu_bytes=1e9)
>>> [(str(p.plan), round(p.memory_bytes / 1e9, 2), p.step_s) for p in plans if p.gpus == 2][:2]
[('1x2', 0.8, 0.12), ('1x2+recompute', 0.8, None)]
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.execution.possible_plans import more_micro_batches, possible_plans
from slurm_elastic.core.execution.supported_options import SupportedOptions
from slurm_elastic.core.layers import LayerProfile
from slurm_elastic.models.execution.measured_memory import MeasuredMemory
from slurm_elastic.models.pipedream.partitioner import (
    Level,
    PipelineError,
    PlannedStage,
    partition,
)

#: What a layer profile does not have, and what counts in its place.
MISSING = (
    "state of the optimizer (Adam's is assumed, twice the weights)",
    "activations within layers (outputs only)",
    "context and workspace of the GPU (none)",
)
_OPTIMIZER = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledCluster:
    """GPUs for which plans are listed.

    Attributes:
        node_gpus: of a node.
        nodes: number of nodes.
        bandwidths: GPUs up to which a level of links reaches, and its bytes/s, innermost first;
            empty: not known, and no step times.
    """

    node_gpus: int
    nodes: int = 1
    bandwidths: tuple[tuple[int, float], ...] = ()

    def sizes(self) -> list[tuple[int, ...]]:
        """Return 1, 2, 4, … GPUs of a node and all, then 2, 4, … nodes and all, as GPUs by node."""
        parts = [(gpus,) for gpus in _doubled(self.node_gpus)]
        return parts + [(self.node_gpus,) * count for count in _doubled(self.nodes) if count > 1]

    def bandwidth(self, gpus: int) -> float | None:
        """Return the bytes/s of the slowest level of links that so many GPUs use."""
        return next((speed for reach, speed in self.bandwidths if gpus <= reach), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledPlan:
    """One plan on a number of GPUs.

    Attributes:
        gpus: in all.
        plan: as it can be ordered.
        memory_bytes: on the GPU that needs most.
        step_s: seconds of a step in steady state; None: a plan with options, or links not known.
    """

    gpus: int
    plan: ExecutionPlan
    memory_bytes: float
    step_s: float | None


def profiled_plans(
    profile: LayerProfile,
    cluster: ProfiledCluster,
    *,
    samples: int,
    batch: int,
    gpu_bytes: float | None = None,
) -> list[ProfiledPlan]:
    """Return the plans that fit, by GPUs, those with the smallest replicas first.

    Args:
        profile: of the model.
        cluster: its GPUs.
        samples: that the profile is of.
        batch: samples of a step.
        gpu_bytes: memory of a GPU; None: every plan counts as one that fits.
    """
    weights = profile.parameter_bytes
    memory = MeasuredMemory(
        weights=weights,
        optimizer=_OPTIMIZER * weights,
        sample=math.fsum(layer.activation_bytes for layer in profile.layers) / samples,
        layers=len(profile.layers),
    )
    supported = SupportedOptions(
        stages=len(profile.layers),
        tensor=True,
        shard=True,
        mesh=True,
        slices=True,
        sliced_stages=True,
        recomputable=True,
    )
    cuts: dict[int, tuple[PlannedStage, ...]] = {}
    plans = []
    for gpus_on_nodes in cluster.sizes():
        gpus = sum(gpus_on_nodes)
        link = cluster.bandwidth(gpus)
        directive = Directive.parse(f"1-{gpus},parallel=hybrid,plan=auto")
        for base in possible_plans(directive, supported, gpus_on_nodes):
            if base.stages not in cuts:
                cuts[base.stages] = _stages(profile, base.stages)
            stages = cuts[base.stages]
            for plan in _variants(base) if stages else ():
                fitting = (
                    variant
                    for variant in (plan, *more_micro_batches(plan, batch))
                    if gpu_bytes is None or memory.gpu_bytes(variant, batch=batch) <= gpu_bytes
                )
                chosen = next(fitting, None)
                if chosen is None:
                    continue
                has_time = link is not None and replace(chosen, accumulation=None).plain
                plans.append(
                    ProfiledPlan(
                        gpus=gpus,
                        plan=chosen,
                        memory_bytes=memory.gpu_bytes(chosen, batch=batch),
                        step_s=_step_s(stages, chosen.replicas, batch / samples, link)
                        if has_time and link
                        else None,
                    )
                )
    return plans


def _doubled(most: int) -> list[int]:
    """Return 1, 2, 4, … below a number, and the number."""
    return [1 << power for power in range((most - 1).bit_length())] + [most]


def _variants(plan: ExecutionPlan) -> Iterator[ExecutionPlan]:
    yield plan
    yield replace(plan, recompute=True)


def _stages(profile: LayerProfile, count: int) -> tuple[PlannedStage, ...]:
    """Return the stages whose slowest takes least time; none: the model has too few layers."""
    try:
        # Without replicas, and with free activations, no link counts.
        return partition(profile, [Level(count, 1.0)], straight=True).stages
    except PipelineError:
        return ()


def _step_s(
    stages: tuple[PlannedStage, ...], replicas: int, minibatches: float, bandwidth: float
) -> float:
    return max(
        stage.compute_s * minibatches / replicas
        + 4 * (replicas - 1) * stage.parameter_bytes / (bandwidth * replicas)
        for stage in stages
    )
