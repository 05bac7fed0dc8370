"""Asks the controller; every failure becomes one line with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurm_elastic.cli.exit_codes import REFUSED, SILENT, USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.config import schema

_TIMEOUT_S = 20.0
#: Of several controllers, each gets this long to say whether it is the active one.
_ROLE_S = 3.0

#: Under which a command keeps what each of several controllers has said.
_ROLES = f"{__name__}.roles"

#: Ends the line about a controller that does not answer.
REMEDY = ": is selasticd running there? systemctl status selasticd"


def settings() -> schema.Config | None:
    """The configuration; None where the file does not exist and none was named.

    Raises:
        CliError: the file cannot be used.
    """
    chosen = click.get_current_context().find_root().params.get("config")
    path = Path(chosen) if chosen else schema.DEFAULT_PATH
    if not chosen and not path.exists():
        return None
    try:
        return schema.load(path)
    except schema.ConfigError as error:
        raise CliError(str(error), USAGE) from None


def address() -> str:
    """Where the controller listens: --controller, else `[api] controller`."""
    chosen = click.get_current_context().find_root().params.get("controller")
    return str(chosen) if chosen else (settings() or schema.Config()).api.controller


def roles() -> dict[str, dict[str, Any] | str]:
    """What each controller answers to a ping, or the line that says why it does not."""
    from slurm_elastic.rpc import frames, requests  # noqa: PLC0415 - only when talking

    named = frames.addresses(address())
    found: dict[str, dict[str, Any] | str] = {}
    for where in named:
        try:
            timeout_s = _ROLE_S if len(named) > 1 else _TIMEOUT_S
            found[where] = frames.call(where, requests.build("ping"), timeout_s=timeout_s)
        except frames.ChannelError as error:
            found[where] = clean(str(error).removeprefix(f"controller {where}: "))
    return found


def _active() -> str:
    """Where the active one of several controllers is.

    Raises:
        CliError: none of them is.
    """
    answers = roles()
    click.get_current_context().meta[_ROLES] = answers
    for where, answer in answers.items():
        if isinstance(answer, dict) and answer.get("role") in ("active", "alone"):
            return where
    said = (f"{w}: {a if isinstance(a, str) else 'stands by'}" for w, a in answers.items())
    raise CliError(f"no controller is active ({'; '.join(said)}){REMEDY}", SILENT)


def standing() -> list[str]:
    """Of several controllers: which is active and what the others do, as `ask` has found."""
    answers = click.get_current_context().meta.get(_ROLES, {})
    how = {w: a if isinstance(a, str) else a.get("role", "?") for w, a in answers.items()}
    return [clean(", ".join(f"{w}: {h}" for w, h in how.items()))] if how else []


def ask(op: str, **args: Any) -> dict[str, Any]:
    """Send one request; arguments that are None are left out.

    Raises:
        CliError: refused, or no answer.
    """
    from slurm_elastic.rpc import frames, requests  # noqa: PLC0415 - only when talking

    where = address()
    if len(frames.addresses(where)) > 1:
        where = _active()
    try:
        return frames.call(where, requests.build(op, **args), timeout_s=_TIMEOUT_S)
    except frames.RequestRejectedError as error:
        raise CliError(clean(error), REFUSED) from None
    except frames.ControllerUnreachableError as error:
        why = str(error).removeprefix(f"controller {where}: ")
        raise CliError(
            f"no controller at {clean(where)} ({clean(why[:1].lower() + why[1:])}){REMEDY}",
            SILENT,
        ) from None
    except frames.ControllerUntrustedError as error:
        raise CliError(clean(error), SILENT) from None
    except frames.ChannelError as error:
        raise CliError(clean(error), REFUSED) from None
