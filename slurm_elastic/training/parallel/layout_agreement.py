"""The layout of this attempt, as all ranks agree on it, and whether another would be better by now.

Rank 0 knows what the controller orders and what the checkpoint says; it chooses
(`layouts.choose`) and tells the others. What changes later (an order, layers that
have been measured for the first time) makes it ask for a new attempt.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

from slurm_elastic.core.directive import Directive
from slurm_elastic.core.layout import LayoutText, LayoutTextError
from slurm_elastic.training.job_requests import log_line
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.parallel.layout_choice import AvailableRanks, LayoutChoice, choose
from slurm_elastic.training.parallel.process_group import JOIN_S, RankGroup
from slurm_elastic.training.reporting import Reporter

_KEY = "layout"
#: How long the controller's first orders are waited for, where they may name a layout.
_ORDERS_S = 5.0


class LayoutAgreement:
    """See above. Making it is collective.

    Args:
        rank_group: this rank and the others.
        layers: name, and whether it has parameters, of each; empty: the model cannot be cut.
        directive: the directive as submitted.
        reporter: hears the controller.
        measured: what layers cost, as far as a checkpoint has it.
        share: samples of a step for each rank.

    Attributes:
        choice: the layout.

    Raises:
        ValueError: stages are asked for and cannot be; on all ranks.
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
    ) -> None:
        self._rank_group, self._layers, self._directive, self._reporter = (
            rank_group,
            layers,
            directive,
            reporter,
        )
        self._share = share
        self._seen = ("", "")
        self._profiled = measured is not None
        self._better = False
        self.choice = self._heard() if rank_group.rank else self._chosen(measured)
        if self.choice.remark and rank_group.rank == 0:
            log_line(self.choice.remark)

    def better(self, measured: MeasuredLayers | None) -> bool:
        """Whether to begin anew in another layout; known to rank 0 only.

        Args:
            measured: what layers cost, as known by now.
        """
        if self._rank_group.rank or not self._reporter.connected:
            return False  # nobody would start it again
        orders = self._reporter.orders()
        seen = orders.layout, orders.directive
        # A choice that was made with a profile is not made again with a fresher one.
        first = self.choice.provisional and measured is not None and not self._profiled
        if seen != self._seen or first:
            self._seen, self._profiled = seen, measured is not None
            self._better = not self._premature(orders.layout) and (
                self._choose(measured).text != self.choice.text
            )
        return self._better

    def _premature(self, ordered: str) -> bool:
        """Whether this layout is for the GPUs that the job is about to get."""
        try:
            return bool(ordered) and LayoutText.parse(ordered).world != self._rank_group.size
        except LayoutTextError:
            return True

    def _chosen(self, measured: MeasuredLayers | None) -> LayoutChoice:
        """Rank 0's part."""
        try:
            choice = self._choose(measured, wait_s=_ORDERS_S)
        except ValueError as error:
            self._rank_group.publish(_KEY, json.dumps({"error": str(error)}))
            raise
        orders = self._reporter.orders()
        self._seen = orders.layout, orders.directive
        told = {"text": str(choice.text), "lengths": choice.lengths}
        self._rank_group.publish(_KEY, json.dumps(told))
        return choice

    def _heard(self) -> LayoutChoice:
        """The other ranks' part."""
        told = json.loads(
            self._rank_group.wait_for(_KEY, JOIN_S) or '{"error": "rank 0 chose no layout"}'
        )
        if "error" in told:
            raise ValueError(told["error"])
        return LayoutChoice(LayoutText.parse(told["text"]), tuple(told["lengths"]))

    def _choose(self, measured: MeasuredLayers | None, wait_s: float = 0.0) -> LayoutChoice:
        spread = self._directive is not None and self._directive.parallel != "data"
        orders = self._reporter.orders(wait_s=wait_s if spread else 0.0)
        directive = Directive.parse(orders.directive) if orders.directive else self._directive
        nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        ranks = AvailableRanks(self._rank_group.size, nodes=nodes)
        profile = measured.at(self._share) if measured else None
        return choose(
            ranks, self._layers, directive=directive, ordered=orders.layout, profile=profile
        )
