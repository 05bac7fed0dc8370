"""Progress of files and simulations on stderr: bars on a terminal; else, of simulations, lines."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import click

from slurm_elastic.cli.formatting import clean

#: Takes the index of a simulation, its complete jobs, and all its jobs.
Report = Callable[[int, int, int], None]

#: Seconds between plain lines.
_LINE_EVERY_S = 30.0


def shown(names: Sequence[str], sizes: Sequence[int]) -> AbstractContextManager[Report]:
    """Return a context that displays the progress of simulations of these names and jobs."""
    return _bar(names, sizes) if sys.stderr.isatty() else _lines(sum(sizes))


@contextlib.contextmanager
def reading(name: str) -> Iterator[Callable[[float], None] | None]:
    """Show a bar while a file is read, on a terminal; the value takes the part that is read."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: PLC0415

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"reading {clean(name)}", total=1.0)

        def report(part: float) -> None:
            progress.update(bar, completed=part)

        yield report


@contextlib.contextmanager
def _bar(names: Sequence[str], sizes: Sequence[int]) -> Iterator[Report]:
    """Show a bar per running simulation, until the end."""
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("jobs"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        overall_task = progress.add_task("simulating", total=sum(sizes)) if len(names) > 1 else None
        rows = [
            progress.add_task(clean(n), total=s, visible=False)
            for n, s in zip(names, sizes, strict=True)
        ]
        completed_jobs = [0] * len(names)

        def report(index: int, complete: int, total: int) -> None:
            completed_jobs[index] = complete
            running = complete < total or overall_task is None
            progress.update(rows[index], completed=complete, total=total, visible=running)
            if overall_task is not None:
                progress.update(overall_task, completed=sum(completed_jobs))

        yield report


@contextlib.contextmanager
def _lines(total: int) -> Iterator[Report]:
    """Print a line at intervals."""
    completed_jobs: dict[int, int] = {}
    last = time.monotonic()

    def report(index: int, complete: int, _: int) -> None:
        nonlocal last
        completed_jobs[index] = complete
        if time.monotonic() - last >= _LINE_EVERY_S:
            last = time.monotonic()
            click.echo(
                f"selastic: {sum(completed_jobs.values())} of {total} jobs simulated", err=True
            )

    yield report
