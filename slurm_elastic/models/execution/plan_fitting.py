"""Fit of `plan_times` to a few measured plans of one model.

The published measure: the sum of three root mean squared errors of logarithms, of backward pass
with exchange, optimizer, and step. The search is L-BFGS-B from the published start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.models.execution.plan_times import (
    ModelWork,
    PassCounts,
    PlanCoefficients,
    PlanLinks,
    PlanStepParts,
    step_parts,
)
from slurm_elastic.models.optimiser import Bounds, minimize

#: Start of the search and lower bounds, in the order of `PlanCoefficients`.
_START = (1.5, 1.0, 0.001, 1.0, 1.0, 1.0, 1.0)
_LOWER = (1.0, 1.0, 1e-8, 1e-8, 1e-8, 0.0, 0.0)
_MOST_BACKWARD = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPlan:
    """Times of one plan.

    Attributes:
        plan: the plan.
        work: of the model.
        forward_ms: as of `step_parts`.
        inside: whether all replicas are on one node.
        threads: of the CPU, per GPU.
        measured: times.
        counts: as of `step_parts`.
    """

    plan: ExecutionPlan
    work: ModelWork
    forward_ms: float
    inside: bool
    measured: PlanStepParts
    threads: int = 1
    counts: PassCounts | None = None

    def predicted(self, coefficients: PlanCoefficients, links: PlanLinks) -> PlanStepParts:
        """Return the times that the model predicts."""
        return step_parts(
            self.plan,
            self.work,
            forward_ms=self.forward_ms,
            coefficients=coefficients,
            links=links,
            inside=self.inside,
            threads=self.threads,
            counts=self.counts,
        )


def fit(points: Sequence[MeasuredPlan], links: PlanLinks) -> PlanCoefficients:
    """Return the coefficients at the minimum of the published measure.

    Args:
        points: measured plans of one model, at least one.
        links: of the cluster.

    Raises:
        ValueError: no point, or a time that is not positive.
    """
    if not points:
        raise ValueError("points: none; expected at least one measured plan")
    for point in points:
        if not min(astuple(point.measured)) > 0:
            raise ValueError(f"plan {point.plan}: times must be above 0: {point.measured}")
    result = minimize(
        lambda theta: objective(points, links, PlanCoefficients(*theta.tolist())),
        np.array(_START),
        method="L-BFGS-B",
        jac="3-point",
        bounds=Bounds(np.array(_LOWER), np.array([_MOST_BACKWARD] + [np.inf] * 6)),
    )
    return PlanCoefficients(*np.maximum(result.x, _LOWER).tolist())


def objective(
    points: Sequence[MeasuredPlan], links: PlanLinks, coefficients: PlanCoefficients
) -> float:
    """Return the published measure of these coefficients; see the module."""
    squares = [0.0, 0.0, 0.0]
    for point in points:
        predicted = astuple(point.predicted(coefficients, links))
        for index, (ours, theirs) in enumerate(
            zip(predicted, astuple(point.measured), strict=True)
        ):
            squares[index] += math.log(ours / theirs) ** 2
    return math.fsum(math.sqrt(square / len(points)) for square in squares)


def relative_error(predicted_ms: float, measured_ms: float) -> float:
    """Return the relative error of one plan: |predicted - measured| / measured."""
    return abs(predicted_ms - measured_ms) / measured_ms
