"""How the integer program of a round is solved (program.py states it).

In terms of profit, which is what a column saves against its job not running.
`bound` is an upper bound of the profit: the Lagrangian bound
`sum_t price_t room_t + sum_j max(0, max_c profit_jc - price_t gpus_c)`, which holds for any
prices >= 0 (Fisher 1981), so it is right whatever the linear solver's tolerances are.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_COLUMN_WISE = 1
_MINIMISE = 1
_LP_TOLERANCE = 1e-9
#: A column of the relaxation counts as chosen from here on.
_WHOLE = 1 - 1e-6
#: Most improving moves after rounding.
_MOST_MOVES = 200


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """Variables of the program, ordered by row; K variables, R rows.

    Attributes:
        row: [K] row of the variable's job, ascending; every row has a variable.
        config, kind, gpus: [K] configuration, its GPU type and its GPUs.
        profit: [K] > 0.
        job: [R] the job of each row.
        room: [T] GPUs to give.
    """

    row: Ints
    config: Ints
    kind: Ints
    gpus: Ints
    profit: Floats
    job: Ints
    room: Ints


@dataclass(frozen=True, eq=False, kw_only=True)
class Found:
    """Picked variables (at most one per row), and no choice has more profit than `bound`."""

    picked: Ints
    bound: float
    limit_hit: bool
    how: str


class Search:
    """One search; its clock starts when it is made."""

    def __init__(self, columns: Columns, *, time_limit_s: float) -> None:
        self._columns = columns
        self._end = time.perf_counter() + time_limit_s
        self._first = np.flatnonzero(np.r_[True, columns.row[1:] != columns.row[:-1]])

    def run(self, *, offset: float, gap: float) -> Found:
        """Search until the gap, relative to `offset` - profit, is closed."""
        c = self._columns
        if not len(c.row):
            return Found(picked=np.empty(0, np.int64), bound=0.0, limit_hit=False, how="relaxation")
        if self._left() <= 0:
            picked = self._improve(np.empty(0, np.int64))
            bound = self._bound(np.zeros(len(c.room)))
            return Found(picked=picked, bound=bound, limit_hit=True, how="greedy")
        x, prices = self._relaxation()
        picked = self._improve(np.flatnonzero(x >= _WHOLE))
        profit = float(c.profit[picked].sum())
        bound = self._bound(prices)
        allowed = gap * max(abs(offset - profit), 1e-9)
        if bound - profit <= allowed:
            return Found(picked=picked, bound=bound, limit_hit=False, how="relaxation")
        return self._branch(picked, prices, bound, allowed)

    def _left(self) -> float:
        return self._end - time.perf_counter()

    def _scores(self, prices: Floats) -> tuple[Floats, Floats]:
        """[K] profit less the price of the GPUs; [R] the best of each row, at least 0."""
        c = self._columns
        scores = c.profit - prices[c.kind] * c.gpus
        return scores, np.maximum(np.maximum.reduceat(scores, self._first), 0.0)

    def _bound(self, prices: Floats) -> float:
        _, best = self._scores(prices)
        return float(best.sum() + prices @ self._columns.room)

    def _relaxation(self) -> tuple[Floats, Floats]:
        """The linear relaxation: [K] values and [T] prices of a GPU."""
        c = self._columns
        highs = _highs(self._left())
        _pass(highs, c, len(c.job), integer=False)
        highs.run()
        solution = highs.getSolution()
        x = np.asarray(solution.col_value, dtype=np.float64)
        duals = np.asarray(solution.row_dual, dtype=np.float64)
        if len(x) != len(c.row) or len(duals) != len(c.job) + len(c.room):
            return np.zeros(len(c.row)), np.zeros(len(c.room))
        return x, np.maximum(-duals[len(c.job) :], 0.0)

    def _improve(self, picked: Ints) -> Ints:
        """Give what is left to the moves that gain most, one move at a time."""
        c = self._columns
        at = np.full(len(c.job), -1, dtype=np.int64)
        at[c.row[picked]] = picked
        free = c.room - np.bincount(
            c.kind[picked], weights=c.gpus[picked], minlength=len(c.room)
        ).astype(np.int64)
        for _ in range(max(_MOST_MOVES, len(c.job)) if not len(picked) else _MOST_MOVES):
            now = at[c.row]
            gain = c.profit - np.where(now >= 0, c.profit[now], 0.0)
            back = np.where((now >= 0) & (c.kind[now] == c.kind), c.gpus[now], 0)
            gain[c.gpus - back > free[c.kind]] = 0.0
            best = int(np.argmax(gain))
            if gain[best] <= 1e-12:
                break
            old = at[c.row[best]]
            if old >= 0:
                free[c.kind[old]] += c.gpus[old]
            free[c.kind[best]] -= c.gpus[best]
            at[c.row[best]] = best
        return at[at >= 0]

    def _branch(self, picked: Ints, prices: Floats, bound: float, allowed: float) -> Found:
        """Branch and bound over the columns that could still be part of something better."""
        c = self._columns
        profit = float(c.profit[picked].sum())
        highs = _highs(self._left())
        highs.setOptionValue("mip_rel_gap", 0.0)
        highs.setOptionValue("mip_abs_gap", allowed)
        _pass(highs, c, len(c.job), integer=True)
        highs.setSolution(len(picked), picked.astype(np.int32), np.ones(len(picked)))
        highs.run()
        x = np.asarray(highs.getSolution().col_value, dtype=np.float64)
        better = np.flatnonzero(x > 0.5) if len(x) == len(c.row) else picked
        if float(c.profit[better].sum()) > profit and self._fits(better):
            picked = better
        info = highs.getInfo()
        bound = min(bound, -float(info.mip_dual_bound))
        done = highs.getModelStatus() == highspy.HighsModelStatus.kOptimal
        return Found(picked=picked, bound=bound, limit_hit=not done, how="branch and bound")

    def _fits(self, picked: Ints) -> bool:
        c = self._columns
        used = np.bincount(c.kind[picked], weights=c.gpus[picked], minlength=len(c.room))
        return bool((used <= c.room).all()) and len(np.unique(c.row[picked])) == len(picked)


def _highs(time_limit_s: float) -> highspy.Highs:
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("threads", 1)
    highs.setOptionValue("presolve", "off")
    highs.setOptionValue("time_limit", max(time_limit_s, 1e-3))
    highs.setOptionValue("primal_feasibility_tolerance", _LP_TOLERANCE)
    highs.setOptionValue("dual_feasibility_tolerance", _LP_TOLERANCE)
    return highs


def _pass(highs: highspy.Highs, c: Columns, rows: int, *, integer: bool) -> None:
    """Hand the program over: a row per job, then a row per GPU type."""
    count, kinds = len(c.row), len(c.room)
    index = np.empty(2 * count, dtype=np.int32)
    index[0::2], index[1::2] = c.row, rows + c.kind
    value = np.ones(2 * count)
    value[1::2] = c.gpus
    highs.passModel(
        count,
        rows + kinds,
        2 * count,
        _COLUMN_WISE,
        _MINIMISE,
        0.0,
        -c.profit,
        np.zeros(count),
        np.ones(count),
        np.full(rows + kinds, -highspy.kHighsInf),
        np.r_[np.ones(rows), c.room.astype(np.float64)],
        np.arange(0, 2 * count, 2, dtype=np.int32),
        index,
        value,
        np.full(count, int(integer), dtype=np.int32),
    )
