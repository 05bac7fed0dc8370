"""Price of a GPU of each type, in seconds of one job's life per GPU second.

The price is the worth of a GPU to the other jobs; it bounds the GPUs whose gain for a job exceeds
their price (value_terms.py). `[goodput] price` is the price of the slowest type. A type on which
the jobs of the round run faster costs as many times more, unless `[goodput] prices` names it. Half
or twice all prices changes completion times by less than 1 % (docs/goodput-figures.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from slurm_elastic.policies.sia.round_arrays import Floats, RoundArrays


def type_prices(arrays: RoundArrays, price: float, stated: Mapping[str, float]) -> Floats:
    """Return the [T] price of each type of the round's configurations.

    Args:
        arrays: of the round.
        price: of the slowest type.
        stated: by type; these are not derived.
    """
    columns = arrays.configurations
    prices = price * _relative_speeds(arrays)
    for kind, name in enumerate(columns.types):
        if name in stated:
            prices[kind] = stated[name]
    return prices


def _relative_speeds(arrays: RoundArrays) -> Floats:
    """Return the [T] goodput per GPU of the smallest size on each type; the slowest counts 1.

    Geometric means over the jobs, each relative to the job's own mean over types, so that a job
    counts the same whatever the unit of its goodput.
    """
    columns = arrays.configurations
    types = len(columns.types)
    logs = np.full((len(arrays.candidates), types), np.nan)
    for kind in range(types):
        (of_kind,) = np.nonzero(columns.kind == kind)
        if not len(of_kind) or not len(logs):
            continue
        of_kind = of_kind[np.argsort(columns.gpus[of_kind], kind="stable")]
        valid = arrays.valid[:, of_kind]
        rows = np.flatnonzero(valid.any(axis=1))
        smallest = of_kind[valid[rows].argmax(axis=1)]
        logs[rows, kind] = np.log(arrays.goodput[rows, smallest] / columns.gpus[smallest])
    known = ~np.isnan(logs)
    several = known.sum(axis=1) > 1
    if not several.any():
        return np.ones(types)
    logs, known = logs[several], known[several]
    values = np.where(known, logs, 0.0)
    centred = np.where(known, values - (values.sum(axis=1) / known.sum(axis=1))[:, None], 0.0)
    count = known.sum(axis=0)
    mean = centred.sum(axis=0) / np.maximum(count, 1)
    if (count > 0).any():
        mean[count == 0] = mean[count > 0].min()
    return np.asarray(np.exp(mean - mean.min()))
