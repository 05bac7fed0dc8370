"""Options that several verbs share, and output of answers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.reason_text import with_texts
from slurm_elastic.cli.tables import TableLayout

C = TypeVar("C", bound=click.Command)
F = TypeVar("F", bound=Callable[..., Any])


def rich_if_terminal(rich_name: str, plain: type[C]) -> type[C]:
    """Return rich-click's class when stdout is a terminal, else click's own."""
    if not sys.stdout.isatty():
        return plain
    import rich_click  # noqa: PLC0415 - slow; scripts do without

    chosen: type[C] = getattr(rich_click, rich_name)
    return chosen


def verb(function: Callable[..., Any]) -> click.Command:
    """Make a function a verb of selastic, with rich help on a terminal."""
    return click.command(cls=rich_if_terminal("RichCommand", click.Command))(function)


def as_json(command: F) -> F:
    """Add --json."""
    return click.option("--json", "json_", is_flag=True, help="Print the answer as JSON.")(command)


def table(command: F) -> F:
    """Add -o, -h and -P."""
    options = (
        click.option(
            "-o", "--format", "format_", metavar="COLUMN[%[-]WIDTH],…", default="",
            help="Show these columns (a wrong name lists all); %WIDTH aligns right, %-WIDTH left.",
        ),
        click.option("-h", "--noheader", is_flag=True, help="Leave the header out."),
        click.option(
            "-P", "--parsable", is_flag=True,
            help="Separate columns by '|' and cut nothing; a '|' in a value becomes '?'.",
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def dry_run(command: F) -> F:
    """Add -n."""
    text = "Show what would be done, and do nothing."
    return click.option("-n", "--dry-run", is_flag=True, help=text)(command)


def job_ids(command: F) -> F:
    """Add one or more job ids as arguments."""
    return click.argument("jobs", metavar="JOBID...", nargs=-1, required=True)(command)


def layout(format_: str, noheader: bool, parsable: bool) -> TableLayout:
    """Return the table options as a value."""
    return TableLayout(columns=format_, header=not noheader, parsable=parsable)


def whole_number(text: str, option: str) -> int:
    """Return the whole number above 0 that an option holds.

    Raises:
        CliError: it is not one.
    """
    word = text.strip()
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word)):
        raise CliError(
            f'{option}: "{clean(text)}" is invalid: expected a whole number above 0', USAGE
        )
    return int(word)


def number(text: str, option: str) -> float:
    """Return the number above 0 that an option holds.

    Raises:
        CliError: it is not one.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise CliError(f'{option}: "{clean(text)}" is invalid: expected a number above 0', USAGE)
    return value


def put(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        click.echo(line)


def put_json(answer: Any) -> None:
    """Print an answer as JSON, in ASCII, which every terminal and pipe can carry."""
    click.echo(json.dumps(with_texts(answer), indent=2))
