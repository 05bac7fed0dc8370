"""Options that several verbs share, and how answers leave the program."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from slurm_elastic.cli.errors import USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.reason_text import with_texts
from slurm_elastic.cli.tables import TableLayout

C = TypeVar("C", bound=click.Command)
F = TypeVar("F", bound=Callable[..., Any])


def rich_if_terminal(rich_name: str, plain: type[C]) -> type[C]:
    """rich-click's class where a person reads, click's own in pipes and scripts."""
    if not sys.stdout.isatty():
        return plain
    import rich_click  # noqa: PLC0415 - a script need not pay for it

    chosen: type[C] = getattr(rich_click, rich_name)
    return chosen


def verb(function: Callable[..., Any]) -> click.Command:
    """A verb of selastic, with rich help on a terminal."""
    return click.command(cls=rich_if_terminal("RichCommand", click.Command))(function)


def as_json(command: F) -> F:
    """--json."""
    return click.option("--json", "json_", is_flag=True, help="Print the answer as JSON.")(command)


def table(command: F) -> F:
    """-o, -h and -P."""
    options = (
        click.option(
            "-o", "--format", "format_", metavar="COLUMN[%WIDTH],…", default="",
            help="Show these columns.",
        ),
        click.option("-h", "--noheader", is_flag=True, help="Leave the header out."),
        click.option("-P", "--parsable", is_flag=True, help="Separate columns by '|'."),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def dry_run(command: F) -> F:
    """-n."""
    text = "Say what would be done, and do nothing."
    return click.option("-n", "--dry-run", is_flag=True, help=text)(command)


def job_ids(command: F) -> F:
    """One or more job ids."""
    return click.argument("jobs", metavar="JOBID...", nargs=-1, required=True)(command)


def layout(format_: str, noheader: bool, parsable: bool) -> TableLayout:
    """The table options as a value."""
    return TableLayout(columns=format_, header=not noheader, parsable=parsable)


def whole(text: str, option: str) -> int:
    """A whole number above 0.

    Raises:
        CliError: it is none.
    """
    word = text.strip()
    if not (word.isascii() and word.isdecimal() and len(word) < 10 and int(word)):
        raise CliError(f'{option}: "{clean(text)}" is no number above 0', USAGE)
    return int(word)


def number(text: str, option: str) -> float:
    """A number above 0.

    Raises:
        CliError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise CliError(f'{option}: "{clean(text)}" is no number above 0', USAGE)
    return value


def put(lines: Iterable[str]) -> None:
    """Print lines."""
    for line in lines:
        click.echo(line)


def put_json(answer: Any) -> None:
    """Print an answer as JSON, in ASCII so that every terminal and pipe survives it."""
    click.echo(json.dumps(with_texts(answer), indent=2))
