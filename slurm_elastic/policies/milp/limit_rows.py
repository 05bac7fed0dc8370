"""Limits on sums over some of a program's jobs, and the search that keeps to them.

Limits of Slurm's accounting and shares of the site (`core.cluster.Limit`) cap GPUs, nodes, CPUs or
memory of a set of jobs. They seldom bind, so the program is solved without them first
(milp_solver.py). Where its answer exceeds one, it is solved again with a row for each limit that
can bind: linear relaxation, rounding, and branch and bound over the variables of the least regret,
as there. The answer is at least as good as the first one with jobs made smaller until it fits.

The relaxation splits a job per GPU type, and one more per limit. So the distance from the optimum
that need not be closed is as many times as large as there are types and limits for each type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.milp import milp_solver
from slurm_elastic.policies.milp.milp_solver import Clock, Columns, SearchResult

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: A sum above its limit by no more than this is the error of a sum.
_TOLERANCE = 1e-6
#: Least value at which a variable of the relaxation counts as chosen.
_WHOLE = 1 - 1e-6
#: Variables in the first core of branch and bound, and how many times more in each further one.
_FIRST_CORE, _WIDER_CORE = 150, 4
#: Most variables of a relaxation with limits; with more, the first answer is made smaller.
_MOST_COLUMNS = 30_000


@dataclass(frozen=True, eq=False, kw_only=True)
class LimitRow:
    """A limit over M of a program's jobs.

    Attributes:
        jobs: [M] rows of the jobs, ascending.
        use: [M, C] what each of them takes in each configuration, >= 0.
        left: most that they may take together.
    """

    jobs: Ints
    use: Floats
    left: float

    def used(self, choice: Ints) -> float:
        """Return what a choice takes: [J] configuration of every job of the program, -1: none."""
        chosen = choice[self.jobs]
        (runs,) = np.nonzero(chosen >= 0)
        return float(self.use[runs, chosen[runs]].sum())

    def exceeded(self, choice: Ints) -> bool:
        """Return whether a choice takes more than is left."""
        return self.used(choice) > self.left + _TOLERANCE

    def beside(self, fixed: Ints) -> float:
        """Return what jobs that are fixed to a configuration leave to others, not below 0."""
        return max(0.0, self.left - self.used(fixed))


@dataclass(frozen=True, eq=False)
class _ColumnLimit:
    """A limit over variables.

    Attributes:
        rows: of the jobs that it counts.
        at: variables that take something of it, ascending.
        row: index into `rows` of each.
        use: what each takes.
        left: what they may take together.
    """

    rows: Ints
    at: Ints
    row: Ints
    use: Floats
    left: float

    def used(self, picked: Bools) -> float:
        """Return what a choice takes: [K] whether each variable is picked."""
        return float(self.use[picked[self.at]].sum())

    def exceeded(self, picked: Bools) -> bool:
        return self.used(picked) > self.left + _TOLERANCE

    @property
    def can_bind(self) -> bool:
        """Whether its rows could take more than is left."""
        most = np.zeros(len(self.rows))
        np.maximum.at(most, self.row, self.use)
        return float(most.sum()) > self.left + _TOLERANCE

    def only(self, core: Ints) -> _ColumnLimit:
        """Return the limit over these variables alone, numbered anew; `core` ascending."""
        inside = np.isin(self.at, core)
        at = np.searchsorted(core, self.at[inside])
        return _ColumnLimit(self.rows, at, self.row[inside], self.use[inside], self.left)


def within_limits(
    c: Columns,
    result: SearchResult,
    limits: Sequence[LimitRow],
    *,
    fixed: Ints,
    allowed: float,
    clock: Clock,
) -> SearchResult:
    """Return the result of a search, or one that keeps to the limits if that does not.

    Args:
        c: variables of the program.
        result: of a search without limits.
        limits: of the program.
        fixed: [J] configurations of the jobs that are no part of the variables, -1: the others.
        allowed: distance from the optimum that need not be closed.
        clock: rest of the time; when it is over, the answer is the first one made smaller.
    """
    if not len(c.row):
        return result
    of_columns = [_column_limit(c, limit, fixed) for limit in limits]
    binding = [limit for limit in of_columns if limit.can_bind]
    chosen = _mask(c, result.picked)
    if not any(limit.exceeded(chosen) for limit in binding):
        return result
    allowed *= 1 + len(binding) / len(c.room)
    picked, bound = _reduced(c, result.picked, binding), result.bound
    relaxed = _relaxed(c, binding, clock) if len(c.row) <= _MOST_COLUMNS else None
    if relaxed is None:
        late = clock.left <= 0
        return SearchResult(picked=picked, bound=bound, limit_hit=late, how="greedy")
    values, regret, lagrangian = relaxed
    bound = min(bound, lagrangian)
    picked = max(
        picked, _rounded(c, values, binding), key=lambda choice: float(c.profit[choice].sum())
    )
    how, size = "relaxation", _FIRST_CORE
    order = np.argsort(regret, kind="stable")
    while clock.left > 0:
        open_gap = bound - float(c.profit[picked].sum())
        if open_gap <= allowed:
            break
        how = "branch and bound"
        near = int((regret[order] <= open_gap).sum())
        core = np.union1d(order[: min(near, size)], picked)
        picked, core_bound = _branch(c, core, binding, picked, allowed=allowed, clock=clock)
        if near <= size:
            bound = min(bound, core_bound)
            break
        # A choice with a variable outside the core loses at least the least regret there.
        bound = min(bound, max(core_bound, lagrangian - float(regret[order[size]])))
        size *= _WIDER_CORE
    open_gap = bound - float(c.profit[picked].sum())
    late = open_gap > allowed + _TOLERANCE and clock.left <= 0
    return SearchResult(picked=picked, bound=bound, limit_hit=late, how=how)


def _relaxed(
    c: Columns, limits: Sequence[_ColumnLimit], clock: Clock
) -> tuple[Floats, Floats, float] | None:
    """Solve the linear relaxation: [K] values and regrets, and the Lagrangian bound."""
    if clock.left <= 0:
        return None
    highs = milp_solver.loaded_program(c, clock, integer=False)
    _add_rows(highs, limits)
    highs.run()
    solution = highs.getSolution()
    duals = np.maximum(-np.asarray(solution.row_dual, dtype=np.float64), 0.0)
    rows, kinds = len(c.job), len(c.room)
    if len(duals) != rows + kinds + len(limits) or not np.isfinite(duals).all():
        return None
    prices, shadows = duals[rows : rows + kinds], duals[rows + kinds :]
    scores = c.profit - prices[c.kind] * c.gpus
    for limit, shadow in zip(limits, shadows.tolist(), strict=True):
        scores[limit.at] -= shadow * limit.use
    best = np.maximum(np.maximum.reduceat(scores, milp_solver.first_of_rows(c.row)), 0.0)
    left = sum(s * limit.left for s, limit in zip(shadows.tolist(), limits, strict=True))
    bound = float(best.sum() + prices @ c.room) + left
    return np.asarray(solution.col_value, dtype=np.float64), best[c.row] - scores, bound


def _rounded(c: Columns, values: Floats, limits: Sequence[_ColumnLimit]) -> Ints:
    """Return the whole part of a relaxation, and of the rest what fits, largest values first."""
    picked = np.flatnonzero(values > _WHOLE)
    at = np.full(len(c.job), -1, dtype=np.int64)
    at[c.row[picked]] = picked
    free = _FreeRoom(c, limits, picked)
    split = np.flatnonzero((values > _TOLERANCE) & (values <= _WHOLE))
    # A row that is split may also get a variable that the relaxation gave nothing: a smaller one.
    rest = np.flatnonzero(np.isin(c.row, c.row[split]))
    for column in rest[np.lexsort((-c.profit[rest], -values[rest]))].tolist():
        if at[c.row[column]] < 0 and free.take(column):
            at[c.row[column]] = column
    return at[at >= 0]


class _FreeRoom:
    """GPUs of each type, and the rest of each limit, while variables are picked."""

    def __init__(self, c: Columns, limits: Sequence[_ColumnLimit], picked: Ints) -> None:
        self._room = c.room - c.used(picked)
        self._c = c
        self._left = [limit.left - limit.used(_mask(c, picked)) for limit in limits]
        self._uses: dict[int, list[tuple[int, float]]] = {}
        for i, limit in enumerate(limits):
            for column, use in zip(limit.at.tolist(), limit.use.tolist(), strict=True):
                self._uses.setdefault(column, []).append((i, use))

    def take(self, column: int) -> bool:
        """Pick a variable; return whether it fits."""
        kind, gpus = int(self._c.kind[column]), int(self._c.gpus[column])
        uses = self._uses.get(column, ())
        if gpus > self._room[kind] or any(u > self._left[i] + _TOLERANCE for i, u in uses):
            return False
        self._room[kind] -= gpus
        for i, use in uses:
            self._left[i] -= use
        return True


def _branch(
    c: Columns,
    core: Ints,
    limits: Sequence[_ColumnLimit],
    picked: Ints,
    *,
    allowed: float,
    clock: Clock,
) -> tuple[Ints, float]:
    """Return the better of `picked` and the best choice of these variables, and their bound."""
    highs = milp_solver.loaded_program(c.only(core, c.room), clock, integer=True)
    _add_rows(highs, [limit.only(core) for limit in limits])
    for name, value in milp_solver.BRANCHING.items():
        highs.setOptionValue(name, value)
    highs.setOptionValue("mip_abs_gap", allowed / 2)
    start = np.flatnonzero(np.isin(core, picked)).astype(np.int32)
    highs.setSolution(len(start), start, np.ones(len(start)))
    highs.run()
    x = np.asarray(highs.getSolution().col_value, dtype=np.float64)
    if len(x) == len(core):
        candidate = core[x > 0.5]
        fits = (
            bool((c.used(candidate) <= c.room).all())
            and len(np.unique(c.row[candidate])) == len(candidate)
            and not any(limit.exceeded(_mask(c, candidate)) for limit in limits)
        )
        if fits and c.profit[candidate].sum() > c.profit[picked].sum():
            picked = candidate
    bound = -float(highs.getInfo().mip_dual_bound)
    return picked, bound if np.isfinite(bound) else math.inf


def _add_rows(highs: highspy.Highs, limits: Sequence[_ColumnLimit]) -> None:
    for limit in limits:
        highs.addRow(-np.inf, limit.left, len(limit.at), limit.at.astype(np.int32), limit.use)


def _column_limit(c: Columns, limit: LimitRow, fixed: Ints) -> _ColumnLimit:
    rows = np.searchsorted(c.job, limit.jobs)
    open_jobs = np.flatnonzero(c.job[np.minimum(rows, len(c.job) - 1)] == limit.jobs)
    rows = rows[open_jobs]
    at, row = _of_rows(c, rows)
    use = limit.use[open_jobs[row], c.config[at]]
    counted = use > 0
    return _ColumnLimit(rows, at[counted], row[counted], use[counted], limit.beside(fixed))


def _of_rows(c: Columns, rows: Ints) -> tuple[Ints, Ints]:
    """Return the variables of ascending rows, and which of the rows each belongs to."""
    begin = np.searchsorted(c.row, rows)
    count = np.searchsorted(c.row, rows, side="right") - begin
    row = np.repeat(np.arange(len(rows)), count)
    at = np.arange(int(count.sum())) + np.repeat(begin - np.r_[0, np.cumsum(count)[:-1]], count)
    return at, row


def _mask(c: Columns, picked: Ints) -> Bools:
    mask = np.zeros(len(c.row), dtype=np.bool_)
    mask[picked] = True
    return mask


def _reduced(c: Columns, picked: Ints, limits: Sequence[_ColumnLimit]) -> Ints:
    """Return a choice with jobs made smaller, or left out, until it keeps to all limits.

    Each step is the one that loses the least profit for what it frees of a limit.
    """
    at = np.full(len(c.job), -1, dtype=np.int64)
    at[c.row[picked]] = picked
    for limit in limits:
        own, row = _of_rows(c, limit.rows)
        use = np.zeros(len(own))
        use[np.searchsorted(own, limit.at)] = limit.use
        while True:
            chosen = at[limit.rows]
            runs = chosen >= 0
            taken = np.zeros(len(limit.rows))
            taken[runs] = use[np.searchsorted(own, chosen[runs])]
            excess = taken.sum() - limit.left
            if excess <= _TOLERANCE:
                break
            current = chosen[row]
            # Fewer GPUs of its type take no more of any limit, and of the types.
            step = (current >= 0) & (c.kind[own] == c.kind[current])
            step &= (c.gpus[own] < c.gpus[current]) & (use < taken[row])
            leave = np.flatnonzero(taken > 0)
            options = np.r_[row[step], leave]
            to = np.r_[own[step], np.full(len(leave), -1)]
            left = np.r_[use[step], np.zeros(len(leave))]
            lost = c.profit[chosen[options]] - np.where(to >= 0, c.profit[to], 0.0)
            best = int(np.argmin(lost / np.minimum(taken[options] - left, excess)))
            at[limit.rows[options[best]]] = to[best]
    return at[at >= 0]
