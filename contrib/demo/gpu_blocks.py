"""Place of each run in the picture: rows are GPUs, times count from the first submission.

Times come from sacct. sacct does not keep which of a node's GPUs a run had: those are taken from
squeue during the run, else from the rows that are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from contrib.demo.sacct import Attempt

Rows = Mapping[tuple[str, int], int]
Placements = Mapping[tuple[str, int], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Adjacent rows of one run, `top` to `bottom`.

    Attributes:
        gpus: GPUs of the whole run.
        first: whether it is the uppermost block of the run.
    """

    name: str
    start: float
    end: float
    top: int
    bottom: int
    gpus: int
    first: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Time that a job spent waiting; `between_runs`: not before its first run."""

    name: str
    start: float
    end: float
    between_runs: bool


def beginning(attempts: Mapping[str, Sequence[Attempt]]) -> float:
    """Return when the first job was submitted, in epoch seconds."""
    return min((a.submit for runs in attempts.values() for a in runs), default=0.0)


def blocks(
    attempts: Mapping[str, Sequence[Attempt]], rows: Rows, placements: Placements
) -> list[Block]:
    """Return the blocks of all runs."""
    zero = beginning(attempts)
    taken: list[tuple[int, float, float]] = []
    all_blocks = []
    for name, runs in attempts.items():
        for attempt in (a for a in runs if a.ran):
            assert attempt.start is not None
            start, end = attempt.start - zero, (attempt.end or attempt.start) - zero
            placement = placements.get((name, attempt.run), {})
            run_rows: list[int] = []
            for node in attempt.nodes:
                known = [rows[node, i] for i in placement.get(node, ()) if (node, i) in rows]
                share = attempt.gpus // len(attempt.nodes)
                free = _free([r for (n, _), r in rows.items() if n == node], taken, start, end)
                run_rows += known or free[:share]
            taken += [(r, start, end) for r in run_rows]
            all_blocks += [
                Block(
                    name=name,
                    start=start,
                    end=end,
                    top=top,
                    bottom=bottom,
                    gpus=attempt.gpus,
                    first=top == min(run_rows),
                )
                for top, bottom in adjacent(run_rows)
            ]
    return all_blocks


def waits(attempts: Mapping[str, Sequence[Attempt]]) -> list[Wait]:
    """Return all waits: from submission to start, and from a run's end to the next start."""
    zero = beginning(attempts)
    all_waits = []
    for name, runs in attempts.items():
        since, between_runs = runs[0].submit, False
        for attempt in runs:
            if attempt.start is not None:
                end = attempt.start - zero
                wait = Wait(name=name, start=since - zero, end=end, between_runs=between_runs)
                all_waits.append(wait)
                since, between_runs = attempt.end or attempt.start, True
    return sorted(all_waits, key=lambda w: (w.start, w.name))


def adjacent(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the (first, last) of each sequence of consecutive rows.

    >>> adjacent([4, 5, 7])
    [(4, 5), (7, 7)]
    """
    ranges: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if ranges and ranges[-1][1] == n - 1:
            ranges[-1] = (ranges[-1][0], n)
        else:
            ranges.append((n, n))
    return ranges


def _free(
    node: Sequence[int], taken: Sequence[tuple[int, float, float]], start: float, end: float
) -> list[int]:
    """Return a node's rows, those first that are free at that time."""
    busy = {r for r, s, e in taken if s < end and start < e}
    return sorted(node, key=lambda r: (r in busy, r))
