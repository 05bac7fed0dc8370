"""Plans in which a program has failed, and those that were to blame for it. Pure.

A start that fails before its first measured step may do so for its plan, for its size or for
another reason. So its plan is in *doubt* at first: it is not tried again in that allocation. It is
*blamed*, and not tried in other allocations either, once the program trains in the same allocation
in another plan. It is not blamed if the program has failed there in another plan, too, or has
trained elsewhere in a plan of that kind.

>>> failures = PlanFailures()
>>> failures.doubt(("a100", 4, 1), "2x1+tensor=2")
>>> failures.excludes(("a100", 4, 1), PlanKind(tensor=2)), failures.blamed
(True, set())
>>> failures.excludes(("a100", 2, 1), PlanKind(tensor=2))
False
>>> failures.blame(("a100", 4, 1), trained=[])
True
>>> failures.excludes(("a100", 2, 1), PlanKind(tensor=2))
True
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.state.trials.plan_memory_record import AllocationShape
from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.core.execution.plan_gains import PlanKind

#: Allocations, and plans of each, that are kept.
_MOST_SHAPES, _MOST_PLANS = 64, 32


@dataclass(slots=True)
class PlanFailures:
    """Failures of one job's plans.

    Attributes:
        doubtful: by allocation: texts of plans in which the program failed there, the latest last,
            and whether they may be to blame.
        blamed: kinds of plans that were to blame.
    """

    doubtful: dict[AllocationShape, dict[str, bool]] = field(default_factory=dict)
    blamed: set[PlanKind] = field(default_factory=set)

    def doubt(self, shape: AllocationShape, text: str) -> None:
        """Record that a start in a plan has failed in an allocation."""
        self._add(shape, text, may_be_blamed=True)

    def _add(self, shape: AllocationShape, text: str, *, may_be_blamed: bool) -> None:
        plans = self.doubtful.pop(shape, {}) | {text: may_be_blamed}
        self.doubtful[shape] = dict(list(plans.items())[-_MOST_PLANS:])
        while len(self.doubtful) > _MOST_SHAPES:
            del self.doubtful[next(iter(self.doubtful))]

    def record_other_cause(self, shape: AllocationShape) -> None:
        """Record that the failures in an allocation may have another cause than their plans.

        The program has failed there in a plan that had worked, too, or in its own choice.
        """
        for text in self.in_doubt(shape):
            self.doubtful[shape][text] = False

    def blame(self, shape: AllocationShape, trained: Iterable[PlanKind]) -> bool:
        """Blame the plans in doubt in an allocation, as the program trains there in another one.

        Args:
            shape: the allocation.
            trained: kinds of plans in which the program has ever trained.

        Returns:
            Whether there are any.
        """
        plans = self.doubtful.get(shape, {})
        kinds = {PlanKind.of(ExecutionPlan.parse(text)) for text in plans if plans[text]}
        if kinds <= self.blamed:
            return False
        # Whole replicas are the kind of the job's own choice, and of what stands in for it.
        blamed = kinds - {*trained, PlanKind()} - self.blamed
        self.blamed |= blamed
        return bool(blamed)

    def in_doubt(self, shape: AllocationShape) -> tuple[str, ...]:
        """Return the texts of the plans in doubt in an allocation."""
        return tuple(self.doubtful.get(shape, ()))

    def excludes(self, shape: AllocationShape, kind: PlanKind) -> bool:
        """Return whether plans of a kind are not to be tried in an allocation."""
        doubtful = (PlanKind.of(ExecutionPlan.parse(text)) for text in self.in_doubt(shape))
        return kind in self.blamed or kind in doubtful

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {
            "doubtful": [
                [*shape, text, may_be_blamed]
                for shape, plans in self.doubtful.items()
                for text, may_be_blamed in plans.items()
            ],
            "failed": [[k.stages, k.tensor, k.sharding.value] for k in self.blamed],
        }

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> PlanFailures:
        """Return it from the ledger's JSON.

        Raises:
            TypeError, ValueError, ExecutionPlanError: it is unreadable.
        """
        failures = cls()
        for gpu_type, gpus, nodes, text, may_be_blamed in body.get("doubtful", ()):
            ExecutionPlan.parse(text)
            shape = str(gpu_type), int(gpus), int(nodes)
            failures._add(shape, text, may_be_blamed=may_be_blamed is True)
        for stages, tensor, sharding in body.get("failed", ()):
            failures.blamed.add(PlanKind(int(stages), int(tensor), Sharding(sharding)))
        return failures
