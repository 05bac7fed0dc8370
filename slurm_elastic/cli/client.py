"""Asks the controller; every failure becomes one line with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurm_elastic import config
from slurm_elastic.cli.errors import REFUSED, SILENT, USAGE, CliError
from slurm_elastic.cli.words import clean

_TIMEOUT_S = 20.0

#: Ends the line about a controller that does not answer.
REMEDY = ": is selasticd running there? systemctl status selasticd"


def settings() -> config.Config | None:
    """The configuration; None where the file does not exist and none was named.

    Raises:
        CliError: the file cannot be used.
    """
    chosen = click.get_current_context().find_root().params.get("config")
    path = Path(chosen) if chosen else config.DEFAULT_PATH
    if not chosen and not path.exists():
        return None
    try:
        return config.load(path)
    except config.ConfigError as error:
        raise CliError(str(error), USAGE) from None


def address() -> str:
    """Where the controller listens: --controller, else `[api] controller`."""
    chosen = click.get_current_context().find_root().params.get("controller")
    return str(chosen) if chosen else (settings() or config.Config()).api.controller


def ask(op: str, **args: Any) -> dict[str, Any]:
    """Send one request; arguments that are None are left out.

    Raises:
        CliError: refused, or no answer.
    """
    from slurm_elastic.job import channel  # noqa: PLC0415 - only when talking

    where = address()
    request = {"v": 1, "op": op, **{k: v for k, v in args.items() if v is not None}}
    try:
        return channel.call(where, request, timeout_s=_TIMEOUT_S)
    except channel.Refused as error:
        raise CliError(clean(error), REFUSED) from None
    except channel.Unreachable as error:
        why = str(error).removeprefix(f"controller {where}: ")
        raise CliError(
            f"no controller at {clean(where)} ({clean(why[:1].lower() + why[1:])}){REMEDY}",
            SILENT,
        ) from None
    except channel.Untrusted as error:
        raise CliError(clean(error), SILENT) from None
    except channel.ChannelError as error:
        raise CliError(clean(error), REFUSED) from None
