"""Anytime search for a round's program: an answer at every moment, never worse than its starts.

It decides where the solver's time is over, or where a program has too many limits for a relaxation.
A population of choices evolves (ONES, SC'21: crossover and mutation by job), but each child is made
feasible and then filled by marginal profit, so that every member could be put into effect:

1. prices of GPUs and limits by a multiplicative rule: a resource that is asked for beyond its room
   becomes dearer (Lagrangian relaxation without a linear solver);
2. starts: the choices that the caller knows, and the best choice at these prices;
3. until the time is over: a child takes each job's configuration from one of two parents, or loses
   some of its jobs; jobs that do not fit are taken off, those that lose least first; the room is
   filled, step by step, by profit for the price of what a step takes. It replaces the worst member.

The profit is that of the calling policy, whatever it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.milp.milp_solver import Clock, Columns, first_of_rows

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_MEMBERS = 12
#: Children of at most one search; the time ends it earlier.
CHILDREN = 2_000
#: Jobs that a mutation takes off: at least, and on average as a part of all.
_TAKEN_OFF, _PART_OFF = 3, 0.06
#: Steps of the prices, and how far the first and the last one change them.
_PRICE_STEPS = 60
_FIRST_STEP, _LAST_STEP = 0.5, 0.02
#: Passes of filling; each takes at most one step per job.
_FILL_PASSES = 60
_TOLERANCE = 1e-6
_LEAST_GAIN = 1e-12
#: Largest array of a program's options; 400 MB.
_MOST_ENTRIES = 50_000_000


@dataclass(frozen=True, eq=False, kw_only=True)
class ResourceUse:
    """Further limit: the part that each variable takes of it, and the most for all together.

    Attributes:
        use: [K] of the program's variables, >= 0.
        left: most of their sum.
    """

    use: Floats
    left: float


def improved(
    columns: Columns,
    starts: Sequence[Ints],
    *,
    limits: Sequence[ResourceUse] = (),
    clock: Clock,
    seed: int = 0,
    children: int = CHILDREN,
) -> Ints:
    """Return picked variables of at least the profit of each start that fits.

    Args:
        columns: of the program.
        starts: picked variables each; those that do not fit are made smaller.
        limits: beside the room of the GPU types.
        clock: ends the search; with no time left the best start is returned.
        seed: of all draws.
        children: most of them; where the clock ends no search, equal seeds give equal answers.
    """
    if not len(columns.row):
        return np.empty(0, dtype=np.int64)
    options = _Options(columns, limits)
    known = [options.repaired(options.genes(picked)) for picked in starts]
    if clock.left <= 0:
        return options.picked(_best(options, [*known, options.nothing()]))
    options.price(clock)
    members = [options.filled(m) for m in [options.nothing(), options.at_prices(), *known]]
    # Filling only adds profit, and what was known stays comparable if it is cut short.
    members += known
    return options.picked(_evolved(options, members, clock, children, np.random.default_rng(seed)))


def is_small_enough(columns: Columns, limits: int) -> bool:
    """Return whether the arrays of a search with so many limits fit into memory."""
    rows = len(columns.job)
    most = int(np.bincount(columns.row).max(initial=0)) + 1
    return rows * most * (len(columns.room) + limits) <= _MOST_ENTRIES


def _best(options: _Options, members: Sequence[Ints]) -> Ints:
    return max(members, key=options.profit_of)


def _evolved(
    options: _Options, members: list[Ints], clock: Clock, children: int, rng: np.random.Generator
) -> Ints:
    """Return the best member after as many children as the time allows."""
    members = members[:]
    profits = [options.profit_of(m) for m in members]
    rows = len(members[0])
    for _ in range(children):
        if clock.left <= 0:
            break
        first, second = rng.integers(0, len(members), size=2)
        if profits[second] > profits[first]:
            first, second = second, first
        child = members[first].copy()
        if first != second and rng.random() < 0.5:
            other = rng.random(rows) < 0.5
            child[other] = members[second][other]
        else:
            count = min(rows, _TAKEN_OFF + int(rng.exponential(_PART_OFF * rows)))
            child[rng.choice(rows, size=count, replace=False)] = 0
        child = options.filled(options.repaired(child), noise=rng)
        profit = options.profit_of(child)
        if any(abs(profit - p) <= _LEAST_GAIN for p in profits):
            continue
        if len(members) < _MEMBERS:
            members.append(child)
            profits.append(profit)
            continue
        worst = int(np.argmin(profits))
        if profit > profits[worst]:
            members[worst], profits[worst] = child, profit
    return members[int(np.argmax(profits))]


class _Options:
    """Variables of a program as options of each row; option 0 is to get nothing.

    Attributes:
        profit: [R, M] of each option, -inf where a row has fewer.
        use: [R, M, T + L] what it takes of each GPU type and limit.
        left: [T + L] what all may take.
        weight: [R, M] price of what an option takes.
    """

    def __init__(self, columns: Columns, limits: Sequence[ResourceUse]) -> None:
        first = first_of_rows(columns.row)
        rows, kinds = len(first), len(columns.room)
        self._place = np.arange(len(columns.row)) - first[columns.row] + 1
        self._row, self._first = columns.row, first
        shape = (rows, int(self._place.max()) + 1)
        self.profit = np.full(shape, -np.inf)
        self.profit[:, 0] = 0.0
        self.profit[columns.row, self._place] = columns.profit
        self.use = np.zeros((*shape, kinds + len(limits)))
        self.use[columns.row, self._place, columns.kind] = columns.gpus
        for at, limit in enumerate(limits, start=kinds):
            self.use[columns.row, self._place, at] = limit.use
        self.left = np.r_[columns.room, [limit.left for limit in limits]]
        self._rows = np.arange(rows)
        self.weight = np.zeros(shape)
        # Before prices are known, each resource counts by how much of it there is.
        self._weigh(1.0 / np.maximum(self.left, 1.0))

    def nothing(self) -> Ints:
        """Return the choice in which no job gets anything."""
        return np.zeros(len(self._rows), dtype=np.int64)

    def genes(self, picked: Ints) -> Ints:
        """Return the option of each row."""
        genes = self.nothing()
        genes[self._row[picked]] = self._place[picked]
        return genes

    def picked(self, genes: Ints) -> Ints:
        """Return the variables of a choice."""
        chosen = genes > 0
        return self._first[chosen] + genes[chosen] - 1

    def profit_of(self, genes: Ints) -> float:
        """Return the profit of a choice."""
        return float(self.profit[self._rows, genes].sum())

    def at_prices(self) -> Ints:
        """Return the best choice at the prices, made feasible."""
        return self.repaired(np.argmax(self.profit - self.weight, axis=1))

    def price(self, clock: Clock) -> None:
        """Raise the prices of what is short, and lower the others, step by step."""
        wanted = self.use.max(axis=1).sum(axis=0)
        short = wanted > self.left
        best = np.where(np.isfinite(self.profit), self.profit, 0.0).max(axis=1).sum()
        prices = np.where(short, best / np.maximum(self.left, 1.0) / max(1, short.sum()), 0.0)
        for step in np.geomspace(_FIRST_STEP, _LAST_STEP, _PRICE_STEPS):
            if clock.left <= 0:
                break
            self._weigh(prices)
            genes = np.argmax(self.profit - self.weight, axis=1)
            used = self.use[self._rows, genes].sum(axis=0)
            excess = np.clip((used - self.left) / np.maximum(self.left, 1.0), -1.0, 1.0)
            prices = prices * np.exp(step * excess)
        self._weigh(prices)

    def repaired(self, genes: Ints) -> Ints:
        """Return a choice that fits: jobs are taken off that lose least for what is short."""
        genes = genes.copy()
        used = self.use[self._rows, genes].sum(axis=0)
        for at in np.flatnonzero(used > self.left + _TOLERANCE):
            take = self.use[self._rows, genes, at]
            holders = np.flatnonzero(take > 0)
            density = self.profit[holders, genes[holders]] / take[holders]
            for row in holders[np.argsort(density, kind="stable")]:
                if used[at] <= self.left[at] + _TOLERANCE:
                    break
                used -= self.use[row, genes[row]]
                genes[row] = 0
        return genes

    def filled(self, genes: Ints, *, noise: np.random.Generator | None = None) -> Ints:
        """Return a choice with the room filled; steps of most profit for their price first."""
        genes = genes.copy()
        free = self.left - self.use[self._rows, genes].sum(axis=0)
        barred = np.zeros(self.profit.shape, dtype=np.bool_)
        factor = np.ones(self.profit.shape)
        if noise is not None:
            factor = noise.uniform(0.9, 1.1, size=self.profit.shape)
        for _ in range(_FILL_PASSES):
            gain = self.profit - self.profit[self._rows, genes][:, None]
            extra = self.weight - self.weight[self._rows, genes][:, None]
            useful = (gain > _LEAST_GAIN) & ~barred
            density = np.where(useful, gain * factor / np.maximum(extra, _LEAST_GAIN), 0.0)
            best = np.argmax(density, axis=1)
            value = density[self._rows, best]
            (rows,) = np.nonzero(value > 0)
            if not len(rows):
                break
            for row in rows[np.argsort(-value[rows], kind="stable")]:
                step = self.use[row, best[row]] - self.use[row, genes[row]]
                if (step <= free + _TOLERANCE).all():
                    free -= step
                    genes[row] = best[row]
                else:
                    barred[row, best[row]] = True
        return genes

    def _weigh(self, prices: Floats) -> None:
        self.weight = self.use @ prices
