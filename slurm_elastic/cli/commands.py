"""Verbs that are commands: hold, release, update, retire, reconfigure."""

from __future__ import annotations

import sys
from typing import Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError


@options.verb
@options.job_ids
@options.dry_run
@options.as_json
def hold(jobs: tuple[str, ...], dry_run: bool, json_: bool) -> None:
    """Keep jobs in their present shape until `release`.

    They run on, unlike after `scontrol hold`.
    """
    answer = client.ask("hold", jobs=list(jobs), dry_run=dry_run)
    _report(answer, dry_run=dry_run, json_=json_)


@options.verb
@options.job_ids
@options.dry_run
@options.as_json
def release(jobs: tuple[str, ...], dry_run: bool, json_: bool) -> None:
    """Allow resizes of held jobs again.

    A job that was held for lack of progress starts again.
    """
    answer = client.ask("release", jobs=list(jobs), dry_run=dry_run)
    _report(answer, dry_run=dry_run, json_=json_)


@options.verb
@options.job_ids
@click.option(
    "--elastic",
    metavar="MIN-MAX[,KEY=VALUE…]",
    help="Replace the directive, e.g. 2-8,types=a100.",
)
@click.option(
    "--layout", metavar="RxS[+OPTION…]|auto",
    help="Divide the model over the GPUs; see above.",
)  # fmt: skip
@options.dry_run
@options.as_json
def update(
    *, jobs: tuple[str, ...], elastic: str | None, layout: str | None, dry_run: bool, json_: bool
) -> None:
    """Change the directive of jobs, or their layout.

    A layout is for jobs with `parallel=pipeline` or `parallel=hybrid`: `2x3` is 2 replicas of 3
    stages, `2x3x2` the same with 2 parts of the model on each GPU, `2-1` two stages of 2 and 1
    replicas, `auto` the job's own choice. With `parallel=spatial`, `2x1s4` is 2 groups of 4 GPUs
    that share each sample. The job saves and restarts in place; a layout for another number of GPUs
    waits until the job holds them. Options of an execution plan follow after a `+`, as in
    `2x1+shard=full+recompute`; what it does not name is off. With both options, both are applied or
    none.
    """
    from slurm_elastic.core.directive import Directive, DirectiveError  # noqa: PLC0415
    from slurm_elastic.core.execution.execution_plan import (  # noqa: PLC0415
        ExecutionPlan,
        ExecutionPlanError,
    )

    if elastic is None and layout is None:
        raise CliError("update: no change given; add --elastic or --layout", USAGE)
    try:
        if elastic is not None:
            Directive.parse(elastic)
        if layout not in (None, "auto"):
            ExecutionPlan.parse(layout)
    except DirectiveError as error:
        raise CliError(str(error), USAGE) from None
    except ExecutionPlanError as error:
        raise CliError(f"--layout: {error}, or auto", USAGE) from None
    answer = client.ask("update", jobs=list(jobs), elastic=elastic, layout=layout, dry_run=dry_run)
    _report(answer, dry_run=dry_run, json_=json_)


@options.verb
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@options.dry_run
@options.as_json
def retire(yes: bool, dry_run: bool, json_: bool) -> None:
    """Return all elastic jobs to Slurm.

    For use before slurm-elastic is stopped for good or upgraded. Changes under way are finished
    or undone, held jobs are released, reservations deleted. Jobs run on in their present shape,
    and no change begins. For operators.
    """
    if not (yes or dry_run):
        if not sys.stdin.isatty():
            raise CliError("retire: stdin is no terminal to confirm on; add --yes", USAGE)
        click.confirm("Return all elastic jobs to Slurm and begin no new change?", abort=True)
    _report(client.ask("retire", dry_run=dry_run), dry_run=dry_run, json_=json_)


@options.verb
@options.dry_run
@options.as_json
def reconfigure(dry_run: bool, json_: bool) -> None:
    """Make the controller read elastic.toml again. For operators."""
    _report(client.ask("reconfigure", dry_run=dry_run), dry_run=dry_run, json_=json_)


def _report(answer: dict[str, Any], *, dry_run: bool, json_: bool) -> None:
    """Print the results; exit with 1 if one of them failed."""
    results: list[dict[str, Any]] = answer.get("results", [])
    if json_:
        options.put_json(answer)
    elif "text" in answer:
        click.echo(formatting.clean(answer["text"]))
    prefix = "not done, would be: " if dry_run else ""
    for result in results if not json_ else ():
        job = result.get("display_id", result.get("job_id"))
        line = f"{job}: {prefix if result.get('ok') else ''}{result.get('text', '')}"
        click.echo(formatting.clean(line), err=not result.get("ok"))
    if not all(r.get("ok") for r in results):
        click.get_current_context().exit(REFUSED)
