"""Solver of the integer program of a round (assignment_milp.py states it).

Profit is what a column saves against its job not running. With prices >= 0 for a GPU
of each type, no choice has more profit than the Lagrangian bound (Fisher 1981)

    sum_t price_t room_t  +  sum_j best_j,    best_j = max(0, max_c profit_jc - price_t gpus_c)

and none that contains a column has more than the bound less the column's *regret*,
`best_j - (profit_jc - price_t gpus_c)`. Both hold for any prices, whatever the tolerances of a
linear solver are. So the relaxation is solved over the columns that a sample's prices leave
plausible, and accepted when the bound over all columns meets it (sifting; Bixby et al. 1992);
and branch and bound sees only columns whose regret is smaller than the gap, those of the least
regret first: a small core mostly holds the optimum (Balas and Zemel 1980, Pisinger 1995).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.milp.quiet_highs import QuietHighs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_COLUMN_WISE = 1
_MINIMISE = 1
_LP_TOLERANCE = 1e-9
#: Least value at which a column of the relaxation counts as chosen.
_WHOLE = 1 - 1e-6
#: Most improving moves after rounding.
_MOST_MOVES = 200
_GREEDY_PASSES = 30
#: Smaller gains are the error of a sum.
_GAIN = 1e-12
#: Most rows of a program solved without a sample; else the sample is every n-th row.
_FEW_ROWS = 128
_SAMPLE = 8
#: Search around the prices of a sample: relative range at first, least price relative to the mean,
#: factors by which the range is widened and narrowed, and most repetitions.
_WIDTH = 1.0
_LEAST_DOUBT = 0.25
_WIDER, _NARROWER = 2.0, 0.3
_MOST_SIFTS = 8
_NOTHING = 1e-9
#: Alternatives in the first core, and how many times more in each further one.
_FIRST_CORE = 150
_WIDER_CORE = 4
#: Options for a small core with a good choice known: no heuristics, no restarts.
BRANCHING = {
    "mip_rel_gap": 0.0,
    "mip_heuristic_effort": 0.0,
    "mip_heuristic_run_feasibility_jump": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_rins": False,
    "mip_allow_restart": False,
    "mip_detect_symmetry": False,
}
#: The relaxation may miss its own bound by this part of the gap that is allowed in the end.
_SIFTED = 0.1


@dataclass(frozen=True, eq=False, kw_only=True)
class Columns:
    """Variables of the program, ordered by row; K variables, R rows.

    Attributes:
        row: [K] row of the variable's job, ascending; every row has a variable.
        config, kind, gpus: [K] configuration, its GPU type and its GPUs.
        profit: [K] > 0.
        job: [R] the job of each row.
        room: [T] GPUs to give.
        grain: every choice's profit is a multiple of this, ties aside; 0: of nothing.
        ties: the part of a profit by which ties are decided.
    """

    row: Ints
    config: Ints
    kind: Ints
    gpus: Ints
    profit: Floats
    job: Ints
    room: Floats
    grain: float = 0.0
    ties: float = 0.0

    def used(self, picked: Ints) -> Floats:
        """Return the [T] GPUs that these variables take."""
        kinds, gpus = self.kind[picked], self.gpus[picked]
        used = np.bincount(kinds, weights=gpus, minlength=len(self.room))
        return used.astype(np.float64)

    def only(self, at: Ints, room: Floats) -> Columns:
        """Return these variables alone, rows numbered anew."""
        row = self.row[at]
        first = first_of_rows(row)
        return Columns(
            row=np.repeat(np.arange(len(first)), np.diff(np.r_[first, len(row)])),
            config=self.config[at],
            kind=self.kind[at],
            gpus=self.gpus[at],
            profit=self.profit[at],
            job=self.job[row[first]],
            room=room,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class SearchResult:
    """Picked variables (at most one per row); no choice has more profit than `bound`."""

    picked: Ints
    bound: float
    limit_hit: bool
    how: str


class Clock:
    """Rest of a time limit."""

    def __init__(self, limit_s: float) -> None:
        self._end = time.perf_counter() + limit_s

    @property
    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self._end - time.perf_counter()


def search(columns: Columns, *, offset: float, gap: float, clock: Clock) -> SearchResult:
    """Search until the gap, relative to `offset` - profit, is closed or the time is over."""
    c = columns
    nothing = np.empty(0, dtype=np.int64)
    if not len(c.row):
        return SearchResult(picked=nothing, bound=0.0, limit_hit=False, how="relaxation")
    picked = _greedy(c)
    profit = float(c.profit[picked].sum())
    relaxed = _relax(c, gap * max(abs(offset - profit), 1e-9) * _SIFTED, clock)
    if relaxed is None:
        picked = _greedy(c, passes=_GREEDY_PASSES)
        bound = _bound(c, np.zeros(len(c.room)))
        return SearchResult(picked=picked, bound=bound, limit_hit=True, how="greedy")
    x, prices = relaxed
    regret, best = _regrets(c, prices)
    bound = _worth(c, best, prices)
    rounded = _improve(c, np.flatnonzero(x >= _WHOLE), regret, bound)
    if float(c.profit[rounded].sum()) >= profit:
        picked, profit = rounded, float(c.profit[rounded].sum())
    # The answer's objective lies between these two: the smaller one guarantees the gap.
    allowed = gap * min(abs(offset - profit), abs(offset - bound))
    # Within one grain of the bound there is no better multiple of it.
    allowed = max(allowed, c.grain * (1 - _NOTHING) - 2 * c.ties * profit) + _NOTHING
    method = "relaxation"
    widest = bound - profit - allowed
    alternatives = np.sort(regret[(regret > _GAIN) & (regret <= widest)])
    size, slack = _FIRST_CORE, -math.inf
    while bound - profit > allowed and slack < widest and clock.left > 0:
        slack = float(alternatives[size]) if size < len(alternatives) else widest
        size *= _WIDER_CORE
        # Outside of the core nothing has more profit than outside.
        method, outside = "branch and bound", _worth(c, best, prices) - slack
        core = _restrict(c, regret <= slack, best <= slack)
        if core is not None:
            picked, inside = _branch(c, core, picked, allowed=allowed, clock=clock)
            profit = float(c.profit[picked].sum())
            outside = max(outside, inside)
        bound = min(bound, max(outside, profit))
    is_over = bound - profit > allowed and clock.left <= 0
    return SearchResult(picked=picked, bound=bound, limit_hit=is_over, how=method)


@dataclass(frozen=True, eq=False)
class _Core:
    """Open part: `columns` are the variables `at` of the whole program; `settled` are picked."""

    columns: Columns
    at: Ints
    settled: Ints


def _restrict(c: Columns, near: Bools, idle: Bools) -> _Core | None:
    """Settle rows with one option only; None if what is settled does not fit.

    Args:
        c: the whole program.
        near: [K] variables that remain possible.
        idle: [R] rows that may get nothing.
    """
    options = np.bincount(c.row[near], minlength=len(idle)) + idle
    is_open = (options > 1)[c.row]
    settled = np.flatnonzero(near & ~is_open)
    room = c.room - c.used(settled)
    if (room < 0).any():
        return None
    at = np.flatnonzero(near & is_open)
    return _Core(c.only(at, room), at, settled)


def _relax(c: Columns, tolerance: float, clock: Clock) -> tuple[Floats, Floats] | None:
    """Solve the linear relaxation: [K] values and [T] prices of a GPU; None when time is over.

    The values' profit is within `tolerance` of the bound at these prices, or the program was
    handed to the linear solver as a whole.
    """
    rows = len(c.job)
    if rows > _FEW_ROWS:
        sample = np.flatnonzero(c.row % _SAMPLE == 0)
        guess = _relax(c.only(sample, c.room / _SAMPLE), tolerance, clock)
        if guess is None:
            return None
        _, prices = guess
        near, idle = np.zeros(len(c.row), dtype=np.bool_), np.zeros(rows, dtype=np.bool_)
        width = _WIDTH / np.sqrt(rows / _SAMPLE)
        for _ in range(_MOST_SIFTS):
            regret, best = _regrets(c, prices)
            doubt = width * np.maximum(prices, prices.mean() * _LEAST_DOUBT)[c.kind] * c.gpus
            top = np.maximum.reduceat(np.where(regret <= 0, doubt, 0.0), first_of_rows(c.row))
            near |= regret <= doubt + top[c.row]
            idle |= best <= top
            core = _restrict(c, near, idle)
            width *= _WIDER if core is None else _NARROWER
            if core is None:
                continue
            solution = _linear(core.columns, clock)
            if solution is None:
                return None
            values, prices = solution
            x = np.zeros(len(c.row))
            x[core.at] = values
            x[core.settled] = 1.0
            if _bound(c, prices) - float(c.profit @ x) <= tolerance:
                return x, prices
    return _linear(c, clock)


def _linear(c: Columns, clock: Clock) -> tuple[Floats, Floats] | None:
    """Solve the linear relaxation with HiGHS; None when the time is over."""
    if not len(c.row):
        return np.empty(0), np.zeros(len(c.room))
    if clock.left <= 0:
        return None
    highs = loaded_program(c, clock, integer=False)
    highs.run()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = highs.getSolution()
    x = np.asarray(solution.col_value, dtype=np.float64)
    duals = np.asarray(solution.row_dual, dtype=np.float64)
    return x, np.maximum(-duals[len(c.job) :], 0.0)


def _branch(
    c: Columns, core: _Core, picked: Ints, *, allowed: float, clock: Clock
) -> tuple[Ints, float]:
    """Return the better of `picked` and the core's best, and a bound on profit in the core."""
    highs = loaded_program(core.columns, clock, integer=True)
    for name, value in BRANCHING.items():
        highs.setOptionValue(name, value)
    highs.setOptionValue("mip_abs_gap", allowed / 2)
    if np.isin(core.settled, picked).all():
        start = np.flatnonzero(np.isin(core.at, picked)).astype(np.int32)
        highs.setSolution(len(start), start, np.ones(len(start)))
    highs.run()
    x = np.asarray(highs.getSolution().col_value, dtype=np.float64)
    if len(x) == len(core.at):
        candidate = np.sort(np.r_[core.settled, core.at[x > 0.5]])
        fits = (c.used(candidate) <= c.room).all() and len(first_of_rows(c.row[candidate])) == len(
            candidate
        )
        if fits and c.profit[candidate].sum() > c.profit[picked].sum():
            picked = candidate
    dual = highs.getInfo().mip_dual_bound
    return picked, float(c.profit[core.settled].sum() - dual)


def _greedy(c: Columns, *, passes: int = 1) -> Ints:
    """Pick steps of most profit per further GPU, on the type of a row's first step.

    A pass takes at most one step per row, as far as there is room.
    """
    first = first_of_rows(c.row)
    at = np.full(len(c.job), -1, dtype=np.int64)
    free = c.room.copy()
    for _ in range(passes):
        current = at[c.row]
        runs = current >= 0
        gain = c.profit - np.where(runs, c.profit[current], 0.0)
        extra = c.gpus - np.where(runs, c.gpus[current], 0)
        useful = (gain > _GAIN) & (extra > 0) & (extra <= free[c.kind])
        useful &= ~runs | (c.kind[current] == c.kind)
        density = np.where(useful, gain / np.maximum(extra, 1), 0.0)
        best = np.maximum.reduceat(density, first)
        steps = np.flatnonzero(useful & (density >= best[c.row]))
        steps = steps[first_of_rows(c.row[steps])]
        steps = steps[np.argsort(-density[steps], kind="stable")]
        for kind in range(len(free)):
            of_type = steps[c.kind[steps] == kind]
            of_type = of_type[np.cumsum(extra[of_type]) <= free[kind]]
            at[c.row[of_type]] = of_type
            free[kind] -= extra[of_type].sum()
        if not len(steps):
            break
    return at[at >= 0]


def _improve(c: Columns, picked: Ints, regret: Floats, bound: float) -> Ints:
    """Use the remaining GPUs for the moves that gain most, one at a time.

    Columns whose regret exceeds what rounding lost cannot improve the choice.
    """
    at = np.full(len(c.job), -1, dtype=np.int64)
    at[c.row[picked]] = picked
    free = c.room - c.used(picked)
    near = np.flatnonzero(regret <= bound - float(c.profit[picked].sum()))
    row, kind, gpus, profit = c.row[near], c.kind[near], c.gpus[near], c.profit[near]
    for _ in range(_MOST_MOVES if len(near) else 0):
        current = at[row]
        runs = current >= 0
        gain = profit - np.where(runs, c.profit[current], 0.0)
        given_back = np.where(runs & (c.kind[current] == kind), c.gpus[current], 0)
        gain[gpus - given_back > free[kind]] = 0.0
        best = int(np.argmax(gain))
        if gain[best] <= _GAIN:
            break
        old = current[best]
        if old >= 0:
            free[c.kind[old]] += c.gpus[old]
        free[kind[best]] -= gpus[best]
        at[row[best]] = near[best]
    return at[at >= 0]


def _regrets(c: Columns, prices: Floats) -> tuple[Floats, Floats]:
    """Return [K] the loss of each variable against the best of its row, and [R] that best."""
    scores = c.profit - prices[c.kind] * c.gpus
    best = np.maximum(np.maximum.reduceat(scores, first_of_rows(c.row)), 0.0)
    return best[c.row] - scores, best


def _worth(c: Columns, best: Floats, prices: Floats) -> float:
    return float(best.sum() + prices @ c.room)


def _bound(c: Columns, prices: Floats) -> float:
    """Return the Lagrangian bound."""
    return _worth(c, _regrets(c, prices)[1], prices)


def first_of_rows(row: Ints) -> Ints:
    """Return the index at which each row begins, of rows in ascending order."""
    return np.flatnonzero(np.r_[True, row[1:] != row[:-1]]) if len(row) else row


def loaded_program(c: Columns, clock: Clock, *, integer: bool) -> highspy.Highs:
    """Return HiGHS with the program loaded: a row per job, then a row per GPU type."""
    highs = QuietHighs()
    highs.setOptionValue("threads", 1)
    # Presolving takes longer than solving a relaxation, but pays for branching.
    highs.setOptionValue("presolve", "on" if integer else "off")
    highs.setOptionValue("time_limit", max(clock.left, 1e-3))
    highs.setOptionValue("primal_feasibility_tolerance", _LP_TOLERANCE)
    highs.setOptionValue("dual_feasibility_tolerance", _LP_TOLERANCE)
    count, rows, kinds = len(c.row), len(c.job), len(c.room)
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
        np.r_[np.ones(rows), c.room],
        np.arange(0, 2 * count, 2, dtype=np.int32),
        index,
        value,
        np.full(count, int(integer), dtype=np.int32),
    )
    return highs
