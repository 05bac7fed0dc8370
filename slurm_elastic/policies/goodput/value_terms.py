"""Terms of the program of policy `goodput`, as arrays of jobs by configurations.

With a price of a GPU of each type (type_prices.py), job j in a configuration of k GPUs costs
`1 + price k` per second: its own waiting, and what others could do with the GPUs. So

    lambda_j = min_c (1 + price_c k_c) / goodput_jc

is the least cost of one unit of its work, and `u_jc = lambda_j goodput_jc` what it gains per second
in c, in seconds of its life. The program maximises `sum_j w_j (u_jc f_jc)^p / p`: f is what is left
of the gain after the cost of the change, w the weight of a job whose length is known.
"""

from __future__ import annotations

import numpy as np

from slurm_elastic.policies.sia.round_arrays import Bools, Floats, RoundArrays

#: Remaining seconds of a job at which the weight of short jobs is 1, and the fewest that count.
_WEIGHT_ONE_S = 3600.0
_FEWEST_S = 60.0
#: GPUs per job from which on lengths count in part only.
_GPUS_PER_JOB = 4.0


def unit_values(arrays: RoundArrays, prices: Floats) -> Floats:
    """Return lambda [J]: the least cost of a unit of each job's work."""
    columns = arrays.configurations
    cost = 1.0 + prices[columns.kind] * columns.gpus
    with np.errstate(divide="ignore", invalid="ignore"):
        per_unit = np.where(arrays.valid, cost[None, :] / arrays.goodput, np.inf)
    least = per_unit.min(axis=1, initial=np.inf)
    least[~np.isfinite(least)] = 1.0
    return np.asarray(least)


def gains(arrays: RoundArrays, values: Floats) -> Floats:
    """Return u [J, C]: gain per second in each configuration, 0 where not valid."""
    return np.asarray(np.where(arrays.valid, arrays.goodput, 0.0) * values[:, None])


def crowding(jobs: int, gpus: int) -> float:
    """Return how much lengths count: 1 where there are few GPUs per job, less where many.

    Where nothing queues, short jobs that come first gain little, and the longest end later.
    """
    return min(1.0, _GPUS_PER_JOB * jobs / max(gpus, 1))


def age_factors(by_age: Floats, age_s: Floats, change_s: Floats, price: Floats) -> Floats:
    """Return [J, C] Sia's restart factors, less the price of the GPUs that a change leaves idle.

    A change of S seconds to k GPUs costs the job S seconds, and others k GPUs for as long:
    `(T - N S) / (T + S (1 + price k))` in place of Sia's `(T - N S) / (T + S)`.

    Args:
        by_age: [J] Sia's factors.
        age_s: [J] seconds since each job was submitted, T.
        change_s: [J] seconds that a change takes, S; 0 for the first start.
        price: [C] of all GPUs of each configuration.
    """
    age = np.maximum(age_s, 0.0)
    lived = np.maximum(age + change_s, 1e-9)[:, None]
    return np.asarray(by_age[:, None] * lived / (lived + change_s[:, None] * price[None, :]))


def payback_factors(
    arrays: RoundArrays, remaining: Floats, change_s: Floats, payback_s: float
) -> Floats:
    """Return [J, C] the part of the gain that is left when a change has to pay back.

    That is within `payback_s`, or within the time that the job would still run, if that is
    shorter: `H / (H + S)`.

    Args:
        arrays: of the round.
        remaining: [J] work left; NaN: unknown, only `payback_s` counts.
        change_s: [J] seconds that a change takes.
        payback_s: the longest that counts.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        left = np.where(arrays.goodput > 0, remaining[:, None] / arrays.goodput, np.inf)
    horizon = np.fmin(payback_s, np.maximum(left, 1e-3))
    return np.asarray(horizon / (horizon + change_s[:, None]))


def weights(values: Floats, remaining: Floats, *, power: float) -> Floats:
    """Return w [J]: above 1 for jobs with less than an hour left, below 1 for longer ones.

    Args:
        values: lambda.
        remaining: [J] work left; NaN: unknown, the weight is 1.
        power: how much more short jobs count; 0: not at all.
    """
    seconds = np.maximum(remaining * values, _FEWEST_S)
    return np.asarray(np.where(np.isnan(seconds), 1.0, (seconds / _WEIGHT_ONE_S) ** -power))


def hysteresis(factors: Floats, arrays: RoundArrays, part: float) -> Floats:
    """Return the factors less `part` of them for all changes; 1 for what jobs hold."""
    rows = np.flatnonzero(arrays.held >= 0)
    factors = factors * (1.0 - part)
    factors[rows, arrays.held[rows]] = 1.0
    return factors


def selected(first: Floats, second: Floats, rows: Bools) -> Floats:
    """Return the rows of `second` where `rows` is set, else those of `first`."""
    return np.asarray(np.where(rows[:, None], second, first))
