"""The tables of docs/reliability-results.md: `python -m tests.chaos.report FILE`.

FILE has a line of JSON per campaign, as `--results` appends them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tests.chaos.final_checks import SCRIPT_COUNTS
from tests.chaos.schedule import KINDS

Record = dict[str, Any]


def lines(records: Sequence[Record]) -> list[str]:
    """Return the table as Markdown."""
    faults = [f for r in records for f in r["faults"] if f["whom"] and not f["trouble"]]
    sums = {k: sum(r["transitions"][k] for r in records) for k in ("DONE", "UNDONE", "ENDED")}
    head = [
        (
            f"{len(records)} campaigns, {sum(r['seconds'] for r in records) / 60:.0f} min in all, "
            f"{sum(r['minutes'] for r in records):g} of them with faults; "
            f"seeds {', '.join(str(r['seed']) for r in records)}"
            f"{_releases(records)}."
        ),
        (
            f"{sum(r['jobs'] for r in records)} jobs, {len(faults)} faults, "
            f"{sum(sums.values())} transitions: {sums['DONE']} landed, {sums['UNDONE']} "
            f"were undone, {sums['ENDED']} jobs ended meanwhile."
        ),
        (
            f"{sum(r['trainings'] for r in records)} trainings{_lights(records)}, "
            f"{sum(r['lost_steps'] for r in records)} steps computed again after a kill."
        ),
        *_in_place([r["in_place"] for r in records if "in_place" in r]),
        *_scripts([r["scripts"] for r in records if "scripts" in r]),
        (
            f"Jobs lost {sum(r['lost'] for r in records)}, cancelled by their user "
            f"{sum(r['cancelled'] for r in records)}, forgotten by slurmctld's crash "
            f"{sum(r['forgotten_by_slurm'] for r in records)}, run twice by Slurm on a node that "
            f"it could not reach {sum(r['twice_by_slurm'] for r in records)}, held by Slurm "
            f"after a launch that failed {sum(len(r.get('launch_failed', ())) for r in records)}, "
            f"held by the progress guard {sum(len(r.get('guarded', ())) for r in records)}."
        ),
        "",
        (
            "| fault | times | transitions in flight | landed | undone | job ended | recovery s "
            "(median, longest) | jobs thrown out | until they ran again s (median, longest) |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows = [
        _row(kind, [f for f in faults if f["kind"] == kind])
        for kind in KINDS
        if any(f["kind"] == kind for f in faults)
    ]
    broken = Counter(b["rule"] for r in records for b in r["breaches"])
    tail = ", ".join(f"{rule} {n}" for rule, n in broken.most_common()) or "none"
    return [*head, *rows, _row("all", faults), "", f"Invariants broken: {tail}."]


def _releases(records: Sequence[Record]) -> str:
    """Return the releases of Slurm, for the end of a sentence; older records have none."""
    known = dict.fromkeys(r["slurm"] for r in records if "slurm" in r)
    return f"; Slurm {', '.join(known)}" if known else ""


def _lights(records: Sequence[Record]) -> str:
    """Return the number of light trainings, for a list; older records have none."""
    number = sum(r.get("lights", 0) for r in records)
    return f" and {number} light ones" if number else ""


def _in_place(counts: Sequence[Record]) -> list[str]:
    """Return the line on changes in place; older records have none."""
    if not counts:
        return []
    sums = [sum(c.get(end, 0) for c in counts) for end in ("DONE", "UNDONE", "ENDED")]
    text = (
        f"In place {sum(sums)} of these transitions: {sums[0]} landed, {sums[1]} were undone, "
        f"{sums[2]} jobs ended meanwhile."
    )
    return [text]


def _scripts(records: Sequence[Record]) -> list[str]:
    """Return the line on unmodified scripts; older records have none."""
    if not records:
        return []
    manners: Counter[str] = Counter()
    for record in records:
        manners.update(record["manners"])
    sums = {k: sum(r.get(k, 0) for r in records) for k in SCRIPT_COUNTS}
    kinds = ", ".join(f"{count} `{manner}`" for manner, count in sorted(manners.items()))
    changes = [n for r in records for n in r["again_after_changes"]]
    by_faults = [n for r in records for n in r["again_after_faults"]]
    return [
        (
            f"Unmodified scripts: {kinds}; {sums['starts']} starts, {sums['answers']} notices "
            f"answered, {sums['proven']} shown to resume, {sums['refuted']} shown not to. Steps "
            f"computed again (median, longest): {_spread(changes)} after each of {len(changes)} "
            f"changes, {_spread(by_faults)} after each of {len(by_faults)} faults; {sums['torn']} "
            f"torn checkpoints found, {sums['cut_at_end']} saves cut after Slurm's SIGCONT, "
            f"{sums['put_back']} checkpoints put back by esrun; "
            f"{sums['twice']} scripts of which two ran at once."
        )
    ]


def _row(kind: str, faults: Sequence[Record]) -> str:
    flight = sum(len(f["in_flight"]) for f in faults)
    counts = [sum(f[k] for f in faults) for k in ("landed", "back", "ended")]
    recovery = [f["recovery_s"] for f in faults if f["recovery_s"] is not None]
    rerun = [f["rerun_s"] for f in faults if f["rerun_s"] is not None]
    cells = [kind, len(faults), flight, *counts, _spread(recovery)]
    cells += [sum(f["thrown"] for f in faults), _spread(rerun)]
    return f"| {' | '.join(map(str, cells))} |"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.1f}, {max(values):.1f}" if values else "-"


def main() -> int:
    """Print the table of a results file."""
    if len(sys.argv) != 2:
        print("usage: python -m tests.chaos.report FILE", file=sys.stderr)
        return 2
    try:
        records = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    except (OSError, ValueError) as error:
        print(f"chaos report: {sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
