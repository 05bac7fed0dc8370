"""Integer program of a round: at most one configuration per job, capacity per GPU type.

    minimise    sum_jc cost[j, c] X[j, c]  +  not_running * (jobs - sum_jc X[j, c])
    subject to  sum_c X[j, c] <= 1                    for every job
                sum_jc gpus[c] X[j, c] <= capacity    for every GPU type
                sum_jc use[j, c] X[j, c] <= left      for every limit (limit_rows.py)
                X[j, fixed[j]] = 1                    for every fixed job
                X in {0, 1}

(Sia, SOSP'23, section 3.3.) It is a multiple-choice knapsack with few capacities, so its
linear relaxation is nearly integral: at most one job per GPU type is split. `solve` takes these
steps, as few as needed: linear relaxation, rounding with local improvement, and branch and bound
over what the bound leaves open (milp_solver.py). Where the time is over before, or a program has
too many variables for its limits, a search goes on from the best choice known (anytime_search.py).
It always returns a feasible choice, and a bound on its distance from the optimum.

>>> program = AssignmentProgram(
...     cost=np.array([[0.9, 0.5], [0.8, 0.4], [1.5, 1.0]]),
...     valid=np.ones((3, 2), dtype=bool),
...     config_type=np.array([0, 0]),
...     config_gpus=np.array([1, 2]),
...     capacity=np.array([4]),
...     not_running=1.1,
...     fixed=np.array([-1, -1, -1]),
... )
>>> solution = solve(program)
>>> solution.choice.tolist(), round(solution.objective, 6), solution.proven
([1, 1, -1], 2.0, True)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.milp import anytime_search
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.milp.limit_search import resource_uses, within_limits
from slurm_elastic.policies.milp.milp_solver import (
    Clock,
    Columns,
    SearchResult,
    first_of_rows,
    search,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

#: Profits are raised by at most this part, drawn by the seed, so that ties are decided by it.
_JITTER = 1e-7
#: Candidate grains, tried first on some profits; how near a multiple has to be.
_GRAINS = (1.0, 0.1, 0.01, 0.001)
_SOME = 64
_ON_GRID = 1e-6
#: Part of the time limit, and most seconds of it, that is left for the anytime search.
_RESERVED, _MOST_RESERVED_S = 0.1, 0.5
#: Most seconds of an anytime search that no end of time calls for: its starts gain nearly all.
_SEARCH_S = 0.3

#: Further choices that a caller knows, [J] each as in a solution; called only where they are used.
KnownChoices = Callable[[], Sequence[Ints]]


@dataclass(frozen=True, eq=False, kw_only=True)
class AssignmentProgram:
    """One round's program; J jobs, C configurations, T GPU types.

    Attributes:
        cost: [J, C] finite; what is not valid is not read.
        valid: [J, C] whether the job may run in the configuration.
        config_type: [C] index of the configuration's GPU type.
        config_gpus: [C] GPUs of the configuration, > 0.
        capacity: [T] GPUs that all jobs may hold together.
        not_running: cost of a job that gets nothing (lambda_n in the paper).
        fixed: [J] the configuration a job has to keep, valid or not; -1: free.
        limits: on sums over some of the jobs. What fixed jobs take is always granted; the others
            share the rest.

    Raises:
        ValueError: shapes that differ, indices out of range, a cost that is not finite.
    """

    cost: Floats
    valid: Bools
    config_type: Ints
    config_gpus: Ints
    capacity: Ints
    not_running: float
    fixed: Ints
    limits: tuple[LimitRow, ...] = ()

    def __post_init__(self) -> None:
        jobs, configs = self.cost.shape
        shapes = (
            self.valid.shape == (jobs, configs)
            and self.config_type.shape == self.config_gpus.shape == (configs,)
            and self.fixed.shape == (jobs,)
        )
        if not shapes:
            raise ValueError("program: cost, valid, config_type, config_gpus and fixed differ")
        if not np.isfinite(np.where(self.valid, self.cost, 0.0)).all():
            raise ValueError("program: cost of a valid configuration is not finite; mask it")
        if configs and (self.config_gpus.min() < 1 or self.config_type.min() < 0):
            raise ValueError("program: a configuration needs at least one GPU of a known type")
        if configs and self.config_type.max() >= len(self.capacity):
            raise ValueError("program: a configuration's type has no capacity; give it one, or 0")
        if jobs and (self.fixed.min() < -1 or self.fixed.max() >= configs):
            raise ValueError("program: a job is fixed to a configuration that does not exist")

    def objective(self, choice: Ints) -> float:
        """Return the cost of a choice: [J] configuration, -1 for none."""
        runs = np.flatnonzero(choice >= 0)
        waits = len(choice) - len(runs)
        return float(self.cost[runs, choice[runs]].sum()) + self.not_running * waits

    def used(self, choice: Ints) -> Ints:
        """Return the [T] GPUs that a choice takes of each type."""
        runs = choice[choice >= 0]
        used = np.bincount(
            self.config_type[runs], weights=self.config_gpus[runs], minlength=len(self.capacity)
        )
        return used.astype(np.int64)


@dataclass(frozen=True, eq=False, kw_only=True)
class ProgramSolution:
    """An answer: feasible in any case.

    Attributes:
        choice: [J] configuration of each job, -1: none.
        objective: its cost, by the program's own figures.
        bound: no choice costs less.
        proven: whether objective and bound are as close as was asked for. Ties are decided by
            raising profits by up to 1e-7 of themselves: to that extent a bound is not exact.
        limit_hit: the time limit ended the search: the same seed may give another answer.
        how: what found it: "relaxation", "branch and bound", "greedy" or "anytime search".
        relaxed: jobs whose fixing did not fit the capacity and was lifted.
        fallback: why the configured solver gave no answer, so that HiGHS did; "": it did.
    """

    choice: Ints
    objective: float
    bound: float
    proven: bool
    limit_hit: bool
    how: str
    relaxed: tuple[int, ...] = ()
    fallback: str = ""

    @property
    def gap(self) -> float:
        """(objective - bound) relative to the objective."""
        return (self.objective - self.bound) / max(abs(self.objective), 1e-9)


def solve(
    program: AssignmentProgram,
    *,
    time_limit_s: float = 10.0,
    gap: float = 1e-4,
    seed: int = 0,
    known: KnownChoices | None = None,
) -> ProgramSolution:
    """Return the best choice, within a relative gap.

    Args:
        program: what is to be solved.
        time_limit_s: after this long, the best choice found so far is the answer.
        gap: distance to the optimum, relative to the objective, that need not be closed.
        seed: decides ties. Same program and seed, same answer, unless the limit was hit.
        known: choices from which the search goes on when the time is over.

    Fixed jobs that exceed a capacity (a node died) do not make the program infeasible: taken
    in the order of their rows, those that no longer fit are treated as free jobs.
    """
    total = Clock(time_limit_s)
    clock = Clock(time_limit_s - min(_RESERVED * time_limit_s, _MOST_RESERVED_S))
    choice, room, relaxed = _fixed(program)
    columns = _columns(program, choice, room, seed)
    settled = program.objective(choice)
    result = search(columns, offset=settled, gap=gap, clock=clock)
    if program.limits:
        lost = gap * max(abs(settled - float(columns.profit[result.picked].sum())), 1e-9)
        result = within_limits(
            columns, result, program.limits, fixed=choice, allowed=lost, clock=clock
        )
    if len(columns.row) and (result.limit_hit or result.how == "greedy"):
        rest = total if result.limit_hit else Clock(min(total.left, _SEARCH_S))
        result = _searched_on(program, columns, result, choice, known, clock=rest, seed=seed)
    picked = result.picked
    choice[columns.job[columns.row[picked]]] = columns.config[picked]
    objective = program.objective(choice)
    largest_profit = result.bound
    if columns.grain:
        largest_profit = math.floor(largest_profit / columns.grain + _ON_GRID) * columns.grain
    bound = min(objective, settled - largest_profit)
    return ProgramSolution(
        choice=choice,
        objective=objective,
        bound=bound,
        proven=objective - bound <= gap * abs(objective) + _JITTER * result.bound + 1e-8,
        limit_hit=result.limit_hit,
        how=result.how,
        relaxed=relaxed,
    )


def _searched_on(
    program: AssignmentProgram,
    columns: Columns,
    result: SearchResult,
    fixed: Ints,
    known: KnownChoices | None,
    *,
    clock: Clock,
    seed: int,
) -> SearchResult:
    """Return a search's result, or a better one from it and from what the caller knows."""
    if not anytime_search.is_small_enough(columns, len(program.limits)):
        return result
    limits = resource_uses(columns, program.limits, fixed)
    starts = [result.picked]
    if known is not None:
        starts += [_variables(program, columns, choice) for choice in known()]
    picked = anytime_search.improved(columns, starts, limits=limits, clock=clock, seed=seed)
    if columns.profit[picked].sum() <= columns.profit[result.picked].sum() + _ON_GRID:
        return result
    return dataclasses.replace(result, picked=picked, how="anytime search")


def _variables(program: AssignmentProgram, columns: Columns, choice: Ints) -> Ints:
    """Return the variables of a choice; for one that was dropped the better one of no more GPUs."""
    wanted = choice[columns.job][columns.row]
    kind, gpus = program.config_type[wanted], program.config_gpus[wanted]
    within = (wanted >= 0) & (columns.kind == kind) & (columns.gpus <= gpus)
    (at,) = np.nonzero(within)
    at = at[np.lexsort((-columns.profit[at], columns.row[at]))]
    return np.sort(at[first_of_rows(columns.row[at])])


def fixings(program: AssignmentProgram) -> tuple[Ints, tuple[int, ...]]:
    """Return the fixed configuration of each job, as far as they fit, and the jobs lifted."""
    choice, _, relaxed = _fixed(program)
    return choice, relaxed


def program_columns(program: AssignmentProgram, fixed: Ints, seed: int = 0) -> Columns:
    """Return the variables of a program beside the jobs that are fixed (`fixings`)."""
    room = np.maximum(program.capacity, 0) - program.used(fixed)
    return _columns(program, fixed, room, seed)


def _fixed(program: AssignmentProgram) -> tuple[Ints, Ints, tuple[int, ...]]:
    """Return the choice of the fixed jobs, the capacity left, and the jobs that did not fit."""
    choice = np.full(len(program.cost), -1, dtype=np.int64)
    room = np.maximum(program.capacity, 0).astype(np.int64)
    relaxed = []
    for job in np.flatnonzero(program.fixed >= 0):
        config = program.fixed[job]
        kind, gpus = program.config_type[config], program.config_gpus[config]
        if gpus <= room[kind]:
            room[kind] -= gpus
            choice[job] = config
        else:
            relaxed.append(int(job))
    return choice, room, tuple(relaxed)


def _columns(program: AssignmentProgram, choice: Ints, room: Ints, seed: int) -> Columns:
    """Return the variables that an optimum can need, and what each saves against not running."""
    profit = program.not_running - program.cost
    useful = program.valid & (profit > 0) & (choice < 0)[:, None]
    useful &= (program.config_gpus <= room[program.config_type])[None, :]
    _drop_dominated(program, profit, useful)
    jobs, configs = np.nonzero(useful)
    draw = np.random.default_rng(seed).random(len(jobs))
    gains = profit[jobs, configs]
    present = np.flatnonzero(useful.any(axis=1))
    row = np.searchsorted(present, jobs)
    return Columns(
        row=row,
        config=configs,
        kind=program.config_type[configs],
        gpus=program.config_gpus[configs],
        profit=gains * (1.0 + _JITTER * draw),
        job=present,
        room=room.astype(np.float64),
        grain=_grain(gains),
        ties=_JITTER,
    )


def _grain(gains: Floats) -> float:
    """Return the largest of a few grains that divides all gains (rounded costs have one), or 0."""
    for grain in _GRAINS:
        first = gains[:_SOME] / grain
        if (np.abs(first - np.rint(first)) < _ON_GRID).all():
            multiples = gains / grain
            if (np.abs(multiples - np.rint(multiples)) < _ON_GRID).all():
                return grain
    return 0.0


def _drop_dominated(program: AssignmentProgram, profit: Floats, useful: Bools) -> None:
    """Clear configurations, in place, that another one of the type betters with no more GPUs."""
    for kind in range(len(program.capacity)):
        (of_kind,) = np.nonzero(program.config_type == kind)
        of_kind = of_kind[np.argsort(program.config_gpus[of_kind], kind="stable")]
        if len(of_kind) < 2:
            continue
        gains = np.where(useful[:, of_kind], profit[:, of_kind], 0.0)
        best = np.maximum.accumulate(gains, axis=1)
        useful[:, of_kind[1:]] &= gains[:, 1:] > best[:, :-1]
