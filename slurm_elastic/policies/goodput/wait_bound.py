"""The longest wait under policy `goodput`: which jobs come before all others.

A job that waited for `[goodput] wait_s` is *overdue*. Overdue jobs that the program leaves out get
their smallest sizes, in the order of their waits, and it divides the rest: other jobs shrink, and
with `queue = "controller"` are suspended. While a job is overdue, no job is suspended that started
less than `wait_s` ago, so that two jobs do not take GPUs from each other in turn; and at no time
one that was overdue itself before it started.

So a job waits at most `wait_s` and two rounds (in the first it is overdue, in the second the GPUs
that others give up are free), unless the smallest sizes of jobs that are overdue
themselves, or started less than `wait_s` ago, leave too few of all GPUs that it could use, or too
little of a limit that counts it, or scattered over nodes; and as many rounds more as a job that is
to move off these GPUs waits for those that it moves to. A job that is suspended before it has run
for `wait_s` waits on from where its wait ended: so the bound holds for all of its waits until it
has run for `wait_s`, and a job runs for nearly half of the time at least.

Overdue jobs choose their places first, and wait for no nearer ones (`[placement] mode = "delay"`).
Where what the program gives them is not free yet, they start at the smallest size that is free on
any type.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.milp.limit_rows import LimitRow
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate
from slurm_elastic.policies.sia.round_arrays import Bools, Floats, Ints, RoundArrays


def waiting_since(
    question: Question,
    jobs: Sequence[Candidate],
    state: Mapping[str, float],
    waited: Mapping[str, float],
    last_s: float,
) -> dict[str, float]:
    """Return since when (epoch s) each job without GPUs waits, by its key.

    Args:
        question: of this round.
        jobs: of the question.
        state: what the last round returned.
        waited: from `waited_before`.
        last_s: when the last round was; a job that was suspended since waits from then on.
    """
    now = question.snapshot.time
    asked = {job.job.key for job in jobs}
    present = {job.key for job in question.snapshot.jobs if job.allocation is None}
    waits = {key: since for key, since in state.items() if key in present and key not in asked}
    for job in jobs:
        key = job.job.key
        if job.held is None:
            began = min(now, last_s if job.job.run else job.job.submit_time)
            waits[key] = min(now, state.get(key, began - waited.get(key, 0.0)))
    return waits


def waited_before(
    question: Question, state: Mapping[str, float], waits: Mapping[str, float], wait_s: float
) -> dict[str, float]:
    """Return how long (s) jobs waited before they started less than `wait_s` ago, by their keys.

    Args:
        question: of this round.
        state: what the last round returned.
        waits: since when jobs waited in the last round.
        wait_s: see the module.
    """
    now = question.snapshot.time
    waited = {}
    for job in question.snapshot.jobs:
        before = state.get(job.key, 0.0)
        if job.allocation is None:
            # Suspended since the last round; `waiting_since` counts it on.
            if before and job.key not in waits:
                waited[job.key] = before
            continue
        started = job.start_time if job.start_time is not None else now
        if job.key in waits:
            before = max(0.0, started - waits[job.key])
        if before and now - started < wait_s:
            waited[job.key] = before
    return waited


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


def protected(
    question: Question, jobs: Sequence[Candidate], waited: Mapping[str, float], wait_s: float
) -> tuple[Bools, Bools]:
    """Return [J] which jobs started less than `wait_s` ago, and which of these were overdue.

    Args:
        question: of this round.
        jobs: of the question.
        waited: from `waited_before`.
        wait_s: see the module.
    """
    now = question.snapshot.time
    recent = np.zeros(len(jobs), dtype=bool)
    late = np.zeros(len(jobs), dtype=bool)
    for row, job in enumerate(jobs):
        start = job.job.start_time
        recent[row] = job.held is not None and start is not None and start + wait_s > now
        late[row] = recent[row] and waited.get(job.job.key, 0.0) >= wait_s
    return recent, late


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

    def __init__(self, limits: Sequence[LimitRow], chosen: Ints, rows: Sequence[int]) -> None:
        """Count the use of the limits by jobs that have a size.

        Args:
            limits: of the round.
            chosen: [J] column of each job that takes something, -1: none.
            rows: jobs that may take more.
        """
        self._left = [limit.left - limit.used(chosen) for limit in limits]
        self._use: dict[int, list[tuple[int, Floats]]] = {}
        asked = np.zeros(len(chosen), dtype=bool)
        asked[list(rows)] = True
        for i, limit in enumerate(limits):
            for member in np.flatnonzero(asked[limit.jobs]).tolist():
                self._use.setdefault(int(limit.jobs[member]), []).append((i, limit.use[member]))

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


def urgent_first(
    proposals: Sequence[Proposal],
    arrays: RoundArrays,
    overdue: Sequence[int],
    values: Floats,
    *,
    kept: Sequence[int],
) -> tuple[Proposal, ...]:
    """Return the proposals of overdue jobs, urgent and with all their smallest sizes, then others.

    Args:
        proposals: by row.
        arrays: of the round.
        overdue: rows of overdue jobs, the first in the order first.
        values: [J, C] of the alternatives.
        kept: rows of running jobs that are not suspended: urgent, too.
    """
    if not overdue and not kept:
        return tuple(proposals)
    smallest, columns = smallest_columns(arrays), arrays.configurations
    urgent, first = set(kept), []
    for row in overdue:
        proposal = proposals[row]
        *chosen, waiting = proposal.alternatives
        listed = {(a.gpus, a.gpu_type) for a in chosen}
        further = [int(column) for column in smallest[row] if column >= 0] if chosen else []
        for column in sorted(further, key=lambda c: (-values[row, c], c)):
            gpus, gpu_type = columns.size_and_type(column)
            if (gpus, gpu_type) not in listed:
                value, reason = float(values[row, column]), Reason("assigned-not-free")
                chosen.append(Alternative(gpu_type=gpu_type, gpus=gpus, value=value, reason=reason))
        ranked = dataclasses.replace(proposal, alternatives=(*chosen, waiting))
        first.append(_urgent(ranked))
    overdue_rows = set(overdue)
    others = (
        _urgent(proposal) if row in urgent else proposal
        for row, proposal in enumerate(proposals)
        if row not in overdue_rows
    )
    return (*first, *others)


def _urgent(proposal: Proposal) -> Proposal:
    """Return a proposal of which all alternatives are urgent."""
    alternatives = (dataclasses.replace(a, urgent=True) for a in proposal.alternatives)
    return dataclasses.replace(proposal, alternatives=tuple(alternatives))
