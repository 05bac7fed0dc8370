"""Choice of an attempt's layout: replicas and stages on its ranks.

The controller's order applies, if it is for this number of ranks; else the
directive's `parallel` is the rule:

    data      every rank holds the whole model
    pipeline  as many stages as there are ranks
    hybrid    with `unit=N`, N stages and as many replicas of them as fit; without, what
              PipeDream's partitioner (`models.pipedream`) finds best for the layer profile
              of former attempts, and data parallel as long as there is none
    spatial   with `unit=N`, groups of N ranks that share each sample; without, one group of all

Stages are cut so that the slowest takes least time (our definition, where the
partitioner does not cut).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import (
    ExecutionPlan,
    ExecutionPlanError,
    Sharding,
)
from slurm_elastic.core.layers import LayerProfile
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.training.pipeline import StageLayout

if TYPE_CHECKING:
    from slurm_elastic.models.pipedream.partitioner import Level

#: Bytes/s of a port, each way, within a node and between nodes; set by a site.
BANDWIDTH_VARIABLE = "SLURM_ELASTIC_BANDWIDTH"
#: PCIe, and 10 Gbit/s Ethernet.
_BANDWIDTHS = (10e9, 1.25e9)


@dataclass(frozen=True, slots=True)
class AvailableRanks:
    """Ranks of an attempt.

    Attributes:
        world_size: their number.
        nodes: number of nodes, with equally many ranks on each.
    """

    world_size: int
    nodes: int = 1

    def levels(self, environment: Mapping[str, str] | None = None) -> list[Level]:
        """Return the hierarchy of links for the partitioner.

        Raises:
            ValueError: `BANDWIDTH_VARIABLE` is invalid.
        """
        from slurm_elastic.models.pipedream.partitioner import Level  # noqa: PLC0415 - not for every start

        text = (os.environ if environment is None else environment).get(BANDWIDTH_VARIABLE, "")
        try:
            within, between = map(float, text.split(",")) if text else _BANDWIDTHS
        except ValueError:
            raise ValueError(
                f"{BANDWIDTH_VARIABLE}: {text!r} is invalid: expected two numbers of bytes/s,"
                " within a node and between nodes, e.g. 1e10,1e9"
            ) from None
        # The published costs add what goes in and what goes out, as if they took turns.
        inner, outer = 2 * within, 2 * between
        if self.nodes <= 1 or self.world_size % self.nodes:
            return [Level(self.world_size, inner if self.nodes <= 1 else outer)]
        each = self.world_size // self.nodes
        return [Level(each, inner)] * (each > 1) + [Level(self.nodes, outer)]


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """A layout for an attempt.

    Attributes:
        text: of the layout.
        lengths: layers of each part of the model, in order; empty for one part.
        remark: for the job's log, or "".
        provisional: another will be chosen once the layers have been measured.
        spatial: ranks share samples in space, or would if a group had more than one.
        tensor: ranks that share the weights of layers; each rank of `text` stands for so many.
        plan: execution plan that was ordered, if it has options; None: none was.
    """

    text: LayoutText
    lengths: tuple[int, ...] = ()
    remark: str = ""
    provisional: bool = False
    spatial: bool = False
    tensor: int = 1
    plan: ExecutionPlan | None = None

    def used_plan(self, sharding: Sharding) -> ExecutionPlan | None:
        """Return the execution plan as far as it is known; None: the layout says it all.

        Args:
            sharding: what replicas divide.
        """
        if self.plan is None and self.tensor > 1:
            return ExecutionPlan(self.text, tensor=self.tensor, sharding=sharding)
        return self.plan

    @property
    def staged(self) -> bool:
        """Whether some rank holds only a part of the model."""
        return self.text.stages > 1

    @property
    def layout(self) -> StageLayout:
        """Which ranks hold which stage."""
        return StageLayout(StageLayout.of(*self.text.replicas).stages * self.text.chunks)


def choose(
    ranks: AvailableRanks,
    layers: Sequence[tuple[str, bool]],
    *,
    directive: Directive | None,
    ordered: str = "",
    profile: LayerProfile | None = None,
    space: int = 0,
    tensor: int = 1,
    undivided: str = "",
) -> LayoutChoice:
    """Return the layout of an attempt; the same for the same arguments.

    Args:
        ranks: of the attempt.
        layers: name, and whether it has parameters, of each layer in order; empty: the model
            cannot be cut.
        directive: the one in force.
        ordered: text of a layout or execution plan from the controller; "": none.
        profile: of the model; None: unknown.
        space: ranks of a spatial group that the script asks for; 0: none.
        tensor: ranks that share the weights of layers as the script asks for; 1: it does not.
        undivided: why layers cannot be divided among ranks, or "".

    Raises:
        ValueError: the directive requires stages, and the model cannot be cut; or the script asks
            for spatial groups, and the directive or the number of ranks does not allow them.
    """
    parallel = directive.parallel if directive else "spatial" if space else "data"
    if space and parallel != "spatial":
        raise ValueError(
            f"spatial: groups of {space} ranks are invalid with parallel={parallel} in the"
            f" directive: expected parallel=spatial,unit={space}"
        )
    choice, remark = _as_ordered(
        ordered, ranks, layers, profile, spatial=parallel == "spatial", undivided=undivided
    )
    if choice is not None:
        return choice
    if parallel == "spatial":
        return _in_space(ranks, directive, space, remark)
    if parallel == "data" or ranks.world_size == 1:
        return _in_groups(ranks, tensor, remark, undivided)
    if not layers:
        raise ValueError(
            f"model: parallel={parallel} in the directive needs layers in order: expected an"
            " nn.Sequential or [(name, module), ...]; pass that to init, or use parallel=data"
        )
    unit = _unit(directive, ranks.world_size) if directive else 1
    if parallel == "pipeline" or unit > 1:
        stages = ranks.world_size if parallel == "pipeline" else unit
        most = min(stages, len(layers))
        stages = next(s for s in range(most, 0, -1) if ranks.world_size % s == 0)
        return _cut(LayoutText((ranks.world_size // stages,) * stages), layers, profile, remark)
    choice = _partitioned(ranks, layers, profile)
    return replace(choice, remark=remark or choice.remark)


def _as_ordered(
    ordered: str,
    ranks: AvailableRanks,
    layers: Sequence[tuple[str, bool]],
    profile: LayerProfile | None,
    *,
    spatial: bool,
    undivided: str,
) -> tuple[LayoutChoice | None, str]:
    """Return the layout that the controller has ordered, or None and why it is not possible."""
    if not ordered:
        return None, ""
    try:
        plan = ExecutionPlan.parse(ordered)
    except ExecutionPlanError as error:
        return None, f"{error}; the order is ignored"
    ignored = plan.obstacle_to_training()
    if ignored and plan.tensor == 1:
        remark = f"plan {plan}: {ignored}; its options are ignored"
        plan = ExecutionPlan(plan.layout)
    elif ignored or (plan.tensor > 1 and undivided):
        return None, f"plan {plan}: {ignored or undivided}; the order is ignored"
    else:
        remark = ""
    text = plan.layout
    parts = text.stages * text.chunks
    name = f"layout {text}" if plan.plain else f"plan {plan}"
    if plan.world != ranks.world_size:
        remark = f"{name} is for {plan.world} GPUs, these are {ranks.world_size}"
    elif parts > 1 if spatial else text.space > 1:
        remark = f"{name} is for another value of parallel in the directive"
    elif parts > max(1, len(layers)):
        remark = f"{name} needs {parts} layers, the model has {len(layers) or 1}"
    else:
        return replace(
            _cut(text, layers, profile, remark),
            spatial=spatial,
            tensor=plan.tensor,
            plan=None if plan.plain else plan,
        ), ""
    return None, f"{remark}; the order is ignored"


def _in_groups(ranks: AvailableRanks, tensor: int, remark: str, undivided: str) -> LayoutChoice:
    """Return replicas, each of which is one rank, or as many as the script asks for."""
    data = LayoutChoice(LayoutText((ranks.world_size,)), remark=remark)
    if tensor == 1 or ranks.world_size == 1:
        return data
    if undivided or ranks.world_size % tensor:
        reason = undivided or f"{ranks.world_size} ranks are no multiple of it"
        remark = f"{remark}; " if remark else ""
        return replace(data, remark=f"{remark}tensor={tensor}: {reason}; each rank is a replica")
    return replace(data, text=LayoutText((ranks.world_size // tensor,)), tensor=tensor)


def _in_space(
    ranks: AvailableRanks, directive: Directive | None, space: int, remark: str
) -> LayoutChoice:
    """Return spatial groups of the directive's unit, of the script's size, or of all ranks.

    Raises:
        ValueError: the ranks are no multiple of it.
    """
    unit = _unit(directive, ranks.world_size) if directive else space
    if unit == 1:
        unit = space or ranks.world_size
    unit = min(unit, ranks.world_size)  # fewer ranks than a group has: one group
    if ranks.world_size % unit:
        raise ValueError(
            f"spatial: groups of {unit} ranks are invalid for {ranks.world_size} ranks: expected a"
            " multiple; start so many, or cut samples over fewer"
        )
    text = LayoutText((ranks.world_size // unit,), space=unit)
    return LayoutChoice(text, remark=remark, spatial=True)


def balanced(costs: Sequence[float], parts: int) -> tuple[int, ...]:
    """Return lengths of consecutive parts, none empty, whose largest sum of costs is least.

    >>> balanced([1, 1, 1, 5, 1], 3)
    (3, 1, 1)
    """
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    size = len(costs)
    best = np.where(np.arange(size + 1) > 0, ends, np.inf)
    cuts = []
    for _ in range(parts - 1):
        # [i, j]: the parts so far end at i, the next one at j.
        worst = np.maximum(best[:, None], ends[None, :] - ends[:, None])
        worst[np.tril_indices(size + 1)] = np.inf
        cuts.append(worst.argmin(axis=0))
        best = worst.min(axis=0)
    end, lengths = size, []
    for cut in reversed(cuts):
        lengths.append(end - int(cut[end]))
        end = int(cut[end])
    return (end, *reversed(lengths))


def _unit(directive: Directive, world_size: int) -> int:
    """Return the GPUs of a replica; of units by GPU type, the largest that divides the ranks."""
    units = [directive.unit or 1, *(count for _, count in directive.units)]
    return max(unit for unit in (1, *units) if world_size % unit == 0)


def _cut(
    text: LayoutText,
    layers: Sequence[tuple[str, bool]],
    profile: LayerProfile | None,
    remark: str = "",
) -> LayoutChoice:
    parts = text.stages * text.chunks
    if parts == 1:
        return LayoutChoice(text, remark=remark)
    measured = _matching(profile, layers)
    if measured is not None:
        costs = [layer.forward_s + layer.backward_s for layer in measured.layers]
    else:
        # Layers without parameters cost almost nothing.
        costs = [1.0 if has else 1e-3 for _, has in layers]
    return LayoutChoice(text, balanced(costs, parts), remark)


def _partitioned(
    ranks: AvailableRanks, layers: Sequence[tuple[str, bool]], profile: LayerProfile | None
) -> LayoutChoice:
    """Return the partitioner's choice, or data parallel where there is none."""
    from slurm_elastic.models.pipedream.partitioner import (  # noqa: PLC0415 - not for every start
        PipelineError,
        partition,
    )

    data = LayoutText((ranks.world_size,))
    measured = _matching(profile, layers)
    if measured is None:
        remark = "hybrid: data parallel until the layers have been measured"
        return LayoutChoice(data, remark=remark, provisional=True)
    try:
        plan = partition(measured, ranks.levels(), compression=1.0)
    except PipelineError as error:
        return LayoutChoice(data, remark=f"hybrid: data parallel ({error})")
    text = LayoutText(tuple(stage.replicas for stage in plan.stages))
    gain = plan.data_parallel_time_s / plan.pipeline_time_s
    return LayoutChoice(
        text,
        tuple(len(stage.layers) for stage in plan.stages) if text.stages > 1 else (),
        f"hybrid: {text}, predicted to be {gain:.2f} times as fast as {data}",
    )


def _matching(
    profile: LayerProfile | None, layers: Sequence[tuple[str, bool]]
) -> LayerProfile | None:
    """Return the profile if it is of these layers, else None."""
    if profile is None or [layer.name for layer in profile.layers] != [n for n, _ in layers]:
        return None
    return profile
