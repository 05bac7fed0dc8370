"""Speeds of a job's execution plans, as its reports tell them. Pure.

>>> speeds = PlanSpeeds()
>>> for speed in (90.0, 100.0, 110.0):
...     count = speeds.add(("a100", 4, 1), 64, "2x1+tensor=2", speed)
>>> speeds.is_measured(("a100", 4, 1), "2x1+tensor=2"), speeds.medians(("a100", 4, 1), 64)
(True, {'2x1+tensor=2': 100.0})
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from slurm_elastic.controller.state.trials.plan_memory_record import AllocationShape
from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.execution.plan_gains import PlanGain, PlanGains, PlanKind, PlanSpeed

#: Reports that tell the speed of a plan, and the most of which the median counts (our choice).
REPORTS, _RECENT = 3, 5
#: Pairs of an allocation and a plan that are kept.
_MOST = 128

#: Allocation, samples of a step, text of the plan.
_Key: TypeAlias = tuple[str, int, int, int, str]


@dataclass(slots=True)
class PlanSpeeds:
    """Speeds of one job's plans.

    Attributes:
        samples_per_s: reported speeds by allocation, batch and text of the plan ("": the job's own
            choice), the latest last.
    """

    samples_per_s: dict[_Key, list[float]] = field(default_factory=dict)

    def add(self, shape: AllocationShape, batch: int, text: str, speed: float) -> int:
        """Add a reported speed (samples/s); return how many are kept of its plan."""
        key = *shape, batch, text
        recent = [*self.samples_per_s.pop(key, []), speed][-_RECENT:]
        self.samples_per_s[key] = recent
        while len(self.samples_per_s) > _MOST:
            del self.samples_per_s[next(iter(self.samples_per_s))]
        return len(recent)

    def reports(self, shape: AllocationShape, text: str) -> int:
        """Return the number of reports of a plan's speed, for the batch that has most."""
        return max(
            (len(v) for k, v in self.samples_per_s.items() if (k[:3], k[4]) == (shape, text)),
            default=0,
        )

    def is_measured(self, shape: AllocationShape, text: str) -> bool:
        """Return whether enough reports tell the speed of a plan in an allocation."""
        return self.reports(shape, text) >= REPORTS

    def medians(self, shape: AllocationShape, batch: int) -> dict[str, float]:
        """Return the samples/s of each plan that was measured in an allocation with a batch."""
        return {
            key[4]: statistics.median(speeds)
            for key, speeds in self.samples_per_s.items()
            if (key[:3], key[3]) == (shape, batch) and len(speeds) >= REPORTS
        }

    def measured(self) -> tuple[PlanSpeed, ...]:
        """Return the speed of each plan in each allocation in which it was measured."""
        return tuple(
            PlanSpeed(gpu_type, gpus, nodes, text, statistics.median(speeds))
            for (gpu_type, gpus, nodes, _, text), speeds in self.samples_per_s.items()
            if len(speeds) >= REPORTS
        )

    def gains(self, stand_ins: Mapping[AllocationShape, str]) -> PlanGains | None:
        """Return the gain of each kind of plan that was measured; None: none was.

        Args:
            stand_ins: by allocation, texts of the plans in place of the job's own choice.
        """
        rows: dict[tuple[AllocationShape, PlanKind], PlanGain] = {}
        for (gpu_type, gpus, nodes, batch, text), speeds in self.samples_per_s.items():
            own_text = stand_ins.get((gpu_type, gpus, nodes), "")
            own = self.samples_per_s.get((gpu_type, gpus, nodes, batch, own_text), [])
            if text not in ("", own_text) and min(len(speeds), len(own)) >= REPORTS:
                kind = PlanKind.of(ExecutionPlan.parse(text))
                gain = round(statistics.median(speeds) / statistics.median(own), 2)
                rows[(gpu_type, gpus, nodes), kind] = PlanGain(gpu_type, gpus, nodes, kind, gain)
        return PlanGains(tuple(rows.values())) if rows else None

    def kinds(self) -> Iterator[PlanKind]:
        """Yield the kinds of plans in which the program has trained."""
        for *_, text in self.samples_per_s:
            if text:
                yield PlanKind.of(ExecutionPlan.parse(text))

    def to_rows(self) -> list[list[Any]]:
        """Return JSON for the ledger."""
        return [[*key, speeds] for key, speeds in self.samples_per_s.items()]

    @classmethod
    def from_rows(cls, rows: Iterable[Any]) -> PlanSpeeds:
        """Return it from the ledger's JSON.

        Raises:
            TypeError, ValueError, IndexError, KeyError, ExecutionPlanError: it is unreadable.
        """
        speeds = cls()
        for row in rows:
            gpu_type, gpus, nodes, batch, text = row[:5]
            key = str(gpu_type), int(gpus), int(nodes), int(batch), str(text)
            if key[4]:
                ExecutionPlan.parse(key[4])
            speeds.samples_per_s[key] = [float(v) for v in row[5]]
        return speeds
