"""`selastic check`, `selastic config` and `selastic ping`."""

from __future__ import annotations

import dataclasses
import time
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.exit_codes import REFUSED, SILENT, CliError

if TYPE_CHECKING:
    from slurm_elastic.controller.site_findings import Facts


@options.verb
@options.as_json
def check(json_: bool) -> None:
    """Find faults in the site's set-up that harm elastic jobs.

    Checks slurm.conf, plugins, munge, versions and the controller's rights; each line has the
    severity, the harm and the remedy. Works without a running controller. Exit code 1 if a setting
    must be changed.
    """
    from slurm_elastic.controller.site_check import check as site_findings  # noqa: PLC0415
    from slurm_elastic.controller.site_check import lines  # noqa: PLC0415

    findings = site_findings(_facts())
    if json_:
        options.put_json({"findings": [dataclasses.asdict(f) for f in findings]})
    elif findings:
        options.put(formatting.clean(line) for line in lines(findings))
    else:
        click.echo("no faults found")
    if any(f.severity == "error" for f in findings):
        click.get_current_context().exit(REFUSED)


@options.verb
def config() -> None:
    """Print elastic.toml with all keys and their defaults."""
    from slurm_elastic.config.documentation import example  # noqa: PLC0415

    click.echo(example(), nl=False)


@options.verb
@options.as_json
def ping(json_: bool) -> None:
    """Ask each controller whether it is active. Exit code 3 if none is."""
    if "," in client.address():
        _ping_all(json_=json_)
        return
    begin = time.monotonic()
    answer = client.ask("ping")
    seconds = time.monotonic() - begin
    if json_:
        options.put_json({**answer, "seconds": round(seconds, 4)})
    else:
        version = formatting.clean(answer.get("version", "?"))
        click.echo(f"selasticd {version} at {client.address()} answers in {seconds * 1000:.0f} ms")
        if reader := formatting.clean(answer.get("reader", "")):
            click.echo(f"reads slurmctld through {reader}")


def _ping_all(*, json_: bool) -> None:
    """Print each controller with its role, as `scontrol ping` does."""
    answers = client.roles()
    if json_:
        options.put_json({"controllers": [_answer_row(w, a) for w, a in answers.items()]})
    else:
        for address, answer in answers.items():
            if isinstance(answer, str):
                click.echo(f"selasticd at {address} is DOWN ({answer})")
            else:
                version, role = (
                    formatting.clean(answer.get("version", "?")),
                    answer.get("role", "?"),
                )
                click.echo(f"selasticd {version} at {address} is UP ({formatting.clean(role)})")
    if not any(
        isinstance(a, dict) and a.get("role") in ("active", "alone") for a in answers.values()
    ):
        click.get_current_context().exit(SILENT)


def _answer_row(address: str, answer: dict[str, Any] | str) -> dict[str, Any]:
    return {"address": address, **({"error": answer} if isinstance(answer, str) else answer)}


def _facts() -> Facts:
    from slurm_elastic.controller.site_findings import Facts  # noqa: PLC0415
    from slurm_elastic.rpc import munge_auth  # noqa: PLC0415
    from slurm_elastic.slurm import slurm_settings  # noqa: PLC0415

    settings, config_error = None, ""
    try:
        settings = client.settings()
    except CliError as error:
        config_error = str(error)
    solver_error = ""
    if settings is not None:
        from slurm_elastic.policies.milp.program_solver import problem  # noqa: PLC0415

        solver_error = problem(settings.sia.solver)
    munge_error = ""
    try:
        munge_auth.unseal(munge_auth.seal(b"", purpose="check", nonce="0"), purpose="check")
    except munge_auth.SealError as error:
        munge_error = str(error)
    answer: Any = None
    controller_error = ""
    try:
        answer = client.ask("check")
    except CliError as error:
        controller_error = str(error).removesuffix(client.REMEDY)
    account = (answer or {}).get("account") or "selastic"
    return Facts(
        site=slurm_settings.gather(account),
        config=settings,
        config_error=config_error,
        solver_error=solver_error,
        policies=tuple(sorted({e.name for e in entry_points(group="slurm_elastic.policies")})),
        munge_error=munge_error,
        controller=answer,
        controller_error=controller_error,
    )
