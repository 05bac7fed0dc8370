"""Settings of `init` that follow from an ordered execution plan.

A layout alone leaves options to the script. A plan with options replaces all of them: what it does
not name is off, but for the accumulation.
"""

from __future__ import annotations

from typing import NamedTuple

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.training.exchange.exchange_schedule import SLICED


class PlanSettings(NamedTuple):
    """Arguments of `init` that a plan may replace.

    Attributes:
        shard: replicas divide parameters.
        overlap: of the exchange of gradients.
        recompute: activations are computed again.
        tensor: ranks that share the weights of layers, where no layout is ordered.
        micro_batch: most samples through the model at once; None: all of a rank's share.
    """

    shard: bool
    overlap: str
    recompute: bool
    micro_batch: int | None
    tensor: int = 1

    def under(self, plan: ExecutionPlan | None, *, global_batch: int) -> PlanSettings:
        """Return the settings that a plan asks for.

        Args:
            plan: None: none was ordered.
            global_batch: samples of a step.
        """
        if plan is None or plan.plain:
            return self
        overlap = "none" if self.overlap == SLICED else self.overlap
        if plan.sharding is Sharding.OPTIMIZER:
            overlap = SLICED
        micro_batch = self.micro_batch
        if plan.accumulation is not None:
            share = -(-global_batch // plan.replicas)
            micro_batch = -(-share // (plan.accumulation + 1))
        return PlanSettings(
            plan.sharding is Sharding.FULL, overlap, plan.recompute, micro_batch, plan.tensor
        )
