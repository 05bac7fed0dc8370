"""The longest wait under policy `goodput`: which jobs come before all others.

A job that waited for `[goodput] wait_s` is *overdue*. Overdue jobs that the program leaves out get
their smallest sizes, in the order of their waits, and it divides the rest: other jobs shrink, and
with `queue = "controller"` are suspended. While a job is overdue, no job is suspended that started
less than `wait_s` ago, so that two jobs do not take GPUs from each other in turn.

So a job waits at most `wait_s` and one round, unless the smallest sizes of jobs that are overdue
themselves, or started less than `wait_s` ago, leave too few of all GPUs that it could use, or too
little of a limit that counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate
from slurm_elastic.policies.sia.round_arrays import Bools, Floats, Ints, RoundArrays


def waiting_since(
    question: Question, jobs: Sequence[Candidate], state: Mapping[str, float]
) -> dict[str, float]:
    """Return since when (epoch s) each job without GPUs waits, by its key.

    Args:
        question: of this round.
        jobs: of the question.
        state: what the last round returned.
    """
    now = question.snapshot.time
    asked = {job.job.key for job in jobs}
    present = {job.key for job in question.snapshot.jobs if job.allocation is None}
    waits = {key: since for key, since in state.items() if key in present and key not in asked}
    for job in jobs:
        if job.held is None:
            began = now if job.job.run else min(now, job.job.submit_time)
            waits[job.job.key] = min(now, state.get(job.job.key, began))
    return waits


def overdue(
    question: Question, jobs: Sequence[Candidate], waits: Mapping[str, float], wait_s: float
) -> list[int]:
    """Return the rows of overdue jobs, the longest wait first.

    Args:
        question: of this round.
        jobs: of the question.
        waits: from `waiting_since`.
        wait_s: see the module; 0: no job is ever overdue.
    """
    now = question.snapshot.time
    rows = [
        row
        for row, job in enumerate(jobs)
        if job.held is None and wait_s > 0 and now - waits[job.job.key] >= wait_s
    ]
    return sorted(rows, key=lambda row: (waits[jobs[row].job.key], jobs[row].job.job_id))


def recently_started(question: Question, jobs: Sequence[Candidate], wait_s: float) -> Bools:
    """Return [J] which jobs hold GPUs, and have been running for less than `wait_s`."""
    now = question.snapshot.time
    return np.array(
        [
            job.held is not None and job.job.start_time is not None and start + wait_s > now
            for job, start in ((job, job.job.start_time or 0.0) for job in jobs)
        ],
        dtype=bool,
    )


def smallest_columns(arrays: RoundArrays) -> Ints:
    """Return [J, T] the column of each job's smallest size on each type; -1: there is none."""
    columns = arrays.configurations
    smallest = np.full((len(arrays.candidates), len(columns.types)), -1, dtype=np.int64)
    for kind in range(len(columns.types)):
        (of_kind,) = np.nonzero(columns.kind == kind)
        if not len(of_kind):
            continue
        of_kind = of_kind[np.argsort(columns.gpus[of_kind], kind="stable")]
        valid = arrays.valid[:, of_kind]
        rows = np.flatnonzero(valid.any(axis=1))
        smallest[rows, kind] = of_kind[valid[rows].argmax(axis=1)]
    return smallest


class LimitRoom:
    """Rest of each limit of a round while overdue jobs get their sizes."""

    def __init__(self, limits: Sequence[LimitRow], chosen: Ints) -> None:
        """Count what jobs take.

        Args:
            limits: of the round.
            chosen: [J] column of each job that takes something, -1: none.
        """
        self._left = [limit.left - limit.used(chosen) for limit in limits]
        self._use: dict[int, list[tuple[int, Floats]]] = {}
        for i, limit in enumerate(limits):
            for member, row in enumerate(limit.jobs.tolist()):
                self._use.setdefault(row, []).append((i, limit.use[member]))

    def fits(self, row: int, column: int) -> bool:
        """Return whether a job may have this configuration."""
        return all(use[column] <= self._left[i] + 1e-6 for i, use in self._use.get(row, ()))

    def take(self, row: int, column: int) -> None:
        """Count a job that got this configuration."""
        for i, use in self._use.get(row, ()):
            self._left[i] -= float(use[column])


def granted(
    arrays: RoundArrays,
    smallest: Ints,
    rows: Sequence[int],
    gain: Floats,
    *,
    room: Ints,
    limit_room: LimitRoom,
) -> dict[int, int]:
    """Return the column of each overdue job that can run, by its row.

    Args:
        arrays: of the round.
        smallest: from `smallest_columns`.
        rows: overdue jobs, the first in the order first.
        gain: [J, C] of several types that have room the best counts.
        room: [T] GPUs that overdue jobs may take: all but the smallest sizes of jobs that go on.
        limit_room: the same for limits; what is granted is taken from it.
    """
    left = room.copy()
    columns = arrays.configurations
    chosen: dict[int, int] = {}
    for row in rows:
        options = [
            int(column)
            for column in smallest[row]
            if column >= 0
            and columns.gpus[column] <= left[columns.kind[column]]
            and limit_room.fits(row, int(column))
        ]
        if options:
            best = max(options, key=lambda column: (gain[row, column], -column))
            chosen[row] = best
            limit_room.take(row, best)
            left[columns.kind[best]] -= columns.gpus[best]
    return chosen
