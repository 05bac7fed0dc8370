"""Options and present holding of a job: GPUs on nodes, and an execution plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from slurm_elastic.core.execution.execution_plan import ExecutionPlan

#: GPUs on each node.
Placement: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PlanHolding:
    """GPUs and plan of one job.

    Attributes:
        nodes: (node, GPUs there), each node once; empty: nothing.
        plan: execution plan; None: the mean of all plans at that placement, as published.
    """

    nodes: tuple[tuple[int, int], ...] = ()
    plan: ExecutionPlan | None = None

    @property
    def placement(self) -> Placement:
        """GPUs on each node, in this order."""
        return tuple(gpus for _, gpus in self.nodes)

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(self.placement)


#: Holding of a job that waits.
NOTHING_HELD = PlanHolding()


@dataclass(frozen=True, slots=True)
class PlanOption:
    """One way to run a job.

    Attributes:
        placement: GPUs on each node, most first.
        plan: execution plan.
        step_s: seconds of a step.
    """

    placement: Placement
    plan: ExecutionPlan
    step_s: float

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return sum(self.placement)

    def on(self, free: list[int]) -> PlanHolding | None:
        """Return a place on these free GPUs of each node, or None.

        Parts go to the nodes that have the fewest free GPUs of those that suffice.
        """
        nodes: list[tuple[int, int]] = []
        used: set[int] = set()
        for part in self.placement:
            fits = [
                (gpus, node) for node, gpus in enumerate(free) if gpus >= part and node not in used
            ]
            if not fits:
                return None
            _, node = min(fits)
            used.add(node)
            nodes.append((node, part))
        return PlanHolding(tuple(nodes), self.plan)


def useful_options(options: Iterable[PlanOption]) -> tuple[PlanOption, ...]:
    """Return the options without those to which another with the same placement is preferable.

    Also left out are those that are no faster on more GPUs and not on fewer nodes; ascending in
    the GPUs.
    """
    fastest: dict[Placement, PlanOption] = {}
    for option in options:
        known = fastest.get(option.placement)
        if known is None or option.step_s < known.step_s:
            fastest[option.placement] = option
    kept: list[PlanOption] = []
    for option in sorted(fastest.values(), key=lambda o: (o.gpus, o.step_s, o.placement)):
        parts = sorted(option.placement, reverse=True)
        if not any(
            other.step_s <= option.step_s and _fits_within(other.placement, parts) for other in kept
        ):
            kept.append(option)
    return tuple(kept)


def _fits_within(placement: Placement, parts: list[int]) -> bool:
    """Return whether a placement fits wherever these parts fit, largest first."""
    if len(placement) > len(parts):
        return False
    return all(a <= b for a, b in zip(sorted(placement, reverse=True), parts, strict=False))
