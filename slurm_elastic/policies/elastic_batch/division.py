"""Exact division of GPUs among jobs: a dynamic program, vectorised over GPUs.

After "Effective Elastic Scaling of Deep Learning Workloads" (MASCOTS 2020, arXiv 2006.13878):

    P(0, k) = 0;   P(j, k) = max over g of P(j-1, k-g) + v[j, g];   sizes by trace-back

with v[j, g] the value of g GPUs to job j, -inf where it cannot run on so many. Every job gets GPUs;
GPUs may be left over.

Ours is how it is computed. Every job's least is taken off first, so that only what is left over is
divided: W + 1 states instead of K + 1. Rows that are concave from their least on are merged by
sorting their marginal gains, which is exact for them, whatever their number. The other rows are
added one by one, each step one addition and one argmax over (states x sizes of the row).

>>> rows = np.array([[-np.inf, 1.0, 1.5, 1.8], [-np.inf, 1.0, 1.9, 2.7]])
>>> division = divide(rows, 4)
>>> division.gpus.tolist(), round(division.value, 6)
([1, 3], 3.7)
>>> divide(rows, 1) is None
True
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Elements of the largest array of one step.
_BLOCK = 1 << 21


@dataclass(frozen=True, slots=True, eq=False)
class Division:
    """An optimal division.

    Attributes:
        gpus: (jobs,) GPUs of each job.
        value: sum of their values.
    """

    gpus: Ints
    value: float


def divide(rows: Floats, capacity: int) -> Division | None:
    """Return the best division; of equal ones the same each time.

    Args:
        rows: (jobs, sizes + 1) value of 0, 1, 2, ... GPUs to each job; -inf: it cannot run
            so. No GPUs at all (column 0) are never given.
        capacity: GPUs that there are.

    Returns:
        None when not every job can have its least.

    Raises:
        ValueError: a value is NaN or +inf.
    """
    rows = np.asarray(rows, dtype=np.float64)
    if not len(rows):
        return Division(np.zeros(0, dtype=np.int64), 0.0)
    if np.isnan(rows).any() or np.isposinf(rows).any():
        raise ValueError("rows: a value is NaN or infinite; write -inf where a job cannot run")
    possible = np.isfinite(rows[:, 1:])
    if not possible.any(axis=1).all():
        return None
    least = possible.argmax(axis=1) + 1
    left = int(capacity) - int(least.sum())
    if left < 0:
        return None
    most = possible.shape[1] - possible[:, ::-1].argmax(axis=1)
    left = min(left, int((most - least).sum()))
    # One more GPU per column, from each job's least on; -inf beyond its most.
    width = min(left, int((most - least).max()))
    at = least[:, None] + np.arange(width + 1)
    extra = np.where(
        at < rows.shape[1],
        np.take_along_axis(rows, np.minimum(at, rows.shape[1] - 1), axis=1),
        -np.inf,
    )
    more, value = _extra(extra, left)
    return Division(least + more, value)


def _extra(extra: Floats, left: int) -> tuple[Ints, float]:
    """Return (jobs,) GPUs beyond each job's least, at most `left` in all, and the sum of values."""
    concave = _concave(extra)
    merged = np.flatnonzero(concave)
    not_concave = np.flatnonzero(~concave)
    total, owners = _merge(extra[merged], left)
    choices = np.zeros((len(not_concave), left + 1), dtype=np.int32)
    for i, row in enumerate(not_concave):
        total, choices[i] = _add(total, extra[row])
    k = int(total.argmax())
    value = float(total[k])
    more = np.zeros(len(extra), dtype=np.int64)
    for i in range(len(not_concave) - 1, -1, -1):
        more[not_concave[i]] = choices[i, k]
        k -= int(choices[i, k])
    if len(merged):
        more[merged] = np.bincount(owners[:k], minlength=len(merged))
    return more, value


def _concave(extra: Floats) -> NDArray[np.bool_]:
    """Return (jobs,) whether a row has no gap and its gains do not rise with each further GPU."""
    finite = np.isfinite(extra)
    contiguous = (finite[:, 1:] <= finite[:, :-1]).all(axis=1)
    with np.errstate(invalid="ignore"):
        gains = np.diff(extra, axis=1)
        falling = (gains[:, 1:] <= gains[:, :-1]) | ~finite[:, 2:]
    return np.asarray(contiguous & falling.all(axis=1))


def _merge(extra: Floats, left: int) -> tuple[Floats, Ints]:
    """Merge concave rows: values of 0..left GPUs, and the job that gets each further GPU."""
    total = np.full(left + 1, -np.inf)
    total[0] = extra[:, 0].sum()
    finite = np.isfinite(extra[:, 1:])
    with np.errstate(invalid="ignore"):
        gains = np.diff(extra, axis=1)
    owners, steps = np.nonzero(finite)
    values = gains[owners, steps]
    # Equal gains of one row keep their order, so no later GPU comes before an earlier one.
    order = np.lexsort((steps, owners, -values))[:left]
    values, owners = values[order], owners[order]
    total[1 : len(values) + 1] = total[0] + np.cumsum(values)
    return total, owners


def _add(total: Floats, row: Floats) -> tuple[Floats, NDArray[np.int32]]:
    """Add a job: the best sums, and its GPUs in each; of equal ones the fewest."""
    sizes = np.flatnonzero(np.isfinite(row))
    span = int(sizes[-1])
    padded = np.concatenate([np.full(span, -np.inf), total])
    windows = np.lib.stride_tricks.sliding_window_view(padded, span + 1)[:, ::-1]
    values = row[sizes]
    dense = len(sizes) == span + 1
    out = np.empty_like(total)
    chosen = np.empty(len(total), dtype=np.int32)
    block = max(1, _BLOCK // len(sizes))
    for begin in range(0, len(total), block):
        part = windows[begin : begin + block]
        sums = part + values if dense else part[:, sizes] + values
        best = sums.argmax(axis=1)
        out[begin : begin + block] = np.take_along_axis(sums, best[:, None], axis=1)[:, 0]
        chosen[begin : begin + block] = sizes[best]
    return out, chosen
