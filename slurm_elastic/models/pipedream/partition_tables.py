"""The dynamic program of PipeDream: the best pipeline between any two states of a model.

One table per level of the hierarchy; a *component* of a level is one GPU on the
innermost, and all components of the level below on the next. With V the level
below (on the innermost the compute time), P parameter bytes, O output bytes, B the
level's bandwidth, n its components and n_in those of a component::

    A(a, b, m) = min(single_stage(a, b, m), min over a < k < b, r < m of
                     max(A(a, k, m - r), last(k, b, r), crossing(k, b, r)))
    value      = A(a, b, n), the V of the next level

`published` (the code of PipeDream, its page 5.2)::

    single_stage = (V + 4 (m - 1) P / (B m) / n_in) / m
    last         = (V + 4 (r - 1) P / (B r)) / r
    crossing     = max(2 O(k), 2 O(b)) / (B r), O(b) only when b is not the whole model;
                   0 unless activations count

`paper` (SOSP'19, section 3.1)::

    single_stage = last = max(V, 2 (r - 1) P / B) / r,  crossing = 2 O(k) / B

All n components are used. Exact: what is skipped (`_Block._window`) cannot be better,
since no r GPUs work off compute c in less than c / r.

Memory is ours (the published check leaves out the minibatch being worked on, so that
data parallelism would need none). A stage of r replicas, the last of m components, has
d = ceil((D n + n - m) / r) minibatches waiting for their backward pass besides the
current one; D is that of the component's own stage, 0 on the outermost level. Each keeps
its weights and its activations: (d + 1) (activations + parameters) <= memory.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.models.pipedream.model_cuts import Bools, Floats, States

#: Arrays of shape (machines, states): how simple a pipeline is, its last split, its last replicas.
Choice = tuple[Floats, NDArray[np.intp], NDArray[np.intp]]
#: States whose best pipelines are found at once.
_WIDTH = 64
#: Sums of times are trusted to this part of the model's compute.
_EPSILON = 1e-12


@dataclass(frozen=True, slots=True)
class PartitionProblem:
    """Model and machines to be divided, and the costs that count.

    Attributes:
        states: where the model can be cut.
        machines: components of each level, innermost first.
        bandwidths: bytes/s of each level.
        paper: costs of the paper instead of the published code's.
        compression: outputs are this many times smaller on the wire; None: they cost nothing.
        memory: bytes of one GPU; None: no limit.
        straight: no stage is replicated.
    """

    states: States
    machines: tuple[int, ...]
    bandwidths: tuple[float, ...]
    paper: bool = False
    compression: float | None = None
    memory: float | None = None
    straight: bool = False


@dataclass(frozen=True, slots=True)
class StageCandidate:
    """A stage on one level: states (first, last], components, and minibatches waiting behind it."""

    first: int
    last: int
    replicas: int
    waiting: int


class PartitionTables:
    """The tables of a problem, each made at its first use."""

    def __init__(self, problem: PartitionProblem) -> None:
        self.problem = problem
        self._made: dict[tuple[int, int], PartitionTable] = {}

    def table(self, level: int, waiting: int) -> PartitionTable:
        """Return the table of a level (0: innermost) with so many minibatches waiting."""
        key = level, waiting if self.problem.memory is not None else 0
        if key not in self._made:
            self._made[key] = PartitionTable(self, *key)
        return self._made[key]

    def top(self) -> PartitionTable:
        """Return the table of the outermost level."""
        return self.table(len(self.problem.machines) - 1, 0)

    def below(self, level: int, waiting: int, first: int, last: int) -> Floats:
        """Return V of a level for ranges that end at states first to last - 1; inf: there is none.

        Returns:
            Seconds, shape (last, last - first): entry (a, b) is the range (a, first + b].
        """
        if level:
            value: Floats = self.table(level - 1, waiting).best[-1]
            return value[:last, first:last]
        states = self.problem.states
        out = states.compute_s[None, first:last] - states.compute_s[:last, None]
        out[~states.below(first, last)] = np.inf
        if self.problem.memory is not None:
            layer_bytes = states.activation_bytes + states.parameter_bytes
            stage_bytes = (layer_bytes[None, first:last] - layer_bytes[:last, None]) * (waiting + 1)
            out[stage_bytes > self.problem.memory * (1 + _EPSILON)] = np.inf
        return out


class PartitionTable:
    """Table A of one level.

    Attributes:
        best: A, shape (machines, rows, states), seconds, inf where nothing fits; rows are all
            states, on the outermost level state 0 alone.
    """

    def __init__(self, tables: PartitionTables, level: int, waiting: int) -> None:
        self.tables = tables
        self.problem = problem = tables.problem
        self.level = level
        self.waiting = waiting
        self.machines = problem.machines[level]
        count = len(problem.states)
        #: GPUs of one component.
        self.inner = math.prod(problem.machines[:level])
        outermost = level == len(problem.machines) - 1
        self.best = np.full((self.machines, 1 if outermost else count, count), np.inf)
        for first in range(0, count, _WIDTH):
            _Block(self, first, min(first + _WIDTH, count)).fill()

    def pieces(self, first: int, last: int, waiting: int) -> list[StageCandidate]:
        """Return the stages of the best pipeline of states (first, last] on all components.

        `waiting` minibatches are behind the component; without a limit of memory all share
        one table.

        Many are equally good, as only the slowest stage counts. Taken is one with the
        fewest stages, of these one with the least output over all its cuts.
        """
        goal = float(self.best[-1, first, last]) * (1 + _EPSILON)
        cost = np.full((self.machines, last + 1), np.inf)
        split = np.zeros(cost.shape, dtype=np.intp)
        replicas = np.zeros(cost.shape, dtype=np.intp)
        for begin in range(first + 1, last + 1, _WIDTH):
            end = min(begin + _WIDTH, last + 1)
            _Block(self, begin, end).simplify(first, goal, (cost, split, replicas))
        stages: list[StageCandidate] = []
        m = self.machines
        while last != first:
            r, k = int(replicas[m - 1, last]), int(split[m - 1, last])
            stages.append(StageCandidate(k, last, r, self.behind(m, r, waiting)))
            m, last = m - r, k
        return stages[::-1]

    def widths(self, m: int) -> range:
        """Return the numbers of replicas that a last stage may have of m components."""
        return range(1, min(2, m) if self.problem.straight else m)

    def behind(self, m: int, r: int, waiting: int) -> int:
        """Return minibatches waiting in the last stage, of r replicas, of m components."""
        return -(-(waiting * self.machines + self.machines - m) // r)


class _Block:
    """The columns first to last - 1 of a table: pipelines that end there."""

    def __init__(self, table: PartitionTable, first: int, last: int) -> None:
        self.table = table
        self.first, self.last = first, last
        states = table.problem.states
        self.parameters: Floats = (
            states.parameter_bytes[None, first:last] - states.parameter_bytes[:last, None]
        )
        self._last_of: dict[tuple[int, int], Floats] = {}
        self._values: dict[int, Floats] = {}

    def fill(self) -> None:
        """Find the columns' best pipelines."""
        best = self.table.best
        rows = best.shape[1]
        for m in range(1, self.table.machines + 1):
            best[m - 1, : self.last, self.first : self.last] = self.single_stage(m)[:rows]
        reach: Bools = self.table.problem.states.below(self.first, self.last)[:rows]
        for a in np.flatnonzero(reach.any(axis=1)).tolist():
            self.improve(a, reach[a])

    def improve(self, a: int, reach: Bools) -> None:
        """Find the best pipelines that begin at state a."""
        best = self.table.best[:, a]
        ends = self.table.problem.states.compute_s[self.first : self.last]
        for m in range(2, self.table.machines + 1):
            now = best[m - 1, self.first : self.last]
            for r in self.table.widths(m):
                worst = float(np.max(now, where=reach, initial=0.0))
                gpus = self.table.inner * r
                done = np.max(gpus * now - ends, where=reach, initial=-np.inf)
                low, high = self._window(a, m, r, worst, float(done) + float(ends[0]))
                if low >= high:
                    continue
                slowest = np.maximum(best[m - r - 1, low:high, None], self.last_of(m, r)[low:high])
                np.minimum(now, slowest.min(axis=0), out=now)

    def simplify(self, a: int, goal: float, tables: Choice) -> None:
        """Find the simplest pipelines from state a whose parts all take at most the goal.

        Args:
            a: where they begin.
            goal: seconds.
            tables: how simple they are, the split before the last stage and its
                replicas, each of shape (machines, states); filled in columns first to last - 1.
        """
        cost, split, replicas = tables
        outputs = self.table.problem.states.output_bytes
        # A stage weighs more than all that can cross.
        stage = 1.0 + float(outputs.max()) * self.table.machines
        columns = slice(self.first, self.last)
        for m in range(1, self.table.machines + 1):
            alone = self.single_stage(m)[a] <= goal
            cost[m - 1, columns] = np.where(alone, stage, np.inf)
            split[m - 1, columns] = a
            replicas[m - 1, columns] = m
            for r in self.table.widths(m):
                low, high = self._window(a, m, r, goal, goal * self.table.inner * r)
                if low >= high:
                    continue
                costs = np.where(
                    self.last_of(m, r)[low:high] <= goal,
                    (cost[m - r - 1, low:high] + outputs[low:high] + stage)[:, None],
                    np.inf,
                )
                at = costs.argmin(axis=0)
                least = costs[at, np.arange(len(at))]
                better = least < cost[m - 1, columns]
                cost[m - 1, columns] = np.where(better, least, cost[m - 1, columns])
                split[m - 1, columns] = np.where(better, at + low, split[m - 1, columns])
                replicas[m - 1, columns] = np.where(better, r, replicas[m - 1, columns])

    def _window(self, a: int, m: int, r: int, worst: float, last: float) -> tuple[int, int]:
        """Return the splits that may matter, as a range of states.

        Args:
            a: where the pipelines begin.
            m: components in all.
            r: components of the last stage.
            worst: seconds that no part may exceed: what is before the last stage can do no more
                than its components do in that time.
            last: compute that the last stage of pipelines to the first column can hold.
        """
        compute = self.table.problem.states.compute_s
        slack = _EPSILON * float(compute[-1])
        least = float(compute[self.first]) - last - slack
        most = float(compute[a]) + self.table.inner * (m - r) * worst + slack
        low = max(a + 1, bisect_left(compute, least))
        return low, min(self.last, bisect_right(compute, most))

    def single_stage(self, m: int) -> Floats:
        """Return A of a single stage of m replicas; shape (last, width)."""
        if self.table.problem.straight and m > 1:
            return np.full_like(self.parameters, np.inf)
        return self._stage(m, m, shared=self._components_below())

    def last_of(self, m: int, r: int) -> Floats:
        """Return the time of the last stage, of r of m components, and crossing: (last, width)."""
        key = (
            r,
            self.table.behind(m, r, self.table.waiting)
            if self.table.problem.memory is not None
            else 0,
        )
        if key not in self._last_of:
            stage = self._stage(m, r, shared=1)
            for crossing in self._crossings(r):
                np.maximum(stage, crossing, out=stage)
            self._last_of[key] = stage
        return self._last_of[key]

    def _components_below(self) -> int:
        level = self.table.level
        return self.table.problem.machines[level - 1] if level else 1

    def _below(self, m: int, r: int) -> Floats:
        """Return V for the last stage, of r replicas, of m components; shape (last, width)."""
        table = self.table
        key = table.behind(m, r, table.waiting) if table.problem.memory is not None else 0
        if key not in self._values:
            self._values[key] = table.tables.below(table.level, key, self.first, self.last)
        return self._values[key]

    def _stage(self, m: int, r: int, *, shared: int) -> Floats:
        table = self.table
        bandwidth = table.problem.bandwidths[table.level]
        value = self._below(m, r)
        if table.problem.paper:
            return np.maximum(value, self.parameters * (2 * (r - 1) / bandwidth)) / r
        return (value + self.parameters * (4 * (r - 1) / (bandwidth * r) / shared)) / r

    def _crossings(self, r: int) -> Iterator[Floats]:
        problem = self.table.problem
        bandwidth = problem.bandwidths[self.table.level]
        outputs = problem.states.output_bytes
        if problem.paper:
            yield 2 * outputs[: self.last, None] / (bandwidth * (problem.compression or 1.0))
        elif problem.compression is not None:
            per_byte = 2 / (bandwidth * r * problem.compression)
            yield outputs[: self.last, None] * per_byte
            leaving = outputs[None, self.first : self.last] * per_byte
            full = len(outputs) - 1
            if self.last > full:
                leaving[0, full - self.first] = 0.0
            yield leaving
