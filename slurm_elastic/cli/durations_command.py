"""`selastic durations`: how well run times are predicted, live or from a file of accounting."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate.past_options import (
    past_options,
    read_past,
    refuse_without_file,
)
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.models.durations.prediction_error import PredictionError
    from slurm_elastic.rpc.duration_answers import DurationsAnswer

_COLUMNS = (
    Column("PREDICTION", lambda r: str(r["prediction"])),
    Column("JOBS", lambda r: str(r["jobs"]), right=True),
    Column("FACTOR_P50", lambda r: _factor(r["factor_p50"]), right=True),
    Column("FACTOR_P90", lambda r: _factor(r["factor_p90"]), right=True),
    Column("WITHIN_P90", lambda r: _percent(r["within_p90"]), right=True),
    Column("RANK", lambda r: f"{r['rank']:.2f}", right=True),
)


@options.verb
@click.argument("file", metavar="[FILE]", required=False)
@past_options("With FILE: ")
@options.table
@options.as_json
def durations(
    *,
    file: str | None,
    start: str | None,
    end: str | None,
    partition: str | None,
    completed_only: bool,
    format_: str,
    noheader: bool,
    parsable: bool,
    json_: bool,
) -> None:
    """Show how well run times are predicted.

    Without FILE by the controller, if `[durations] predict` is true there; with it, how well they
    could be. FILE is the site's accounting, `sacct -P` with the columns of `compare --sacct`,
    better also Partition and Timelimit, `sacct --json`, or a published trace. The latest jobs are
    predicted, each from those that had ended before its submission. See docs/durations.md.
    """
    layout = options.layout(format_, noheader, parsable)
    if file is None:
        refuse_without_file(
            start=start, end=end, partition=partition, completed_only=completed_only
        )
        answer: Any = client.ask("durations")
        if json_:
            options.put_json(answer)
        else:
            options.put(_live(answer, layout))
        return
    from slurm_elastic.models.durations import boosted_durations, prediction_error  # noqa: PLC0415
    from slurm_elastic.simulator.workloads import past_durations  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.accounting_row import SacctError  # noqa: PLC0415

    try:
        trace = read_past(
            Path(file), start=start, end=end, partition=partition, completed_only=completed_only
        )
    except SacctError as error:
        raise CliError(clean(error), USAGE) from None
    jobs = past_durations.finished(trace)
    errors = prediction_error.of_ways(jobs, boosted=True)
    if not errors:
        raise CliError(
            f"{clean(Path(file).name)}: no job was submitted after another had ended; name a longer"
            " period with sacct's -S",
            REFUSED,
        )
    rows = [_row(name, error) for name, error in errors.items()]
    note = ""
    if "boosted" not in errors:
        least = boosted_durations.LEAST_JOBS
        note = f"boosted needs {least} jobs that had ended before the predicted ones"
        if not boosted_durations.is_available():
            note = "boosted needs scikit-learn: pip install 'slurm-elastic[durations]'"
    if json_:
        options.put_json({"jobs": len(jobs), "predictions": rows})
    else:
        heading = f"{clean(Path(file).name)}: {trace.summary()}"
        options.put(_shown(rows, heading, note, layout))


def _live(answer: DurationsAnswer, layout: TableLayout) -> list[str]:
    """Return the lines about the controller's predictions."""
    if not answer["enabled"]:
        return ["run times are not predicted here: [durations] predict is false"]
    problem = [f"the last training failed: {clean(answer['problem'])}"] if answer["problem"] else []
    if answer["trained"] is None:
        return problem or ["run times are not predicted yet: the first training runs"]
    rows = answer["predictions"]
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(answer["trained"]))
    used = "boosted" if answer["boosted"] else "rolling"
    heading = f"predicted by {used} estimates from {answer['jobs']} jobs, since {at}"
    if not rows:
        return [heading, *problem]
    return [*_shown(rows, heading, "", layout), *problem]


def _shown(rows: list[dict[str, Any]], heading: str, note: str, layout: TableLayout) -> list[str]:
    table = render(rows, _COLUMNS, [c.header for c in _COLUMNS], layout)
    if layout.parsable or not layout.header:
        return table
    count = rows[0]["jobs"]
    explained = f"the latest {count} jobs, each predicted from those that had ended before it came"
    return [heading, explained, *table, *([note] if note else [])]


def _row(name: str, error: PredictionError) -> dict[str, Any]:
    return {"prediction": name, **dataclasses.asdict(error)}


def _factor(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"
