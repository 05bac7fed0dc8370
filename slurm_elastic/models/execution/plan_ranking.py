"""Times of execution plans that were not tried, from a few that were, in the same allocation.

The terms of Rubick's step time (`plan_times`), each with one coefficient that stands for speeds of
links, width and layers, which a running job does not report. With d replicas of s stages and
tensor degree t, m = batch/d samples of a replica, and v = 1.5 with shard=full, else 1:

    T = c1 + c2 m (t-1)/t + c3 m s/t + c4 v (d-1)/d / (s t) + c5 / (s t z)

z is d where replicas divide the state of the optimizer, else 1; c3 is 0 for s = 1. The
coefficients, none below 0, are those of least squared relative errors. All but c1 are drawn towards
0, so that fewer plans than coefficients do.

>>> parse = ExecutionPlan.parse
>>> measured = {parse("8x1"): 1.0, parse("4x1+tensor=2"): 0.8, parse("4x2"): 1.3}
>>> times = predicted_times(measured, [parse("2x4"), parse("2x1+tensor=4")], batch=32)
>>> [round(seconds, 1) for seconds in times.values()]
[2.7, 0.7]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding

#: Weight of the squared coefficients in the fit, which draws them towards 0 (our choice).
_RIDGE = 1e-3
#: Parameters are gathered twice with shard=full, gradients are reduced once.
_GATHERED = 1.5


def predicted_times(
    measured: Mapping[ExecutionPlan, float], plans: Iterable[ExecutionPlan], *, batch: int
) -> dict[ExecutionPlan, float]:
    """Return the predicted time of a step in each plan.

    Args:
        measured: times of plans in the same allocation, at least one, above 0.
        plans: to predict.
        batch: samples of a step.
    """
    scale = sum(measured.values()) / len(measured)
    rows = [
        [term * scale / seconds for term in _terms(plan, batch)]
        for plan, seconds in measured.items()
    ]
    coefficients = _least_squares(rows)
    return {
        plan: scale * sum(c * t for c, t in zip(coefficients, _terms(plan, batch), strict=True))
        for plan in plans
    }


def _terms(plan: ExecutionPlan, batch: int) -> tuple[float, ...]:
    replicas, stages, tensor = plan.replicas, plan.stages, plan.tensor
    samples, parts = batch / replicas, stages * tensor
    volume = _GATHERED if plan.sharding is Sharding.FULL else 1.0
    return (
        1.0,
        samples * (tensor - 1) / tensor,
        samples * stages / tensor if stages > 1 else 0.0,
        volume * (replicas - 1) / replicas / parts,
        1 / (parts if plan.sharding is Sharding.NONE else parts * replicas),
    )


def _least_squares(rows: list[list[float]]) -> list[float]:
    """Return coefficients, none below 0, with which each row's sum is nearest to 1."""
    from scipy.optimize import nnls  # noqa: PLC0415 - seldom needed, and slow

    towards_0 = math.sqrt(_RIDGE) * np.eye(len(rows[0]))[1:]
    matrix = np.vstack([rows, towards_0])
    coefficients, _ = nnls(matrix, np.repeat([1.0, 0.0], [len(rows), len(towards_0)]))
    return [float(c) for c in coefficients]
