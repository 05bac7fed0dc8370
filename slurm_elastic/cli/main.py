"""The command `selastic`: runs a verb; a failure is one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

import click

from slurm_elastic import __version__
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.options import rich_if_terminal
from slurm_elastic.core.errors import SlurmElasticError

#: verb → (module, function), in the order of the help.
VERBS = {
    "status": "status",
    "show": "status",
    "explain": "decisions.explain",
    "plan": "decisions.planned_changes",
    "history": "decisions.change_history",
    "usage": "usage",
    "topology": "topology.topology_command",
    "hold": "commands",
    "release": "commands",
    "update": "commands",
    "retire": "commands",
    "reconfigure": "commands",
    "check": "check",
    "config": "check",
    "ping": "check",
    "install": "installation.install_command",
    "uninstall": "installation.install_command",
    "simulate": "simulate.simulate_command",
    "compare": "simulate.compare_command",
    "workload": "simulate.workload_command",
    "partition": "partition",
    "profile": "profile.profile_command",
    "recommend": "recommend.recommend_command",
    "durations": "durations_command",
    "report": "limit_report",
}


#: Reasons for which standard output takes no more.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _Verbs(rich_if_terminal("RichGroup", click.Group)):  # type: ignore[misc]
    """Group that imports the module of a verb when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Return all verbs, in the order of the help."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Return the verb; None if it is unknown."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"slurm_elastic.cli.{VERBS[cmd_name]}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.group(
    cls=_Verbs, subcommand_metavar="VERB [ARGS]...", context_settings={"max_content_width": 100}
)
@click.option(
    "--config",
    metavar="FILE",
    envvar="SLURM_ELASTIC_CONFIG",
    help="Configuration file (/etc/slurm-elastic/elastic.toml).",
)
@click.option(
    "--controller",
    metavar="HOST:PORT",
    envvar="SLURM_ELASTIC_CONTROLLER",
    help="Controller to ask (as configured).",
)
@click.version_option(__version__, "-V", "--version", prog_name="selastic")
def selastic(config: str | None, controller: str | None) -> None:
    """Elastic jobs on Slurm: what they hold, why, and what comes next.

    Exit codes: 0 done, 1 refused or failed, 2 wrong command line, 3 no answer from the controller.
    """


def run(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        code = selastic.main(args=list(argv), prog_name="selastic", standalone_mode=False)
    except SlurmElasticError as error:
        return _fail(str(error), error.exit_code if isinstance(error, CliError) else REFUSED)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return USAGE
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "selastic"
        return _fail(f"{error.format_message()} See `{command} --help`.", USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return 128 + signal.SIGINT
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        return _output_lost(error)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Run the command line of this process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        _discard_output()
    except OSError as error:
        code = _output_lost(error)
    sys.exit(code)


def _output_lost(error: OSError) -> int:
    _discard_output()
    return _fail(f"standard output: {error.strerror}: the answer is not complete", REFUSED)


def _discard_output() -> None:
    """Discard buffered output, else Python complains once more at exit."""
    with contextlib.suppress(OSError, ValueError):  # tests replace standard output
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(text: str, code: int) -> int:
    click.echo(f"selastic: {text}", err=True)
    return code
