"""Genetic search over allocations, as Pollux places jobs (OSDI'21, section 4.2.1).

An individual is a matrix of GPUs [jobs, nodes]. A generation mutates elements at random, mixes the
rows of two parents chosen by tournament, repairs what does not fit, and keeps the fittest. Repair
takes GPUs away at random until every node has enough, and leaves at most one distributed job on a
node (the paper's avoidance of interference).

Fitness is the power mean of the jobs' speedups, p < 0:

    FITNESS_p(A) = (1/J sum_j SPEEDUP_j(A_j)^p)^(1/p)

Jobs without GPUs, and with fewer than they need, count with a small speedup. Ours, to need fewer
generations: the search begins at the present allocation, a mutation changes few rows, half of these
by a number of GPUs on neighbouring nodes, and a row that exceeds what a job may have is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

POPULATION, GENERATIONS = 40, 30
#: Speedup of a job that gets nothing; 0 would make all such allocations equal.
_LEAST_SPEEDUP = 0.02
#: Rows that a mutation changes, on average.
_ROWS = 2.0


@dataclass(frozen=True, eq=False, kw_only=True)
class PlacementProblem:
    """J jobs on N nodes.

    Attributes:
        capacity: [N] GPUs of each node.
        speedup: [J, 2, G + 1] by whether the job is distributed and by its GPUs; 0: cannot run.
        least, most: [J] smallest and largest number of GPUs, at most G.
        present: [J, N] GPUs that each job holds.
        factor: [J] of the speedup in any allocation but the present one.
        near: [J, N] nodes on which a job may be changed in place; None: no job can be.
        near_factor: [J, G + 1] of the speedup on those nodes alone, by the number of GPUs.
        power: p.
    """

    capacity: Ints
    speedup: Floats
    least: Ints
    most: Ints
    present: Ints
    factor: Floats
    near: Bools | None = None
    near_factor: Floats | None = None
    power: float = -1.0

    def fitness(self, population: Ints) -> Floats:
        """Return the fitness of [P, J, N] allocations."""
        gpus = population.sum(axis=2)
        spread = ((population > 0).sum(axis=2) > 1).astype(np.int64)
        rows = np.arange(len(self.most))
        speedup = self.speedup[rows[None, :], spread, gpus]
        same = (population == self.present[None]).all(axis=2)
        factor = self.factor[None, :]
        if self.near is not None and self.near_factor is not None:
            stays = ~((population > 0) & ~self.near[None]).any(axis=2)
            factor = np.where(stays, self.near_factor[rows[None, :], gpus], factor)
        speedup = np.where(same, speedup, speedup * factor)
        speedup = np.maximum(speedup, _LEAST_SPEEDUP)
        mean = (speedup**self.power).mean(axis=1)
        return np.asarray(mean ** (1.0 / self.power))


def search(
    problem: PlacementProblem,
    *,
    seed: int,
    population: int = POPULATION,
    generations: int = GENERATIONS,
) -> Ints:
    """Return the fittest allocation found, [J, N]; the same seed gives the same answer."""
    jobs, nodes = problem.present.shape
    if not jobs or not nodes:
        return problem.present
    rng = np.random.default_rng(seed)
    first = _repaired(problem, problem.present[None].copy(), rng)
    members = np.repeat(first, population, axis=0)
    members[1:] = _repaired(problem, _mutated(problem, members[1:], rng), rng)
    fitness = problem.fitness(members)
    for _ in range(generations):
        mothers, fathers = (_tournament(fitness, rng) for _ in range(2))
        mixed = rng.random((population, jobs, 1)) < 0.5
        children = np.where(mixed, members[mothers], members[fathers])
        children = _repaired(problem, _mutated(problem, children, rng), rng)
        members = np.concatenate([members, children])
        fitness = np.concatenate([fitness, problem.fitness(children)])
        best = np.argsort(-fitness, kind="stable")[:population]
        members, fitness = members[best], fitness[best]
    return np.asarray(members[0])


def _tournament(fitness: Floats, rng: np.random.Generator) -> Ints:
    """Return the fitter ones of random pairs."""
    pairs = rng.integers(0, len(fitness), size=(2, len(fitness)))
    fitter = fitness[pairs[0]] >= fitness[pairs[1]]
    return np.asarray(np.where(fitter, pairs[0], pairs[1]), dtype=np.int64)


def _mutated(problem: PlacementProblem, members: Ints, rng: np.random.Generator) -> Ints:
    """Return members with some rows' elements drawn anew, each with probability 1/N."""
    count, jobs, nodes = members.shape
    rows = rng.random((count, jobs, 1)) < min(1.0, _ROWS / jobs)
    elements = rng.random((count, jobs, nodes)) < 1.0 / nodes
    drawn = rng.integers(0, problem.capacity + 1, size=members.shape)
    packed = rng.random((count, jobs, 1)) < 0.5
    changed = np.where(packed, _packed(problem, count, rng), np.where(elements, drawn, members))
    return np.where(rows, changed, members)


def _packed(problem: PlacementProblem, count: int, rng: np.random.Generator) -> Ints:
    """Return rows with a random number of GPUs on neighbouring nodes, from a random one on."""
    jobs, nodes = problem.present.shape
    first = rng.integers(0, nodes, size=(count, jobs, 1))
    order = (first + np.arange(nodes)) % nodes
    gpus = rng.integers(problem.least, problem.most + 1, size=(count, jobs))[:, :, None]
    room = problem.capacity[order]
    before = np.cumsum(room, axis=2) - room
    rows = np.zeros((count, jobs, nodes), dtype=np.int64)
    np.put_along_axis(rows, order, np.clip(gpus - before, 0, room), axis=2)
    return rows


def _repaired(problem: PlacementProblem, members: Ints, rng: np.random.Generator) -> Ints:
    """Return members that fit: the most of each job, the nodes, one distributed job on a node."""
    before = np.cumsum(members, axis=2) - members
    members = np.clip(problem.most[None, :, None] - before, 0, members)
    count, jobs, _ = members.shape
    order = np.argsort(rng.random((count, jobs)), axis=1)
    members = np.take_along_axis(members, order[:, :, None], axis=1)
    distributed = ((members > 0).sum(axis=2) > 1)[:, :, None] & (members > 0)
    # The first of them in a random order keeps the node.
    members = np.where(distributed & (np.cumsum(distributed, axis=1) > 1), 0, members)
    before = np.cumsum(members, axis=1) - members
    members = np.clip(problem.capacity[None, None, :] - before, 0, members)
    back = np.empty_like(order)
    np.put_along_axis(back, order, np.arange(jobs)[None, :].repeat(count, axis=0), axis=1)
    return np.take_along_axis(members, back[:, :, None], axis=1)
