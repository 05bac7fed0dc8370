"""`selastic usage`: GPU time held, over all shapes of a job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.tables import Column, TableLayout, render
from slurm_elastic.cli.usage_check import compared

if TYPE_CHECKING:
    from slurm_elastic.rpc.usage_answers import SleepUsage, UsageAnswer

_HOUR = 3600

_JOBS = (
    Column("JOBID", lambda r: r["display_id"], right=True),
    Column("USER", lambda r: r["user"]),
    Column("TYPE", lambda r: r["gpu_type"] or "-"),
    Column("GPUHOURS", lambda r: _hours(r["gpu_seconds"]), right=True),
    Column("ELAPSED", lambda r: formatting.duration(r["seconds"]), right=True),
    Column("SHAPES", lambda r: str(r["shapes"]), right=True),
    Column("GPUSECONDS", lambda r: f"{r['gpu_seconds']:.0f}", right=True),
)
_USERS = (
    Column("USER", lambda r: r["user"]),
    Column("GPUHOURS", lambda r: _hours(r["gpu_seconds"]), right=True),
    Column("TYPES", lambda r: _types(r["types"])),
    Column("GPUSECONDS", lambda r: f"{r['gpu_seconds']:.0f}", right=True),
)


@options.verb
@click.option("-u", "--user", metavar="NAME", help="Show only the jobs of this user.")
@click.option(
    "-S",
    "--start",
    metavar="TIME",
    default="now-1day",
    show_default=True,
    help="Start of the period.",
)
@click.option("-E", "--end", metavar="TIME", help="End of the period (now).")
@click.option("--by-user", is_flag=True, help="Show one line per user instead of per job.")
@click.option(
    "--check",
    is_flag=True,
    help="Compare each ended run with sacct, to the second; exit code 1 if one differs.",
)
@options.table
@options.as_json
def usage(
    *,
    user: str | None,
    start: str,
    end: str | None,
    by_user: bool,
    check: bool,
    format_: str,
    noheader: bool,
    parsable: bool,
    json_: bool,
) -> None:
    """Count GPU hours by job or by user.

    Slurm bills a job by the shape of its first run; this counts the GPUs that it held. A TIME is
    `now`, `now-2days`, `today`, `2026-11-20` or `2026-11-20T14:00`.
    """
    now = time.time()
    try:
        first = formatting.parse_time(start, now)
        last = formatting.parse_time(end, now) if end else None
    except ValueError as error:
        raise CliError(f"usage: {error}", USAGE) from None
    answer: Any = client.ask("usage", user=user, start=first, end=last, runs=check or None)
    if check:
        _check(answer, first, user, json_=json_)
    elif json_:
        options.put_json(answer)
    else:
        layout = options.layout(format_, noheader, parsable)
        options.put(used(answer, layout, by_user=by_user))


def _check(answer: UsageAnswer, since: float, user: str | None, *, json_: bool) -> None:
    """Print the differences to sacct, and exit with 1 if there are any."""
    from slurm_elastic.slurm import accounting  # noqa: PLC0415 - loads structlog, and rich with it

    try:
        accounted = accounting.runs(since, users=(user,) if user else ())
    except accounting.AccountingError as error:
        raise CliError(f"usage: {error}", REFUSED) from None
    equal, lines = compared(answer["runs"], accounted, since=since)
    if json_:
        options.put_json({"equal": equal, "differences": lines})
    else:
        head = f"{equal} runs agree with sacct to the second"
        options.put([*lines, f"{head}, {len(lines)} do not" if lines else head])
    if lines:
        click.get_current_context().exit(REFUSED)


def used(answer: UsageAnswer, layout: TableLayout, *, by_user: bool) -> list[str]:
    """Return the lines of `usage`."""
    rows: Any = answer["users"] if by_user else answer["jobs"]
    columns = _USERS if by_user else _JOBS
    with_notes = layout.header and not layout.parsable
    start = answer["start"] or 0.0
    since = formatting.records_note(answer["kept_since"], answer["time"]) if with_notes else ""
    tail = [since] if since and start < answer["kept_since"] else []
    sleep = answer.get("sleep")  # controllers before it have none
    if with_notes and sleep and not by_user:
        tail.append(_sleep(sleep))
    if not rows and with_notes:
        return ["no elastic job held GPUs in that time", *tail]
    return [*render(rows, columns, [c.header for c in columns[:-1]], layout), *tail]


def _sleep(sleep: SleepUsage) -> str:
    """Return the line about idle nodes that slept, or could have slept."""
    hours, kwh = sleep["node_hours"], sleep["kwh"]
    acts = sleep["mode"] == "act"
    slept = "slept" if acts else "could have slept"
    text = f"idle nodes {slept} {hours:.1f} node hours: {kwh:.1f} kWh"
    if sleep["cost"]:
        text += f", costs of {sleep['cost']:.2f}"
    waits = formatting.duration(sleep["late_s"])
    were = "were" if acts else "would have been"
    return f"{text}; {sleep['late']} nodes {were} late, {waits} in all"


def _hours(gpu_seconds: float) -> str:
    hours = gpu_seconds / _HOUR
    return f"{hours:.2f}" if hours >= 1 else f"{hours:.3f}"


def _types(types: dict[str, float]) -> str:
    return ",".join(f"{kind or 'gpu'}={_hours(spent)}" for kind, spent in types.items())
