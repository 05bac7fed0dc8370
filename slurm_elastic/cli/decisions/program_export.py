"""`selastic plan --export`: the integer program of the last round as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurm_elastic import __version__
from slurm_elastic.cli import client
from slurm_elastic.cli.decisions.lp_format import lp_text
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean

_STDOUT = "-"


def write(path: str, *, exclusive: bool) -> None:
    """Ask for the program and write it; a line says what was written.

    Args:
        path: of the file; `-` is standard output.
        exclusive: whether options were given that need another output.

    Raises:
        CliError: there is no program, or the file cannot be written.
    """
    if exclusive:
        raise CliError("--export writes the program only: leave --all and --json out", USAGE)
    answer: Any = client.ask("plan", program=True)
    program = answer.get("program")
    if program is None:
        raise CliError("the controller is older than this command: upgrade it first")
    if not program["jobs"]:
        raise CliError("the last round had no job to choose for: nothing was written")
    head = f"slurm-elastic {__version__}, policy {answer['policy']}, round of {answer['planned']}"
    text = lp_text(program, comments=[head])
    if path == _STDOUT:
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text, encoding="ascii", errors="replace")
    except OSError as error:
        raise CliError(f"--export: {clean(path)}: {error.strerror}", USAGE) from None
    variables = sum(len(j["configurations"]) + (j["fixed"] is None) for j in program["jobs"])
    click.echo(f"{clean(path)}: {len(program['jobs'])} jobs, {variables} variables")
