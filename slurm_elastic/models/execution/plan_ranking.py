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

from collections.abc import Iterable, Mapping

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding

#: By which coefficients are drawn towards 0; most sweeps of the search, and the change of a
#: coefficient at which it ends (our choice).
_RIDGE, _SWEEPS, _CHANGE = 1e-3, 500, 1e-5
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
    """Return coefficients, none below 0, with which each row's sum is nearest to 1.

    One coefficient after the other is set to its best value (coordinate descent).
    """
    count = len(rows[0])
    products = [[sum(r[i] * r[j] for r in rows) for j in range(count)] for i in range(count)]
    sums = [sum(r[i] for r in rows) for i in range(count)]
    coefficients = [0.0] * count
    for _ in range(_SWEEPS):
        old = list(coefficients)
        for i in range(count):
            ridge = _RIDGE if i else 0.0
            others = sum(products[i][j] * coefficients[j] for j in range(count) if j != i)
            if products[i][i] + ridge > 0:
                coefficients[i] = max(0.0, (sums[i] - others) / (products[i][i] + ridge))
        if all(abs(a - b) <= _CHANGE for a, b in zip(old, coefficients, strict=True)):
            break
    return coefficients
