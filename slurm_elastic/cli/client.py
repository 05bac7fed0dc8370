"""Requests to the controller; a failure is one line with the remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from slurm_elastic.cli.exit_codes import REFUSED, SILENT, USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.config import schema

_TIMEOUT_S = 20.0
#: Timeout of the question to each of several controllers whether it is active.
_ROLE_S = 3.0

#: Key of the context under which a command keeps the answers of several controllers.
_ROLES = f"{__name__}.roles"

#: End of the line about a controller that does not answer.
REMEDY = ": is selasticd running there? systemctl status selasticd"


def settings() -> schema.Config | None:
    """Return the configuration; None if no file was named and the default does not exist.

    Raises:
        CliError: the file is unreadable or invalid.
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
    """Return the controller's address: --controller, else `[api] controller`."""
    chosen = click.get_current_context().find_root().params.get("controller")
    return str(chosen) if chosen else (settings() or schema.Config()).api.controller


def roles() -> dict[str, dict[str, Any] | str]:
    """Return each controller's answer to a ping, or one line with its error."""
    from slurm_elastic.rpc import frames, requests  # noqa: PLC0415 - only for requests

    addresses = frames.addresses(address())
    answers: dict[str, dict[str, Any] | str] = {}
    for host in addresses:
        try:
            timeout_s = _ROLE_S if len(addresses) > 1 else _TIMEOUT_S
            answers[host] = frames.call(host, requests.build("ping"), timeout_s=timeout_s)
        except frames.ChannelError as error:
            answers[host] = clean(str(error).removeprefix(f"controller {host}: "))
    return answers


def _active() -> str:
    """Return the address of the active one of several controllers.

    Raises:
        CliError: none is active.
    """
    answers = roles()
    click.get_current_context().meta[_ROLES] = answers
    for host, answer in answers.items():
        if isinstance(answer, dict) and answer.get("role") in ("active", "alone"):
            return host
    states = (f"{w}: {a if isinstance(a, str) else 'stands by'}" for w, a in answers.items())
    raise CliError(f"no controller is active ({'; '.join(states)}){REMEDY}", SILENT)


def role_notes() -> list[str]:
    """Return a line with the role of each of several controllers, known since `ask`."""
    answers = click.get_current_context().meta.get(_ROLES, {})
    states = {w: a if isinstance(a, str) else a.get("role", "?") for w, a in answers.items()}
    return [clean(", ".join(f"{w}: {state}" for w, state in states.items()))] if states else []


def ask(op: str, **args: Any) -> dict[str, Any]:
    """Send one request and return the answer; arguments that are None are left out.

    Raises:
        CliError: refused, or no answer.
    """
    from slurm_elastic.rpc import frames, requests  # noqa: PLC0415 - only for requests

    host = address()
    if len(frames.addresses(host)) > 1:
        host = _active()
    try:
        return frames.call(host, requests.build(op, **args), timeout_s=_TIMEOUT_S)
    except frames.RequestRejectedError as error:
        raise CliError(clean(error), REFUSED) from None
    except frames.ControllerUnreachableError as error:
        reason = str(error).removeprefix(f"controller {host}: ")
        raise CliError(
            f"no controller at {clean(host)} ({clean(reason[:1].lower() + reason[1:])}){REMEDY}",
            SILENT,
        ) from None
    except frames.ControllerUntrustedError as error:
        raise CliError(clean(error), SILENT) from None
    except frames.ChannelError as error:
        raise CliError(clean(error), REFUSED) from None
