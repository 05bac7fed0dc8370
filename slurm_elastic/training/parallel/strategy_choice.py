"""Choice of the strategy that carries a layout out: what ranks share and what they divide. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.training.exchange.exchange_schedule import SLICED
from slurm_elastic.training.parallel.layout_choice import LayoutChoice
from slurm_elastic.training.parallel.plan_settings import PlanSettings


class StrategyKind(enum.Enum):
    """Kinds of strategies, one for each class of `ParallelStrategy`."""

    PIPELINE = enum.auto()
    SLICED = enum.auto()
    FULLY_SHARDED = enum.auto()
    TENSOR = enum.auto()
    SPATIAL = enum.auto()
    DATA = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyChoice:
    """A strategy for an attempt.

    Attributes:
        staged: the model is cut into stages; with schedule="pipedream" also into a single one.
        sharded: replicas divide parameters, gradients and the state of the optimizer.
        sliced: replicas divide the state of the optimizer alone.
        spatial: ranks share samples in space.
        divided: ranks share the weights of layers.
        remark: for the job's log, or "".
    """

    staged: bool = False
    sharded: bool = False
    sliced: bool = False
    spatial: bool = False
    divided: bool = False
    remark: str = ""

    @classmethod
    def of(
        cls,
        layout: LayoutChoice,
        settings: PlanSettings,
        *,
        ranks: int,
        has_layers: bool,
        schedule: str,
        unsupported: str,
    ) -> StrategyChoice:
        """Return the strategy of a layout; the same for the same arguments.

        Args:
            layout: of the attempt.
            settings: of the script, or of the ordered plan.
            ranks: of the attempt.
            has_layers: whether the model can be cut into stages.
            schedule: of stages, as of `init`.
            unsupported: why this torch cannot divide parameters, or "" (`fsdp.unsupported`).
        """
        is_pipedream = schedule == "pipedream"
        staged = layout.staged or (is_pipedream and has_layers)
        divided = layout.tensor > 1
        # A single replica has no other one to divide state with.
        shards = settings.shard and not (staged or layout.spatial) and ranks > layout.tensor
        sharded = shards and not unsupported
        replicated = max(map(len, layout.layout.stages)) > 1
        slices = settings.overlap == SLICED and replicated and not (staged and is_pipedream)
        holder = "replica" if divided else "rank"
        return cls(
            staged=staged,
            sharded=sharded,
            sliced=slices and not (sharded or layout.spatial),
            spatial=layout.spatial,
            divided=divided,
            remark=f"{unsupported}; every {holder} holds the whole model"
            if shards and unsupported
            else "",
        )

    @property
    def kind(self) -> StrategyKind:
        """The kind; a pipeline also divides layers and slices, FSDP and TENSOR one of the two."""
        if self.staged:
            return StrategyKind.PIPELINE
        if self.sliced and not self.divided:
            return StrategyKind.SLICED
        if self.sharded:
            return StrategyKind.FULLY_SHARDED
        if self.divided:
            return StrategyKind.TENSOR
        return StrategyKind.SPATIAL if self.spatial else StrategyKind.DATA

    @property
    def divides_parameters(self) -> bool:
        """Whether ranks hold parts of parameters."""
        return self.sharded or self.divided

    @property
    def sharding(self) -> Sharding:
        """What replicas divide."""
        if self.sharded:
            return Sharding.FULL
        return Sharding.OPTIMIZER if self.sliced else Sharding.NONE


def own_sharding(settings: PlanSettings, *, unsupported: str) -> Sharding:
    """Return the state that several replicas divide by the script's own options.

    Args:
        settings: of the script.
        unsupported: as of `StrategyChoice.of`.
    """
    if settings.shard:
        return Sharding.NONE if unsupported else Sharding.FULL
    return Sharding.OPTIMIZER if settings.overlap == SLICED else Sharding.NONE
