"""Search for the best choice of a round's program that keeps to its limits.

Limits (limit_rows.py) seldom bind, so the program is solved without them first (milp_solver.py).
Where its answer exceeds one, it is solved again with a row for each limit that can bind: linear
relaxation, rounding, and branch and bound over the variables of the least regret, as there. The
answer is at least as good as the first one with jobs made smaller until it fits. Of a program with
many variables that is the answer; what it frees goes to the jobs that no such limit counts.

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
from slurm_elastic.policies.milp.anytime_search import ResourceUse
from slurm_elastic.policies.milp.limit_rows import (
    TOLERANCE,
    LimitMembers,
    LimitRow,
    binding_members,
    choice_of,
    reduced,
)
from slurm_elastic.policies.milp.milp_solver import Clock, Columns, SearchResult

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Least value at which a variable of the relaxation counts as chosen.
_WHOLE = 1 - 1e-6
#: Variables in the first core of branch and bound, and how many times more in each further one.
_FIRST_CORE, _WIDER_CORE = 150, 4
#: Most variables of a relaxation with limits.
_MOST_COLUMNS = 30_000


@dataclass(frozen=True, eq=False)
class _ColumnLimit:
    """A limit over variables.

    Attributes:
        at: variables that take something of it, ascending.
        use: what each takes.
        left: what they may take together.
    """

    at: Ints
    use: Floats
    left: float

    def used(self, picked: Bools) -> float:
        """Return the use of each limit by a choice: [K] whether each variable is picked."""
        return float(self.use[picked[self.at]].sum())

    def exceeded(self, picked: Bools) -> bool:
        return self.used(picked) > self.left + TOLERANCE

    def only(self, core: Ints) -> _ColumnLimit:
        """Return the limit over these variables alone, numbered anew; `core` ascending."""
        inside = np.isin(self.at, core)
        at = np.searchsorted(core, self.at[inside])
        return _ColumnLimit(at, self.use[inside], self.left)


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
    if not len(c.row) or not limits:
        return result
    members = binding_members(c, limits, fixed)
    if not members.excess(choice_of(c, result.picked)).max(initial=0.0) > TOLERANCE:
        return result
    picked, bound = reduced(c, result.picked, members), result.bound
    if len(c.row) > _MOST_COLUMNS:
        picked = _others_grown(c, picked, members, allowed=allowed, clock=clock)
        late = clock.left <= 0
        return SearchResult(picked=picked, bound=bound, limit_hit=late, how="greedy")
    binding = _column_limits(members)
    relaxed = _relaxed(c, binding, clock)
    if relaxed is None:
        late = clock.left <= 0
        return SearchResult(picked=picked, bound=bound, limit_hit=late, how="greedy")
    allowed *= 1 + len(binding) / len(c.room)
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
    late = open_gap > allowed + TOLERANCE and clock.left <= 0
    return SearchResult(picked=picked, bound=bound, limit_hit=late, how=how)


def resource_uses(c: Columns, limits: Sequence[LimitRow], fixed: Ints) -> list[ResourceUse]:
    """Return the use of the limits that can bind by each variable, beside fixed ones."""
    uses: list[ResourceUse] = []
    if not limits:
        return uses
    for limit in _column_limits(binding_members(c, limits, fixed)):
        use = np.zeros(len(c.row))
        use[limit.at] = limit.use
        uses.append(ResourceUse(use=use, left=limit.left))
    return uses


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


def _column_limits(members: LimitMembers) -> list[_ColumnLimit]:
    """Return each limit with the variables that take something of it."""
    m = members
    ends = np.searchsorted(m.limit[m.member], np.arange(len(m.left) + 1))
    limits = []
    for begin, end, left in zip(ends[:-1], ends[1:], m.left.tolist(), strict=True):
        used = m.use[begin:end] > 0
        limits.append(_ColumnLimit(m.at[begin:end][used], m.use[begin:end][used], left))
    return limits


def _rounded(c: Columns, values: Floats, limits: Sequence[_ColumnLimit]) -> Ints:
    """Return the whole part of a relaxation, and of the rest what fits, largest values first."""
    picked = np.flatnonzero(values > _WHOLE)
    at = choice_of(c, picked)
    free = _FreeRoom(c, limits, picked)
    split = np.flatnonzero((values > TOLERANCE) & (values <= _WHOLE))
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
        if gpus > self._room[kind] or any(u > self._left[i] + TOLERANCE for i, u in uses):
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


def _mask(c: Columns, picked: Ints) -> Bools:
    mask = np.zeros(len(c.row), dtype=np.bool_)
    mask[picked] = True
    return mask


def _others_grown(
    c: Columns, picked: Ints, members: LimitMembers, *, allowed: float, clock: Clock
) -> Ints:
    """Return the better of a choice and one that gives what it frees to rows without limits."""
    counted = np.zeros(len(c.job), dtype=np.bool_)
    counted[members.row] = True
    is_counted = counted[c.row[picked]]
    kept, others = picked[is_counted], np.flatnonzero(~counted[c.row])
    open_room = c.only(others, c.room - c.used(kept))
    gap = allowed / max(float(c.profit[picked[~is_counted]].sum()), TOLERANCE)
    result = milp_solver.search(open_room, offset=0.0, gap=gap, clock=clock)
    grown = np.sort(np.r_[kept, others[result.picked]])
    return max(picked, grown, key=lambda choice: float(c.profit[choice].sum()))
