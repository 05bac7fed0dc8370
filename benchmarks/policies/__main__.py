"""All policies on Sia's published workloads, one table: `python -m benchmarks.policies`.

The workloads of docs/data.md on the 64-GPU cluster of the paper's Table 3, a round a minute (gavel,
themis and shockwave: six). A row is a policy, with or without sharing between jobs of an
application, with or without the lengths that jobs state; each figure is the mean over the workloads
of a trace, beside it the difference to what Sia's artifact produced for the same files. CPU per
round is wall time of the policy's calls in this process.

A row "wrong lengths": every job states its length wrong by a factor of its own, drawn with a
standard deviation of logarithms of 0.5; its progress is 1 from where the stated length ends.

`--differ 0.4`: every job takes its own multiple of its application's step times, drawn with that
standard deviation of logarithms; what sharing is worth then.

`--drawn 3`: instead of the published workloads three of each trace that are drawn from their jobs
and hours (drawn_workloads.py). The artifact's figures are then those of policy `sia` with
`artifact_compat`, which reproduces it (docs/benchmarks-sia.md).

`--all` adds all other policies, as in docs/policies.md. `--traces`, `--workloads` and `--rows`
choose a part; progress goes to stderr, the table (Markdown,
as in docs/goodput-figures.md) to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.policies.policy_rows import ARTIFACT, OTHER_ROWS, ROWS, Row, run
from benchmarks.sia_tables import available, reference
from slurm_elastic.simulator.results import mean
from tests.support import published_data

TRACES = ("philly", "saturn", "newtrace")

#: Number of each workload, and summary of its simulation.
Summaries = list[tuple[int, dict[str, Any]]]


#: Key of a summary, head of the column, digits; the artifact has those of `reference`.
FIGURES = (
    ("avg_jct_h", "avg JCT h", 3),
    ("p99_jct_mean_h", "p99 h", 2),
    ("gpu_h_per_job", "GPU h/job", 2),
    ("restarts_per_job", "restarts/job", 2),
    ("unfair_fraction", "rho > 1", 3),
    ("policy_ms_p50", "round ms p50", 1),
    ("cpu_s", "CPU s", 1),
)


def figures(
    row: Row,
    trace: str,
    runs: Sequence[tuple[int, dict[str, Any]]],
    references: Sequence[Mapping[str, Any] | None],
) -> dict[str, Any]:
    """Return a row of the table: means over workloads, and differences to the artifact's.

    Args:
        row: the policy.
        trace: name of the trace.
        runs: number of each workload, and summary of its simulation.
        references: the artifact's summary of each workload; None: there is none.
    """
    line: dict[str, Any] = {"trace": trace, "row": row.label, "workloads": [i for i, _ in runs]}
    for name, _, _ in FIGURES:
        line[name] = mean([float(totals[name]) for _, totals in runs])
        known = [r[name] for r in references if r is not None and name in r]
        if known and len(known) == len(runs):
            line[f"{name}_artifact"] = mean(known)
            line[f"{name}_difference"] = line[name] / mean(known) - 1
    return line


def table(lines: Sequence[dict[str, Any]]) -> str:
    """Return the lines as Markdown, the artifact's figures first in each trace."""
    heads = [head for _, head, _ in FIGURES]
    out = [f"| trace | policy | {' | '.join(heads)} |", "|---" * (len(heads) + 2) + "|"]
    for trace in dict.fromkeys(line["trace"] for line in lines):
        of_trace = [line for line in lines if line["trace"] == trace]
        name = f"{trace} {', '.join(map(str, of_trace[0]['workloads']))}"
        artifact = [
            f"{of_trace[0][f'{n}_artifact']:.{digits}f}" if f"{n}_artifact" in of_trace[0] else ""
            for n, _, digits in FIGURES
        ]
        if any(artifact):
            out.append(f"| {name} | *Sia's artifact* | {' | '.join(artifact)} |")
        for line in of_trace:
            cells = []
            for key, _, digits in FIGURES:
                cell = f"{line[key]:.{digits}f}"
                if key != "restarts_per_job" and f"{key}_difference" in line:
                    cell += f" ({line[f'{key}_difference']:+.1%})"
                cells.append(cell)
            out.append(f"| {name} | {line['row']} | {' | '.join(cells)} |")
    return "\n".join(out)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies", description=__doc__)
    labels = ", ".join(row.label for row in (*ROWS, *OTHER_ROWS))
    parser.add_argument("--traces", nargs="+", default=list(TRACES), help=", ".join(TRACES))
    parser.add_argument("--workloads", nargs="+", type=int, help="only these numbers")
    parser.add_argument("--rows", nargs="+", help=f"only policies or rows of these names: {labels}")
    parser.add_argument("--all", action="store_true", help="all policies, not goodput and sia only")
    parser.add_argument("--differ", type=float, default=0.0, help="deviation between jobs")
    parser.add_argument("--drawn", type=int, default=0, metavar="N", help="N drawn workloads")
    parser.add_argument("--json", action="store_true")
    published_data.add_option(parser)
    options = parser.parse_args()
    folder = published_data.locate_or_exit(parser, options, "sia", "traces", "workloads")
    published_data.locate_optional(
        parser, options, "sia", "reference", without="the artifact's figures are left out"
    )
    chosen = set(options.rows or ())
    known = (*ROWS, *OTHER_ROWS) if options.all or chosen else ROWS
    rows = [r for r in known if not chosen or {r.label, r.policy} & chosen]
    if not rows:
        parser.error(f"--rows {' '.join(options.rows)}: no such row; known: {labels}")
    began, lines = time.perf_counter(), list[dict[str, Any]]()
    for trace in options.traces:
        published = available(folder, trace)
        known_numbers = range(1, options.drawn + 1) if options.drawn and published else published
        numbers = [i for i in known_numbers if not options.workloads or i in options.workloads]

        def simulated(row: Row, trace: str = trace, numbers: list[int] = numbers) -> Summaries:
            summaries = []
            for index in numbers:
                result = run(
                    row, trace, index, folder, differ=options.differ, drawn=bool(options.drawn)
                )
                summaries.append((index, result.summary()))
                print(
                    f"{time.perf_counter() - began:6.0f} s: {trace}-{index}, {row.label}:"
                    f" avg JCT {summaries[-1][1]['avg_jct_h']:.3f} h",
                    file=sys.stderr,
                    flush=True,
                )
            return summaries

        references: list[Mapping[str, Any] | None] = [None for _ in numbers]
        if options.drawn and not options.differ:
            references = [totals for _, totals in simulated(ARTIFACT)]
        elif not options.differ:
            references = [reference(folder, "sia", trace, i) for i in numbers]
        lines += [figures(row, trace, simulated(row), references) for row in rows if numbers]
    print(json.dumps(lines, indent=1) if options.json else table(lines))


if __name__ == "__main__":
    main()
