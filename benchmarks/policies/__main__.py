"""All policies on Sia's published workloads, one table: `python -m benchmarks.policies`.

The workloads of docs/data.md on the 64-GPU cluster of the paper's Table 3, a round a minute (gavel,
themis and shockwave: six). A row is a policy, with or without sharing between jobs of an
application, with or without the lengths that jobs state; each figure is the mean over the workloads
of a trace, beside it the difference to what Sia's artifact produced for the same files. A round's
CPU time is that of the policy's calls: medians, and the longest of all workloads. `rho` is
finish-time fairness by our definition (`slurm_elastic.simulator.fairness`).

A row "wrong lengths": every job states its length wrong by a factor of its own, drawn with a
standard deviation of logarithms of 0.5; its progress is 1 from where the stated length ends.

`--differ 0.4`: every job takes its own multiple of its application's step times, drawn with that
standard deviation of logarithms; what sharing is worth then.

`--drawn 3`: instead of the published workloads three of each trace that are drawn from their jobs
and hours (drawn_workloads.py). The artifact's figures are then those of policy `sia` with
`artifact_compat`, which reproduces it (docs/benchmarks-sia.md).

`--all` adds all other policies, as in docs/policies.md. `--traces`, `--workloads` and `--rows`
choose a part; progress goes to stderr, the table (Markdown, as in docs/goodput-figures.md) to
stdout. `--by-policy` prints one line for each policy, ordered by the average on the first trace, as
in docs/choosing.md. `--processes` simulates several workloads at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.policies.artifact_fairness import fairness_figures
from benchmarks.policies.policy_rows import ARTIFACT, OTHER_ROWS, ROWS, Row, run
from benchmarks.sia_tables import available, reference
from slurm_elastic.simulator.results import mean
from tests.support import published_data

TRACES = ("philly", "saturn", "newtrace")

#: Key of a summary, head of the column, digits; the artifact has those of `reference`.
FIGURES = (
    ("avg_jct_h", "avg JCT h", 3),
    ("p99_jct_mean_h", "p99 h", 2),
    ("gpu_h_per_job", "GPU h/job", 2),
    ("restarts_per_job", "restarts/job", 2),
    ("unfair_fraction", "rho > 1", 3),
    ("rho_max", "worst rho", 2),
    ("policy_ms_p50", "CPU of a round ms p50", 1),
    ("policy_ms_max", "longest ms", 0),
    ("cpu_s", "CPU s", 1),
)
#: Of them, the largest of all workloads in place of the mean.
LARGEST = ("rho_max", "policy_ms_max")
#: Of them, those without a difference to the artifact's in brackets.
_WITHOUT_DIFFERENCE = ("restarts_per_job", "unfair_fraction", "rho_max")
#: Of them, those of the table by policies.
_BY_POLICY = FIGURES[:3]


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
        over_workloads = max if name in LARGEST else mean
        line[name] = over_workloads([float(totals[name]) for _, totals in runs])
        known = [r[name] for r in references if r is not None and name in r]
        if known and len(known) == len(runs):
            line[f"{name}_artifact"] = over_workloads(known)
            if name not in _WITHOUT_DIFFERENCE:
                line[f"{name}_difference"] = line[name] / line[f"{name}_artifact"] - 1
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
                if f"{key}_difference" in line:
                    cell += f" ({line[f'{key}_difference']:+.1%})"
                cells.append(cell)
            out.append(f"| {name} | {line['row']} | {' | '.join(cells)} |")
    return "\n".join(out)


def table_by_policy(lines: Sequence[dict[str, Any]]) -> str:
    """Return one line for each policy as Markdown, ordered by the average on the first trace."""
    traces = list(dict.fromkeys(line["trace"] for line in lines))
    by_row: dict[str, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_row.setdefault(line["row"], {})[line["trace"]] = line
    of_trace = {line["trace"]: line for line in lines}
    heads = [
        f"{trace} {', '.join(map(str, of_trace[trace]['workloads']))}: {head}"
        for trace in traces
        for _, head, _ in _BY_POLICY
    ]
    rows = [(label, by_trace, "") for label, by_trace in by_row.items()]
    if all(f"{key}_artifact" in of_trace[t] for t in traces for key, _, _ in _BY_POLICY):
        rows.append(("*Sia's artifact*", of_trace, "_artifact"))
    key = _BY_POLICY[0][0]
    rows.sort(key=lambda row: row[1][traces[0]][f"{key}{row[2]}"])
    out = [f"| policy | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for label, by_trace, suffix in rows:
        cells = [
            f"{by_trace[trace][f'{name}{suffix}']:.{digits}f}"
            for trace in traces
            for name, _, digits in _BY_POLICY
        ]
        out.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(out)


def known_reference(folder: Path, trace: str, index: int) -> dict[str, float] | None:
    """Return the artifact's figures for one workload; None if they are not in the data."""
    totals = reference(folder, "sia", trace, index)
    return None if totals is None else totals | fairness_figures(folder, trace, index)


def simulated(
    row: Row, index: int, *, trace: str, folder: Path, differ: float, drawn: bool
) -> dict[str, Any]:
    """Return the summary of one simulation, and the milliseconds of the policy's longest call."""
    result = run(row, trace, index, folder, differ=differ, drawn=drawn)
    return result.summary() | {"policy_ms_max": 1000 * max(result.policy_s)}


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
    parser.add_argument("--by-policy", action="store_true", help="one line for each policy")
    parser.add_argument("--processes", type=int, default=1, help="simulations at once")
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
    with ProcessPoolExecutor(options.processes) as pool:
        for trace in options.traces:
            published = available(folder, trace)
            known_numbers = (
                range(1, options.drawn + 1) if options.drawn and published else published
            )
            numbers = [i for i in known_numbers if not options.workloads or i in options.workloads]
            if not numbers:
                continue
            # The artifact has no figures of drawn workloads: `ARTIFACT` stands for it.
            first = [ARTIFACT] if options.drawn and not options.differ else []
            simulate = partial(
                simulated,
                trace=trace,
                folder=folder,
                differ=options.differ,
                drawn=bool(options.drawn),
            )
            simulations = [
                (row, [pool.submit(simulate, row, index) for index in numbers])
                for row in (*first, *rows)
            ]
            references: list[Mapping[str, Any] | None] = [None for _ in numbers]
            if not options.drawn and not options.differ:
                references = [known_reference(folder, trace, i) for i in numbers]
            for row, futures in simulations:
                summaries = []
                for index, future in zip(numbers, futures, strict=True):
                    summaries.append((index, future.result()))
                    print(
                        f"{time.perf_counter() - began:6.0f} s: {trace}-{index}, {row.label}:"
                        f" avg JCT {summaries[-1][1]['avg_jct_h']:.3f} h",
                        file=sys.stderr,
                        flush=True,
                    )
                if row is ARTIFACT:
                    references = [totals for _, totals in summaries]
                else:
                    lines.append(figures(row, trace, summaries, references))
    show = table_by_policy if options.by_policy else table
    print(json.dumps(lines, indent=1) if options.json else show(lines))


if __name__ == "__main__":
    main()
