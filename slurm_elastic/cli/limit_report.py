"""`selastic report`: time limits beside the run times of the jobs that had them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate.past_options import (
    past_options,
    read_past,
    refuse_without_file,
)
from slurm_elastic.cli.tables import Column, TableLayout, render

_COLUMNS = (
    Column("USER", lambda r: r["user"]),
    Column("NAME", lambda r: r["name"]),
    Column("JOBS", lambda r: str(r["jobs"]), right=True),
    Column("LIMIT", lambda r: formatting.duration(r["limit_s"]), right=True),
    Column("MEDIAN", lambda r: formatting.duration(r["median_s"]), right=True),
    Column("P90", lambda r: formatting.duration(r["p90_s"]), right=True),
    Column("REACHED", lambda r: str(r["reached"]), right=True),
    Column("ADVISED", lambda r: formatting.duration(r["advised_s"]), right=True),
    Column("GPUHOURS", lambda r: f"{r['gpu_hours']:.1f}", right=True),
)


@options.verb
@click.argument("file", metavar="[FILE]", required=False)
@click.option("-u", "--user", metavar="NAME", help="Show only the jobs of this user.")
@past_options("With FILE: ")
@options.table
@options.as_json
def report(
    *,
    file: str | None,
    user: str | None,
    start: str | None,
    end: str | None,
    partition: str | None,
    completed_only: bool,
    format_: str,
    noheader: bool,
    parsable: bool,
    json_: bool,
) -> None:
    """Show the time limits of past jobs beside their run times, and the limits that would do.

    One line for all jobs of a user whose names differ in numbers only, from five jobs on. REACHED
    counts the jobs that used their whole limit, GPUHOURS what was requested beyond the ADVISED
    limit. Without FILE from the jobs that the controller predicts from; FILE as for `durations`.
    """
    layout = options.layout(format_, noheader, parsable)
    if file is None:
        refuse_without_file(
            start=start, end=end, partition=partition, completed_only=completed_only
        )
        answer: Any = client.ask("limits", user=user)
    else:
        answer = _of_file(
            file, user, start=start, end=end, partition=partition, completed_only=completed_only
        )
    if json_:
        options.put_json(answer)
    else:
        options.put(_shown(answer, layout))


def _of_file(file: str, user: str | None, **period: Any) -> dict[str, Any]:
    """Return the answer from a file of accounting, like the controller's.

    Raises:
        CliError: it cannot be read, or has no such job.
    """
    from slurm_elastic.models.durations.limit_use import limit_uses  # noqa: PLC0415
    from slurm_elastic.simulator.workloads import past_durations  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.accounting_row import SacctError  # noqa: PLC0415

    try:
        trace = read_past(Path(file), **period)
    except SacctError as error:
        raise CliError(clean(error), USAGE) from None
    jobs = past_durations.finished(trace)
    name = clean(Path(file).name)
    if not any(job.request.limit_s for job in jobs):
        raise CliError(f"{name}: no job has a time limit; export the column Timelimit", REFUSED)
    if user is not None:
        jobs = [job for job in jobs if job.request.user == user]
        if not jobs:
            raise CliError(f"{name}: no job of user {clean(user)} has ended", REFUSED)
    limits = limit_uses(jobs)
    return {"jobs": len(jobs), "limits": [dataclasses.asdict(use) for use in limits]}


def _shown(answer: dict[str, Any], layout: TableLayout) -> list[str]:
    """Return the lines of an answer; one without `enabled` is that of a file."""
    if not answer.get("enabled", True):
        return ["run times are not read here: [durations] predict is false"]
    if answer.get("trained", 0.0) is None and not answer["problem"]:
        return ["run times are not known yet: sacct is being read"]
    rows = answer["limits"]
    with_notes = layout.header and not layout.parsable
    failed = answer.get("problem")
    tail = [f"sacct was not read: {clean(failed)}"] if failed and with_notes else []
    if not rows and with_notes:
        return ["no name has five jobs with a time limit that have ended", *tail]
    return [*render(rows, _COLUMNS, [c.header for c in _COLUMNS], layout), *tail]
