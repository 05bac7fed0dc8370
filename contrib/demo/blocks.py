"""Where each run lies in the picture: rows are GPUs, times count from the first submission.

Times come from sacct. Which of a node's GPUs a run had, sacct does not keep:
that is what squeue showed meanwhile, else the rows that nobody else has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from contrib.demo.accounting import Attempt

Rows = Mapping[tuple[str, int], int]
Placements = Mapping[tuple[str, int], Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One run's adjacent rows, `top` to `bottom`.

    Attributes:
        gpus: of the whole run.
        first: whether it is the run's uppermost block.
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
    """A time that a job spent waiting; `again`: between two of its runs."""

    name: str
    start: float
    end: float
    again: bool


def beginning(attempts: Mapping[str, Sequence[Attempt]]) -> float:
    """When the first job was submitted, in epoch seconds."""
    return min((a.submit for runs in attempts.values() for a in runs), default=0.0)


def blocks(
    attempts: Mapping[str, Sequence[Attempt]], rows: Rows, placements: Placements
) -> list[Block]:
    """The blocks of all runs."""
    zero = beginning(attempts)
    taken: list[tuple[int, float, float]] = []
    found = []
    for name, runs in attempts.items():
        for run, attempt in enumerate(a for a in runs if a.ran):
            assert attempt.start is not None
            start, end = attempt.start - zero, (attempt.end or attempt.start) - zero
            seen = placements.get((name, run), {})
            mine: list[int] = []
            for node in attempt.nodes:
                known = [rows[node, i] for i in seen.get(node, ()) if (node, i) in rows]
                share = attempt.gpus // len(attempt.nodes)
                free = _free([r for (n, _), r in rows.items() if n == node], taken, start, end)
                mine += known or free[:share]
            taken += [(r, start, end) for r in mine]
            found += [
                Block(
                    name=name,
                    start=start,
                    end=end,
                    top=top,
                    bottom=bottom,
                    gpus=attempt.gpus,
                    first=top == min(mine),
                )
                for top, bottom in adjacent(mine)
            ]
    return found


def waits(attempts: Mapping[str, Sequence[Attempt]]) -> list[Wait]:
    """All times between submission and start, and between a run's end and the next one's start."""
    zero = beginning(attempts)
    found = []
    for name, runs in attempts.items():
        since, again = runs[0].submit, False
        for attempt in runs:
            if attempt.start is not None:
                end = attempt.start - zero
                found.append(Wait(name=name, start=since - zero, end=end, again=again))
                since, again = attempt.end or attempt.start, True
    return sorted(found, key=lambda w: (w.start, w.name))


def adjacent(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Runs of consecutive rows.

    >>> adjacent([4, 5, 7])
    [(4, 5), (7, 7)]
    """
    found: list[tuple[int, int]] = []
    for n in sorted(numbers):
        if found and found[-1][1] == n - 1:
            found[-1] = (found[-1][0], n)
        else:
            found.append((n, n))
    return found


def _free(
    node: Sequence[int], taken: Sequence[tuple[int, float, float]], start: float, end: float
) -> list[int]:
    """A node's rows, those first that nobody has at that time."""
    busy = {r for r, s, e in taken if s < end and start < e}
    return sorted(node, key=lambda r: (r in busy, r))
