"""`selastic plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import client, formatting, options
from slurm_elastic.cli.reason_text import text as reason_text
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.rpc.decision_answers import PlanAnswer, PlanRow


@options.verb
@click.option("-a", "--all", "all_", is_flag=True, help="Show jobs without a change, too.")
@click.option(
    "--export",
    metavar="FILE.lp",
    help="Write the integer program of the last round, which the policies sia, icefrog and goodput"
    " solve, in the LP format, and nothing else; - is standard output.",
)
@options.as_json
def plan(all_: bool, export: str | None, json_: bool) -> None:
    """Show what the next round would do; nothing is done.

    Shows the cost and gain of each change, and which jobs GPUs are kept for.
    """
    if export is not None:
        from slurm_elastic.cli.decisions import program_export  # noqa: PLC0415

        program_export.write(export, exclusive=all_ or json_)
        return
    answer: Any = client.ask("plan")
    if json_:
        options.put_json(answer)
    else:
        options.put(planned(answer, all_jobs=all_))


def planned(answer: PlanAnswer, *, all_jobs: bool = False) -> list[str]:
    """Return the lines of `plan`."""
    if answer["planned"] is None:
        return ["no round yet; repeat in a moment"]
    changes = answer["changes"]
    stays = [s for s in answer["stays"] if all_jobs or s["waiting_for"]]
    count = len(changes)
    if not count:
        head = "no change would be made now."
    else:
        head = f"{count} change{'s' if count > 1 else ''} would be made now, nothing was done:"
    rows = [(r["display_id"], _shape(r), reason_text(r["reason"]), _benefit(r)) for r in changes]
    rows += [
        (r["display_id"], "stays", reason_text(r["waiting_for"] or r["reason"]), "") for r in stays
    ]
    columns = tuple(Column(str(i), _cell(i), right=i == 0) for i in range(4))
    table = render(rows, columns, [c.header for c in columns], TableLayout(header=False))
    reservations = [
        f"  kept for {c['display_id']} until {formatting.clock(c['until'], answer['time'])}: "
        + ", ".join(f"{count} on {formatting.clean(node)}" for node, count in c["gpus"].items())
        for c in answer["claims"]
    ]
    notes = [f"note: {reason_text(n)}" for n in answer["notes"]]
    return [*notes, head, *(f"  {line}" for line in table), *reservations]


def _shape(row: PlanRow) -> str:
    kind = row["gpu_type"] or row["from_type"]
    half = row.get("half", False)
    if row["action"] == "start":
        return f"start {formatting.gpus(row['gpus'], kind, half=half)}"
    if row["action"] == "preempt":
        return f"{row['from_gpus']} → 0 {formatting.clean(kind)}"
    if row["action"] == "move":
        old = formatting.gpus(row["from_gpus"], row["from_type"])
        new = formatting.gpus(row["gpus"], kind, half=half)
        return f"{old} → {new} on {formatting.places(row['where'])}"
    return f"{row['from_gpus']} → {formatting.gpus(row['gpus'], kind)}"


def _benefit(row: PlanRow) -> str:
    parts = []
    if row["gain"] > 0 and row["steps_per_s"] and row["kind"] != "script":
        parts.append(f"gains {formatting.digits(row['gain'] * row['steps_per_s'])} it/s")
    elif row["gain"] > 0:
        parts.append(f"gains {formatting.percent_gain(row['gain'])}")
    if row["payback_s"] is not None:
        parts.append(f"pays back in {formatting.span(row['payback_s'])}")
    else:
        parts.append(formatting.cost("costs", row["cost_gpu_s"]))
    return ", ".join(p for p in parts if p)


def _cell(index: int) -> Any:
    return lambda row: row[index]
