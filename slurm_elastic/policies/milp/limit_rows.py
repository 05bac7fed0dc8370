"""Limits on sums over some of a program's jobs, and the choice made smaller until it keeps to them.

Limits of Slurm's accounting and shares of the site (`core.cluster.Limit`) cap GPUs, nodes, CPUs or
memory of a set of jobs. limit_search.py finds a better answer where the program is not too large.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.milp import milp_solver
from slurm_elastic.policies.milp.milp_solver import Columns

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: A sum above its limit by no more than this is the error of a sum.
TOLERANCE = 1e-6


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
        """Return the use of each limit by a choice: [J] configuration of every job, -1: none."""
        chosen = choice[self.jobs]
        (runs,) = np.nonzero(chosen >= 0)
        return float(self.use[runs, chosen[runs]].sum())

    def exceeded(self, choice: Ints) -> bool:
        """Return whether a choice takes more than is left."""
        return self.used(choice) > self.left + TOLERANCE

    def beside(self, fixed: Ints) -> float:
        """Return the room that jobs fixed to a configuration leave to others, not below 0."""
        return max(0.0, self.left - self.used(fixed))


@dataclass(frozen=True, eq=False, kw_only=True)
class LimitMembers:
    """Rows that L limits count, as one array for all limits: a row stands once for each of them.

    Attributes:
        limit: [M] index of the limit, ascending.
        row: [M] row of the program, ascending within a limit.
        first: [M] index into `at` of the row's first variable.
        member: [K] index into `row` that each variable belongs to, ascending.
        at: [K] variables of the rows.
        use: [K] what each takes of the limit.
        left: [L] what the rows may take together.
    """

    limit: Ints
    row: Ints
    first: Ints
    member: Ints
    at: Ints
    use: Floats
    left: Floats

    def taken(self, choice: Ints) -> Floats:
        """Return [M] what a choice takes: [R] variable of each row of the program, -1: none."""
        chosen = choice[self.row]
        runs = chosen >= 0
        taken = np.zeros(len(self.row))
        at = self.first[runs] + chosen[runs] - self.at[self.first[runs]]
        taken[runs] = self.use[at]
        return taken

    def excess(self, choice: Ints) -> Floats:
        """Return [L] by how much a choice exceeds each limit; not above 0: it does not."""
        return self._sums(self.taken(choice)) - self.left

    def binding(self) -> LimitMembers:
        """Return the limits whose rows could take more than is left."""
        if not len(self.row):
            return self
        most = np.maximum.reduceat(self.use, self.first)
        binds = self._sums(most) > self.left + TOLERANCE
        kept = binds[self.limit]
        own = kept[self.member]
        count = np.diff(np.r_[self.first, len(self.at)])[kept]
        return LimitMembers(
            limit=(np.cumsum(binds) - 1)[self.limit[kept]],
            row=self.row[kept],
            first=np.r_[0, np.cumsum(count)[:-1]].astype(np.int64),
            member=(np.cumsum(kept) - 1)[self.member[own]],
            at=self.at[own],
            use=self.use[own],
            left=self.left[binds],
        )

    def _sums(self, values: Floats) -> Floats:
        sums = np.bincount(self.limit, weights=values, minlength=len(self.left))
        return sums.astype(np.float64)


def binding_members(c: Columns, limits: Sequence[LimitRow], fixed: Ints) -> LimitMembers:
    """Return the rows that one limit or more counts, of the limits that could be exceeded."""
    jobs = np.concatenate([limit.jobs for limit in limits])
    use = np.concatenate([limit.use for limit in limits])
    limit_of = np.repeat(np.arange(len(limits)), [len(limit.jobs) for limit in limits])
    rows = np.minimum(np.searchsorted(c.job, jobs), len(c.job) - 1)
    (open_jobs,) = np.nonzero(c.job[rows] == jobs)
    rows = rows[open_jobs]
    begin = milp_solver.first_of_rows(c.row)[rows]
    count = np.bincount(c.row, minlength=len(c.job))[rows]
    first = np.r_[0, np.cumsum(count)[:-1]].astype(np.int64)
    member = np.repeat(np.arange(len(rows)), count)
    at = np.arange(int(count.sum())) + (begin - first)[member]
    return LimitMembers(
        limit=limit_of[open_jobs],
        row=rows,
        first=first,
        member=member,
        at=at,
        use=use[open_jobs[member], c.config[at]],
        left=np.array([limit.beside(fixed) for limit in limits]),
    ).binding()


def choice_of(c: Columns, picked: Ints) -> Ints:
    """Return the [R] picked variable of each row, -1: none."""
    choice = np.full(len(c.job), -1, dtype=np.int64)
    choice[c.row[picked]] = picked
    return choice


def reduced(c: Columns, picked: Ints, members: LimitMembers) -> Ints:
    """Return a choice with jobs made smaller, or left out, until it keeps to all limits.

    Each step is the one that loses the least profit for what it frees of a limit. Limits take
    their steps in their order; those that share no row with an earlier one take them at once.
    """
    m, choice = members, choice_of(c, picked)
    owner = np.empty(len(c.job), dtype=np.int64)
    possible = np.arange(len(m.at))
    while True:
        taken, excess = m.taken(choice), m.excess(choice)
        (open_members,) = np.nonzero((excess > TOLERANCE)[m.limit])
        if not len(open_members):
            return choice[choice >= 0]
        # Written backwards, so that the first limit that counts a row owns it.
        owner[m.row[open_members[::-1]]] = m.limit[open_members[::-1]]
        shared = open_members[owner[m.row[open_members]] != m.limit[open_members]]
        turn = excess > TOLERANCE
        turn[m.limit[shared]] = False
        # Fewer GPUs of its type take no more of any limit, and of the types. What is no such step
        # of a job now never becomes one, as jobs only get smaller.
        member, column = m.member[possible], m.at[possible]
        current = choice[m.row[member]]
        smaller = (current >= 0) & (c.kind[column] == c.kind[current])
        smaller &= (c.gpus[column] < c.gpus[current]) & (m.use[possible] < taken[member])
        possible = possible[smaller]
        own = possible[turn[m.limit[m.member[possible]]]]
        member, column = m.member[own], m.at[own]
        (leaving,) = np.nonzero(turn[m.limit] & (taken > 0))
        option = np.r_[member, leaving]
        to = np.r_[column, np.full(len(leaving), -1)]
        freed = taken[option] - np.r_[m.use[own], np.zeros(len(leaving))]
        lost = c.profit[choice[m.row[option]]] - np.where(to >= 0, c.profit[to], 0.0)
        limit = m.limit[option]
        order = np.lexsort((lost / np.minimum(freed, excess[limit]), limit))
        best = order[milp_solver.first_of_rows(limit[order])]
        choice[m.row[option[best]]] = to[best]
