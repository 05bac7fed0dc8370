"""Ranked alternatives of each job, from the choice of a round's program."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.sia.round_arrays import Bools, Floats, Ints, RoundArrays
from slurm_elastic.policies.sia.sia_reasons import SiaReasons

#: Smaller sizes offered when the chosen one finds no place.
_SMALLER = 4
_LARGEST_WITH_PLACE = Reason("largest-with-place")
_ASSIGNED_NOT_FREE = Reason("assigned-not-free")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProgramInputs:
    """Arrays of a round and the inputs of its program.

    Attributes:
        gain: [J, C] goodput in GPUs of the slowest type, before restarts; 0 where not valid.
        factor: [J] restart factor.
        in_place: [J, C] whether the job can reach the configuration in place.
        scaled: [J, C] gain times restart factor, the held column excepted.
        requeued: [J, C] the same if every change is a requeue.
        cost: [J, C] coefficients that the program minimises.
    """

    table: RoundArrays
    gain: Floats
    factor: Floats
    in_place: Bools
    scaled: Floats
    requeued: Floats
    cost: Floats


def ranked_proposals(
    weighed: ProgramInputs,
    choice: Ints,
    *,
    limit_hit: bool,
    explained: Callable[[int, Reason], Reason] | None = None,
) -> tuple[Proposal, ...]:
    """Rank for each job the chosen shape, smaller ones of the type, the present shape, and waiting.

    Args:
        weighed: arrays of the round.
        choice: [J] column that the program chose, -1: none.
        limit_hit: whether the time limit ended the search for it.
        explained: adds to the reason of a row's chosen shape.
    """
    arrays = weighed.table
    columns = arrays.configurations
    reasons = SiaReasons(arrays, weighed.gain, weighed.scaled, choice)
    smaller = _smaller_columns(weighed, choice)
    waiting: dict[tuple[int, str], Alternative] = {}
    proposals = []

    def noted(reason: Reason) -> Reason:
        return Reason("solver-limit", reason=reason) if limit_hit else reason

    held_columns = arrays.held.tolist()
    for row, (job, column) in enumerate(zip(arrays.candidates, choice.tolist(), strict=True)):
        held = held_columns[row]
        ranked = _Ranking(weighed, row, held)
        if column < 0:
            ranked.alternatives.append(_wait(noted(reasons.waits(row))))
        else:
            reason = noted(reasons.chosen(row))
            ranked.add(column, explained(row, reason) if explained else reason)
            for other in smaller.get(row, ()):
                ranked.add(other, _LARGEST_WITH_PLACE)
        if held >= 0:
            ranked.add(held, _ASSIGNED_NOT_FREE)
        if column >= 0:
            shape = columns.size_and_type(column)
            if shape not in waiting:
                gpus, gpu_type = shape
                waiting[shape] = _wait(noted(Reason("gpus-not-free", gpus=gpus, gpu_type=gpu_type)))
            ranked.alternatives.append(waiting[shape])
        proposals.append(Proposal(job_id=job.job.job_id, alternatives=tuple(ranked.alternatives)))
    return tuple(proposals)


class _Ranking:
    """Alternatives of one row, best first; each shape once."""

    def __init__(self, weighed: ProgramInputs, row: int, held: int) -> None:
        self.alternatives: list[Alternative] = []
        self._weighed = weighed
        self._row = row
        self._held = held
        self._shapes: set[tuple[int, str]] = set()

    def add(self, column: int, reason: Reason) -> None:
        """Add a configuration; what was weighed as a change in place also as a requeue."""
        weighed, row = self._weighed, self._row
        gpus, gpu_type = shape = weighed.table.configurations.size_and_type(column)
        if shape in self._shapes:
            return
        self._shapes.add(shape)
        in_place = bool(weighed.in_place[row, column])
        value = float(weighed.scaled[row, column])
        first = Alternative(
            gpu_type=gpu_type, gpus=gpus, value=value, reason=reason, in_place=in_place
        )
        self.alternatives.append(first)
        if in_place:
            requeued = float(weighed.requeued[row, column])
            if requeued > weighed.scaled[row, self._held]:
                self.alternatives.append(dataclasses.replace(first, value=requeued, in_place=False))


def _wait(reason: Reason) -> Alternative:
    return Alternative(gpu_type="", gpus=0, value=0.0, reason=reason)


def _smaller_columns(weighed: ProgramInputs, choice: Ints) -> dict[int, list[int]]:
    """Return the largest smaller sizes of the chosen type that beat what a job holds, by row."""
    arrays = weighed.table
    columns = arrays.configurations
    rows = np.flatnonzero((choice >= 0) & (choice != arrays.held))
    chosen, held = choice[rows], arrays.held[rows]
    floor = np.where(held >= 0, weighed.scaled[rows, held], 0.0)
    smaller = arrays.valid[rows] & (columns.kind == columns.kind[chosen][:, None])
    smaller &= columns.gpus < columns.gpus[chosen][:, None]
    smaller &= weighed.scaled[rows] > floor[:, None]
    at, column = np.nonzero(smaller)
    order = np.lexsort((column, -columns.gpus[column], at))
    kept: dict[int, list[int]] = {}
    for row, c in zip(rows[at[order]].tolist(), column[order].tolist(), strict=True):
        of_row = kept.setdefault(row, [])
        if len(of_row) < _SMALLER:
            of_row.append(c)
    return kept
