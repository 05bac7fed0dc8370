"""One generation of schedules: the published operators of ONES (SC'21), section by section.

A schedule is a row of GPUs with a job on each, or none. Refresh, crossover, mutation, filling,
reordering (block_order.py) and selection are pure; draws come from the caller's generator. Sizes
decide a schedule's score, not its order, so only the selected ones are reordered.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.policies.ones.block_order import EMPTY, reordered

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

POPULATION = 16
_CROSSED, _TAKEN_OFF = 0.5, 0.3


@dataclass(frozen=True, eq=False, kw_only=True)
class EvolvingJobs:
    """J jobs in order of submission.

    Attributes:
        known: [J] whether the job has run for long enough to be predicted.
        least: [J] GPUs that a new job gets; published: 1.
        room: [J] GPUs that the job is granted; 0: it never ran.
        limit: [J] its limit, up to which it takes what others leave.
        single_s: [J] predicted remaining seconds on one GPU.
        service: [J, G + 1] predicted remaining GPU seconds by number of GPUs; 0 for unknown jobs.
    """

    known: Bools
    least: Ints
    room: Ints
    limit: Ints
    single_s: Floats
    service: Floats

    def __len__(self) -> int:
        return len(self.known)


def first_generation(jobs: EvolvingJobs, gpus: int, rng: np.random.Generator) -> Ints:
    """Return random orders of the jobs, each with the GPUs of a new job."""
    rows = np.full((POPULATION, gpus), EMPTY, dtype=np.int64)
    for row in rows:
        order = rng.permutation(len(jobs))
        entries = np.repeat(order, jobs.least[order])[:gpus]
        row[: len(entries)] = entries
    return rows


def next_generation(
    rows: Ints, jobs: EvolvingJobs, present: Ints, rng: np.random.Generator
) -> Ints:
    """Return the schedules of least score among parents and children, the best first.

    Args:
        rows: [K, G] job on each GPU, EMPTY without one.
        jobs: of this generation.
        present: [G] the schedule in effect.
        rng: of all draws.
    """
    gpus = rows.shape[1]
    parents = refreshed(rows, jobs)
    children = within_room(crossed(parents, rng), jobs.room)
    mutants = mutated(parents, jobs, rng)
    rows = np.concatenate([parents, children, mutants])
    sizes = filled(sizes_of(rows, len(jobs)), jobs, gpus)
    best = np.argsort(scores(sizes, jobs), kind="stable")[:POPULATION]
    return reordered(sizes[best], present, orders_of(rows[best], jobs))


def refreshed(rows: Ints, jobs: EvolvingJobs) -> Ints:
    """Return schedules without the entries of a job beyond its room; the first one stays."""
    return within_room(rows, np.maximum(jobs.room, 1))


def within_room(rows: Ints, room: Ints) -> Ints:
    """Return schedules with the first entries of each job only, as many as its room."""
    count = np.zeros(rows.shape, dtype=np.int64)
    for job in range(len(room)):
        own = rows == job
        count[own] = np.cumsum(own, axis=1)[own]
    return np.where(count <= np.append(room, 0)[rows], rows, EMPTY)


def crossed(rows: Ints, rng: np.random.Generator) -> Ints:
    """Return two children of each of K/2 random pairs: at each GPU the entries may change sides."""
    pairs = np.argsort(rng.random((len(rows) // 2, len(rows))), axis=1)[:, :2]
    first, second = rows[pairs[:, 0]], rows[pairs[:, 1]]
    swapped = rng.random(first.shape) < _CROSSED
    return np.concatenate(
        [np.where(swapped, second, first), np.where(swapped, first, second)], axis=0
    )


def mutated(rows: Ints, jobs: EvolvingJobs, rng: np.random.Generator) -> Ints:
    """Return schedules of which jobs that can be predicted are taken off at random."""
    off = np.zeros((len(rows), len(jobs) + 1), dtype=np.bool_)  # the last: EMPTY
    off[:, :-1] = (rng.random((len(rows), len(jobs))) < _TAKEN_OFF) & jobs.known
    return np.where(np.take_along_axis(off, rows, axis=1), EMPTY, rows)


def orders_of(rows: Ints, jobs: EvolvingJobs) -> Ints:
    """Return all jobs in the order of each schedule, [K, J].

    Those of the schedule come by their first GPU, then those that filling adds, in its order.
    """
    count, gpus = rows.shape
    added = np.empty(len(jobs), dtype=np.int64)
    added[np.lexsort((jobs.single_s, jobs.known))] = gpus + np.arange(len(jobs))
    added[~jobs.known] = gpus + np.arange((~jobs.known).sum())
    place = np.tile(added, (count, 1))
    at, gpu = np.nonzero(rows != EMPTY)
    np.minimum.at(place, (at, rows[at, gpu]), gpu)
    return np.argsort(place, axis=1, kind="stable")


def filled(sizes: Ints, jobs: EvolvingJobs, gpus: int) -> Ints:
    """Return schedules with their empty entries given away.

    One GPU, or its least, to each new job, in order of submission; then jobs that can be predicted,
    the shortest first, up to their room, and once more up to their limit.
    """
    new = np.where(jobs.known, 0, 1)
    shortest = np.flatnonzero(jobs.known)
    shortest = shortest[np.argsort(jobs.single_s[shortest], kind="stable")]
    room = np.maximum(jobs.room, jobs.least)
    for order, most in (
        (np.flatnonzero(new), jobs.least),
        (shortest, room),
        (shortest, np.maximum(room, jobs.limit)),
    ):
        wanted = np.maximum(most[order] - sizes[:, order], 0)
        free = gpus - sizes.sum(axis=1, keepdims=True)
        left = free - (np.cumsum(wanted, axis=1) - wanted)
        given = np.minimum(np.maximum(left, 0), wanted)
        sizes = sizes.copy()
        sizes[:, order] += given
    return sizes


def scores(sizes: Ints, jobs: EvolvingJobs) -> Floats:
    """Return the [K] GPU seconds that the jobs of each schedule still need in it."""
    return np.asarray(jobs.service[np.arange(len(jobs)), sizes].sum(axis=1))


def sizes_of(rows: Ints, jobs: int) -> Ints:
    """Return the [K, J] GPUs of each job."""
    sizes = np.zeros((len(rows), jobs), dtype=np.int64)
    at, column = np.nonzero(rows != EMPTY)
    np.add.at(sizes, (at, rows[at, column]), 1)
    return sizes
