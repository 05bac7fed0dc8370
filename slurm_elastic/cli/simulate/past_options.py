"""Options that choose jobs of an accounting file, and reading of it with a progress display."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_elastic.cli import formatting
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.simulate import progress

if TYPE_CHECKING:
    from slurm_elastic.simulator.workloads.accounting_trace import AccountingTrace

F = TypeVar("F", bound=Callable[..., Any])


def past_options(prefix: str = "") -> Callable[[F], F]:
    """Return a decorator that adds the options; each help begins with the prefix."""

    def text(sentence: str) -> str:
        return f"{prefix}{sentence[0].lower()}{sentence[1:]}" if prefix else sentence

    def add(command: F) -> F:
        options = (
            click.option(
                "-S", "--start", metavar="TIME", help=text("Only jobs submitted from then on.")
            ),
            click.option(
                "-E", "--end", metavar="TIME", help=text("Only jobs submitted before.")
            ),
            click.option(
                "--partition", metavar="NAME",
                help=text("Only jobs of this partition, or virtual cluster of a trace."),
            ),
            click.option(
                "--completed-only", is_flag=True,
                help=text("Leave out jobs that did not complete."),
            ),
        )  # fmt: skip
        for option in reversed(options):
            command = option(command)
        return command

    return add


def refuse_without_file(
    *, start: str | None, end: str | None, partition: str | None, completed_only: bool
) -> None:
    """Refuse these options where no file is given.

    Raises:
        CliError: names the first one that is given.
    """
    for value, option in (
        (start, "--start"), (end, "--end"), (partition, "--partition"),
        (completed_only, "--completed-only"),
    ):  # fmt: skip
        if value:
            raise CliError(f"{option} needs FILE", USAGE)


def read_past(
    path: Path,
    *,
    start: str | None,
    end: str | None,
    partition: str | None,
    completed_only: bool,
) -> AccountingTrace:
    """Read the chosen jobs of a file.

    Raises:
        CliError: a time is invalid, or the period is empty.
        SacctError: the file is invalid.
    """
    from slurm_elastic.simulator.workloads import accounting_trace  # noqa: PLC0415

    begin_s, end_s = _time(start, "--start"), _time(end, "--end")
    if begin_s is not None and end_s is not None and begin_s >= end_s:
        raise CliError(f"--end: {end} is not after --start {start}; exchange them", USAGE)
    selection = accounting_trace.JobSelection(
        begin=begin_s, end=end_s, partition=partition, completed_only=completed_only
    )
    with progress.reading(path.name) as report:
        return accounting_trace.read(path, selection, progress=report)


def _time(text: str | None, option: str) -> float | None:
    """Return epoch seconds, or the seconds of a trace as they are; None if it is not given."""
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) < 12:
        return float(text)
    try:
        return formatting.parse_time(text, time.time())
    except ValueError as error:
        raise CliError(f"{option}: {error}", USAGE) from None
