"""Table of docs/slurm-versions.md, from the results of trials."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from tests.releases.release_trial import STEPS

HEAD = ("Slurm", "reader", *STEPS.values(), "Slurm's part of a change, s (median, longest, of)")


def lines(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the table as Markdown, and a line for each failure.

    Args:
        results: as `ReleaseTrial.run` returns them.
    """
    table = [_row(HEAD), _row(["---"] * len(HEAD))]
    failures = []
    for result in results:
        steps = result["steps"]
        cells = [_cell(steps[s]) if s in steps else "not tried" for s in STEPS]
        if failure := result.get("failure"):
            failed = str(failure).partition(":")[0]
            cells[list(STEPS).index(failed)] = "**no**"
            failures.append(f"{result['release']}: {str(failure).splitlines()[0]}")
        times = result.get("slurm_s") or []
        part = f"{median(times):.1f}, {max(times):.1f}, {len(times)}" if times else "-"
        table.append(_row([result["release"], result["reader"] or "-", *cells, part]))
    return [*table, *(["", *failures] if failures else [])]


def _cell(seconds: float | None) -> str:
    return "-" if seconds is None else f"yes, {seconds:.0f} s"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
