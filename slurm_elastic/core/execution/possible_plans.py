"""Execution plans that a job may run in, by its directive and what its training can carry out.

>>> from slurm_elastic.core.directive import Directive
>>> from slurm_elastic.core.execution.supported_options import SupportedOptions
>>> job = Directive.parse("2-8,parallel=hybrid,plan=auto")
>>> able = SupportedOptions(stages=4, tensor=True)
>>> [str(plan) for plan in possible_plans(job, able, (2, 2))]
['4x1', '2x2', '2x1+tensor=2', '1x4', '1x2+tensor=2']
>>> able = SupportedOptions(tensor=True, shard=True, mesh=True)
>>> [str(plan) for plan in possible_plans(Directive.parse("2-8,plan=auto"), able, (2, 2))]
['4x1+shard=full', '2x1+tensor=2', '2x1+tensor=2+shard=full']
>>> able = SupportedOptions(tensor=True, slices=True)
>>> [str(plan) for plan in possible_plans(Directive.parse("2-8,plan=auto"), able, (2, 2))]
['2x1+tensor=2', '2x1+tensor=2+shard=optimizer']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.core.execution.supported_options import TENSOR_DEGREES, SupportedOptions
from slurm_elastic.core.layout import LayoutText

#: Most stages of plans that are tried (our choice).
_MOST_STAGES = 8
#: Micro-batches beyond the first of plans that need less memory (our choice).
_ACCUMULATIONS = (1, 3, 7, 15, 31, 63)


def possible_plans(
    directive: Directive, supported: SupportedOptions, gpus_on_nodes: Sequence[int]
) -> tuple[ExecutionPlan, ...]:
    """Return the plans for an allocation, those with the smallest replicas first.

    Ranks that share weights are on one node. Options that the training's own script asks for are
    kept.

    Args:
        directive: in force.
        supported: what the training can carry out.
        gpus_on_nodes: GPUs of the allocation on each of its nodes.
    """
    gpus = sum(gpus_on_nodes)
    hybrid = directive.parallel in ("hybrid", "pipeline")
    most = min(supported.stages, _MOST_STAGES) if hybrid else 1
    degrees = (1, *TENSOR_DEGREES) if supported.tensor else (1,)
    shapes = sorted(
        (
            (count, degree)
            for count in range(1, most + 1)
            for degree in degrees
            if gpus % (count * degree) == 0 and all(g % degree == 0 for g in gpus_on_nodes)
        ),
        key=lambda shape: (shape[0] * shape[1], shape[1]),
    )
    plans = []
    for count, tensor in shapes:
        layout = LayoutText((gpus // (count * tensor),) * count)
        # A layout alone leaves every option to the script.
        plan = ExecutionPlan(layout, tensor, recompute=supported.recompute and tensor > 1)
        plans.append(plan)
        if count * tensor > 1 and plan.replicas > 1:
            with_options = replace(plan, recompute=supported.recompute)
            divisions = _divisions(supported, count, tensor)
            plans += [replace(with_options, sharding=sharding) for sharding in divisions]
    if supported.shard and gpus > 1:
        layout = LayoutText((gpus,))
        sharded = ExecutionPlan(layout, sharding=Sharding.FULL, recompute=supported.recompute)
        plans.insert(1, sharded)
    return tuple(p for p in plans if not p.obstacle_to_training() and not misfit(p, directive))


def _divisions(supported: SupportedOptions, stages: int, tensor: int) -> list[Sharding]:
    """Return the sharding options of replicas with these stages and this tensor degree.

    The sharding that the script itself chooses is left out.
    """
    able = {Sharding.OPTIMIZER: supported.slices, Sharding.FULL: supported.mesh}
    own_tensor = supported.own_tensor
    if stages > 1:
        able, own_tensor = {Sharding.OPTIMIZER: supported.sliced_stages}, 1
    own = supported.own_sharding if own_tensor == tensor else Sharding.NONE
    return [sharding for sharding, can in able.items() if can and sharding is not own]


def own_plan(directive: Directive, supported: SupportedOptions, gpus: int) -> ExecutionPlan:
    """Return the plan that the training chooses itself, as far as that is known.

    Stages that its partitioner chooses are not: it counts as one of whole replicas, which need most
    memory.

    Args:
        directive: in force.
        supported: what the training can carry out, and chooses.
        gpus: of the allocation.
    """
    stages = 1
    if directive.parallel == "pipeline":
        stages = gpus
    elif directive.parallel == "hybrid":
        stages = directive.unit or 1
    stages = next(s for s in range(max(1, min(stages, supported.stages)), 0, -1) if gpus % s == 0)
    tensor = supported.own_tensor if stages == 1 and gpus % supported.own_tensor == 0 else 1
    sliced_stages = supported.sliced_stages and supported.own_sharding is Sharding.OPTIMIZER
    divides = gpus > stages * tensor and (stages == 1 or sliced_stages)
    return ExecutionPlan(
        LayoutText((gpus // (stages * tensor),) * stages),
        tensor,
        sharding=supported.own_sharding if divides else Sharding.NONE,
        recompute=supported.recompute,
    )


@dataclass(frozen=True, slots=True)
class PlanCandidates:
    """Plans for one allocation.

    Attributes:
        directive, supported, gpus_on_nodes: as of `possible_plans`.
    """

    directive: Directive
    supported: SupportedOptions
    gpus_on_nodes: tuple[int, ...]

    @property
    def own(self) -> ExecutionPlan:
        """Plan that the training chooses itself: see `own_plan`."""
        return own_plan(self.directive, self.supported, sum(self.gpus_on_nodes))

    @property
    def faster(self) -> tuple[ExecutionPlan, ...]:
        """Plans that may be faster than the job's own choice: see `possible_plans`."""
        return possible_plans(self.directive, self.supported, self.gpus_on_nodes)

    def smaller(self, batch: int) -> Iterator[ExecutionPlan]:
        """Return plans that may need less memory than the job's own choice.

        These are the job's own and the faster ones, with recomputation and with more micro-batches.

        Args:
            batch: samples of a step.

        >>> job = PlanCandidates(Directive.parse("1-2,plan=auto"), SupportedOptions(), (2,))
        >>> [str(plan) for plan in job.smaller(8)]
        ['2x1+accumulation=1', '2x1+accumulation=3']
        """
        own = self.own
        for base in (own, *self.faster):
            for recompute in {base.recompute, base.recompute or self.supported.recomputable}:
                whole = replace(base, recompute=recompute)
                for plan in (whole, *more_micro_batches(whole, batch)):
                    impossible = plan.obstacle_to_training() or misfit(plan, self.directive)
                    if plan != own and not impossible:
                        yield plan


def more_micro_batches(plan: ExecutionPlan, batch: int) -> Iterator[ExecutionPlan]:
    """Return a plan with 2, 4, … micro-batches of a replica, at most as many as it has samples.

    Args:
        plan: its own accumulation does not count.
        batch: samples of a step.
    """
    share = -(-batch // plan.replicas)
    for count in _ACCUMULATIONS:
        if count < share:
            yield replace(plan, accumulation=count)


def misfit(plan: ExecutionPlan, directive: Directive) -> str:
    """Return why a job of this directive can never run in this plan, or ""."""
    layout, mode = plan.layout, f"layout {plan}: parallel={directive.parallel}"
    if directive.parallel != "spatial" and layout.space > 1:
        return f"{mode} has no spatial groups; add --elastic=...,parallel=spatial"
    if directive.parallel == "data" and (layout.stages > 1 or plan.plain):
        return f"{mode} always runs as GPUs x 1; add --elastic=...,parallel=hybrid"
    if directive.parallel == "pipeline" and max(layout.replicas) > 1:
        return f"{mode} has one replica: write 1x{layout.world}, or use parallel=hybrid"
    if directive.parallel == "spatial" and layout.stages > 1:
        return f"{mode} has no stages: write Rx1sN, R groups of N GPUs, or use parallel=hybrid"
    types = directive.types or (*(name for name, _ in directive.units), "")
    units = [directive.unit_for(name) for name in types if directive.allows(plan.world, name)]
    if not units:
        return f"layout {plan} needs {plan.world} GPUs, which --elastic={directive} rules out"
    replica = layout.stages * plan.tensor if layout.even else 0
    if directive.parallel == "hybrid" and not {1, replica}.intersection(units):
        return f"layout {plan}: unit={units[0]} asks for replicas of {units[0]} GPUs"
    if directive.parallel == "spatial" and not {1, layout.space}.intersection(units):
        return f"layout {plan}: unit={units[0]} asks for groups of {units[0]} GPUs"
    return ""
