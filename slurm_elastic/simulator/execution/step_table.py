"""Measured step times of one model by execution plan and placement, as Rubick publishes them.

A placement is the GPUs on each node, ascending where a table has it. Look-up as published: the
placement is rotated until it is lexicographically smallest; a plan that was not measured there
counts as plain data parallelism; a placement that was not measured at all is interpolated linearly
over (nodes, GPUs) between the means of all plans.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.policies.execution.plan_options import Placement, PlanOption, useful_options
from slurm_elastic.simulator.workloads.workload import WorkloadError, rows

_COLUMNS = ("exec_plan", "placement", "iter_time")
_OPTIONS = {
    "ga": {},
    "gc": {"recompute": True},
    "zero-dp": {"sharding": Sharding.OPTIMIZER},
    "zero-offload": {"sharding": Sharding.OFFLOAD},
}
_DIGITS = 3


def published_plan(name: str, gpus: int) -> ExecutionPlan:
    """Return the plan of a published name: ga, gc, zero-dp, zero-offload, or three digits.

    >>> str(published_plan("gc", 8)), str(published_plan("248", 64))
    ('8x1+recompute', '8x2+tensor=4')

    Raises:
        WorkloadError: none of these, or digits for another number of GPUs.
    """
    if name in _OPTIONS:
        return ExecutionPlan(LayoutText((gpus,)), **_OPTIONS[name])  # type: ignore[arg-type]
    if len(name) == _DIGITS and name.isascii() and name.isdecimal() and "0" not in name:
        stages, tensor, replicas = map(int, name)
        plan = ExecutionPlan(LayoutText((replicas,) * stages), tensor=tensor)
        if plan.world == gpus:
            return plan
    raise WorkloadError(
        f"exec_plan {name[:40]!r} on {gpus} GPUs is invalid: expected {', '.join(_OPTIONS)}, or"
        " stages, tensor degree and replicas as three digits whose product is the GPUs"
    )


@dataclass(frozen=True)
class StepTable:
    """Step times of one model.

    Attributes:
        model: its name.
        seconds: by placement and plan.
    """

    model: str
    seconds: Mapping[Placement, Mapping[ExecutionPlan, float]]

    @classmethod
    def read(cls, path: Path) -> StepTable:
        """Read one CSV file.

        Raises:
            WorkloadError: unreadable, a column is missing, or a value is invalid.
        """
        seconds: dict[Placement, dict[ExecutionPlan, float]] = defaultdict(dict)
        shape = f"must have {','.join(_COLUMNS)}"
        for line, row in rows(path, _COLUMNS, what="a CSV file of step times", header_line=shape):
            where = f"{path.name}:{line}"
            text = row["placement"]
            if not (text.isascii() and text.isdecimal() and "0" not in text):
                raise WorkloadError(
                    f"{where}: placement {text[:40]!r} is invalid: expected a digit per node"
                )
            placement = tuple(map(int, text))
            try:
                plan = published_plan(row["exec_plan"], sum(placement))
                step_s = float(row["iter_time"])
            except WorkloadError as error:
                raise WorkloadError(f"{where}: {error}") from None
            except ValueError:
                step_s = math.nan
            if not 0 < step_s < math.inf:
                raise WorkloadError(
                    f"{where}: iter_time {row['iter_time'][:40]!r} is invalid: expected seconds"
                )
            # The first row of a pair counts, as published.
            seconds[placement].setdefault(plan, step_s)
        return cls(path.stem, dict(seconds))

    def measured(self, plan: ExecutionPlan, placement: Placement) -> float | None:
        """Return the measured seconds of this very plan, or None."""
        return self.seconds.get(_turned(placement), {}).get(plan)

    def options(self) -> tuple[PlanOption, ...]:
        """Return the measured configurations, without those that are never preferable."""
        return useful_options(
            PlanOption(tuple(sorted(placement, reverse=True)), plan, step_s)
            for placement, by_plan in self.seconds.items()
            for plan, step_s in by_plan.items()
        )

    def step_s(self, plan: ExecutionPlan | None, placement: Placement) -> float:
        """Return the seconds of a step as published; see the module.

        Args:
            plan: None: the mean of all plans.
            placement: GPUs on each node.

        Raises:
            WorkloadError: nothing was measured that it can be interpolated from.
        """
        here = self.seconds.get(_turned(placement), {})
        if plan is not None:
            for candidate in (plan, ExecutionPlan(LayoutText((sum(placement),)))):
                if candidate in here:
                    return here[candidate]
        shape = (len(placement), sum(placement))
        means = self._means()
        step_s = means.get(shape) or _interpolated(means, shape)
        if math.isnan(step_s):
            shown = "".join(map(str, placement))
            raise WorkloadError(f"{self.model}: nothing was measured near placement {shown}")
        return step_s

    def _means(self) -> dict[tuple[int, int], float]:
        groups: dict[tuple[int, int], list[float]] = defaultdict(list)
        for placement, by_plan in self.seconds.items():
            groups[len(placement), sum(placement)].extend(by_plan.values())
        return {shape: math.fsum(times) / len(times) for shape, times in groups.items()}


def _turned(placement: Placement) -> Placement:
    return min(placement[i:] + placement[:i] for i in range(len(placement)))


def _interpolated(means: Mapping[tuple[int, int], float], shape: tuple[int, int]) -> float:
    """Return a linear interpolation, NaN outside of what was measured."""
    from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 - seldom needed, and slow

    return float(LinearNDInterpolator(list(means), list(means.values()))([shape])[0])
