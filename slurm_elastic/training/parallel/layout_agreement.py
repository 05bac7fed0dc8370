"""Agreement of all ranks on the layout of an attempt, and detection of a better one.

Rank 0 has the controller's order and the layer profile of the checkpoint; it
chooses (`layout_choice.choose`) and publishes the choice. A later order, or
layers that have been measured for the first time, make it request a restart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.execution_plan import ExecutionPlan, ExecutionPlanError
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.core.report import Orders
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.parallel.layout_choice import AvailableRanks, LayoutChoice, choose
from slurm_elastic.training.ranks.process_group import JOIN_S, RankGroup
from slurm_elastic.training.reporting import Reporter

_KEY = "layout"
#: Seconds for which the controller's first orders are awaited if they may name stages.
_ORDERS_S = 5.0


class LayoutAgreement:
    """Layout of an attempt; the constructor is collective.

    Args:
        rank_group: all ranks.
        layers: name, and whether it has parameters, of each; empty: the model cannot be cut.
        directive: the submitted one.
        reporter: source of the controller's orders.
        measured: profile of the layers from a checkpoint, or None.
        share: samples of a step for each rank.
        space, tensor, undivided: as of `choose`.

    Attributes:
        choice: the layout.

    Raises:
        ValueError: stages are required and the model cannot be cut; on all ranks.
    """

    def __init__(
        self,
        rank_group: RankGroup,
        layers: Sequence[tuple[str, bool]],
        *,
        directive: Directive | None,
        reporter: Reporter,
        measured: MeasuredLayers | None,
        share: int,
        space: int = 0,
        tensor: int = 1,
        undivided: str = "",
    ) -> None:
        self._rank_group, self._layers, self._directive, self._reporter = (
            rank_group,
            layers,
            directive,
            reporter,
        )
        self._share, self._space, self._tensor = share, space, tensor
        self._undivided = undivided
        self._seen = ("", "", "")
        self._profiled = measured is not None
        self._better = False
        if rank_group.joins:
            self.resize()
        else:
            self.choice = self._received() if rank_group.rank else self._chosen(measured)
        if self.choice.remark and rank_group.rank == 0:
            log_line(self.choice.remark)
        if self.choice.plan and rank_group.rank == 0:
            log_line(f"plan {self.choice.plan}, as ordered")

    @property
    def may_be_staged(self) -> bool:
        """Whether the directive allows stages or spatial groups."""
        return self._directive is not None and self._directive.parallel != "data"

    def resize(self) -> None:
        """Follow the group of ranks: as many replicas as it has ranks."""
        self.choice = LayoutChoice(LayoutText((self._rank_group.size,)))

    def better(self, measured: MeasuredLayers | None) -> bool:
        """Return whether to restart in another layout; False on other ranks than 0.

        Args:
            measured: the newest profile of the layers, or None.
        """
        if self._rank_group.rank or not self._reporter.connected:
            return False  # without esrun nothing would start the program again
        orders = self._reporter.orders()
        requested = orders.layout, orders.plan, orders.directive
        # A choice that was made with a profile is not repeated with a newer one.
        first = self.choice.provisional and measured is not None and not self._profiled
        if requested != self._seen or first:
            self._seen, self._profiled = requested, measured is not None
            ordered = orders.plan or orders.layout
            chosen = self.choice if self._premature(ordered) else self._choose(measured, orders)
            self._better = (chosen.text, chosen.plan) != (self.choice.text, self.choice.plan)
        return self._better

    def _premature(self, ordered: str) -> bool:
        """Return whether this plan is for another number of GPUs, such as the next one."""
        try:
            return bool(ordered) and ExecutionPlan.parse(ordered).world != self._rank_group.size
        except ExecutionPlanError:
            return True

    def _chosen(self, measured: MeasuredLayers | None) -> LayoutChoice:
        """Choose and publish the layout, on rank 0."""
        try:
            orders = self._first_orders()
            choice = self._choose(measured, orders)
        except ValueError as error:
            self._publish({"error": str(error)})
            raise
        self._seen = orders.layout, orders.plan, orders.directive
        message = {
            "text": str(choice.text),
            "lengths": choice.lengths,
            "spatial": choice.spatial,
            "tensor": choice.tensor,
            "plan": str(choice.plan or ""),
        }
        self._publish(message)
        return choice

    def _publish(self, message: Mapping[str, Any]) -> None:
        self._rank_group.publish(self._rank_group.prefix + _KEY, json.dumps(message))

    def _received(self) -> LayoutChoice:
        """Return the layout that rank 0 has published."""
        message = json.loads(
            self._rank_group.wait_for(self._rank_group.prefix + _KEY, JOIN_S)
            or '{"error": "rank 0 chose no layout"}'
        )
        if "error" in message:
            raise ValueError(message["error"])
        return LayoutChoice(
            LayoutText.parse(message["text"]),
            tuple(message["lengths"]),
            spatial=message["spatial"],
            tensor=message["tensor"],
            plan=ExecutionPlan.parse(message["plan"]) if message["plan"] else None,
        )

    def _first_orders(self) -> Orders:
        """Return the orders for an attempt that begins.

        Where only a plan of one stage may come, the controller's answer is not waited for: once it
        is there, the ranks start again, and esrun then has it.
        """
        if self.may_be_staged:
            return self._reporter.orders(wait_s=_ORDERS_S)
        return self._reporter.read_orders()

    def _choose(self, measured: MeasuredLayers | None, orders: Orders) -> LayoutChoice:
        directive = Directive.parse(orders.directive) if orders.directive else self._directive
        ranks = AvailableRanks(self._rank_group.size, nodes=self._rank_group.nodes)
        profile = measured.at(self._share) if measured else None
        return choose(
            ranks,
            self._layers,
            directive=directive,
            ordered=orders.plan or orders.layout,
            profile=profile,
            space=self._space,
            tensor=self._tensor,
            undivided=self._undivided,
        )
