"""`selastic history`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.reason_text import text as reason_text
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.rpc.decision_answers import ChangeRow, HistoryAnswer

#: Outcomes that are printed under another name.
_OUTCOMES = {"trial": "on trial"}

_COLUMNS = (
    Column("TIME", lambda r: formatting.clock(r["time"], r["now"])),
    Column("JOBID", lambda r: r["display_id"], right=True),
    Column("ACTION", lambda r: r["action"]),
    Column("FROM", lambda r: r["from"] or "-"),
    Column("TO", lambda r: r["to"] or "-"),
    Column("OUTCOME", lambda r: _OUTCOMES.get(r["outcome"], r["outcome"]) or r["state"].lower()),
    Column("TOOK", lambda r: _seconds(r["total_s"]), right=True),
    Column("REASON", lambda r: reason_text(r["reason"]) or "-"),
    Column("SAVE", lambda r: _part(r, "checkpoint"), right=True),
    Column("SLURM", lambda r: _part(r, "slurm"), right=True),
    Column("STARTUP", lambda r: _part(r, "startup"), right=True),
    Column("RESTORE", lambda r: _part(r, "restore"), right=True),
    Column("PAIDBACK", lambda r: _seconds(r["paid_back_s"]), right=True),
    Column("STATE", lambda r: r["state"]),
    Column("KIND", lambda r: r["kind"]),
    Column("PAUSE", lambda r: _part(r, "pause"), right=True),
)
_DEFAULT = tuple(c.header for c in _COLUMNS[:8])


@options.verb
@click.argument("job", metavar="[JOBID]", required=False)
@options.table
@options.as_json
def history(job: str | None, format_: str, noheader: bool, parsable: bool, json_: bool) -> None:
    """Show past changes of one job or of all, with their durations."""
    answer: Any = client.ask("history", jobs=[job] if job else None)
    if json_:
        options.put_json(answer)
    else:
        options.put(past(answer, options.layout(format_, noheader, parsable)))


def past(answer: HistoryAnswer, layout: TableLayout) -> list[str]:
    """Return the lines of `history`."""
    since = formatting.records_note(answer["kept_since"], answer["time"])
    if not answer["changes"] and layout.header and not layout.parsable:
        return [f"no changes; {since}" if since else "no changes yet"]
    # `now` is the controller's, as the answer may be shown after midnight.
    rows = [{**change, "now": answer["time"]} for change in answer["changes"]]
    lines = render(rows, _COLUMNS, _DEFAULT, layout)
    return [*lines, since] if since and layout.header and not layout.parsable else lines


def _part(row: ChangeRow, name: str) -> str:
    value: Any = row["seconds"].get(name)
    return _seconds(value)


def _seconds(value: float | None) -> str:
    return "-" if value is None else formatting.span(value)
