"""`selastic compare`: several policies on the same workloads, or on a site's accounting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from slurm_elastic.cli import options
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate import simulation_answer, simulation_inputs, simulation_options
from slurm_elastic.cli.simulate.neighbour_options import acting, variants
from slurm_elastic.cli.simulate.past_options import past_options, read_past
from slurm_elastic.cli.simulate.sleep_answer import sleep_by_run, sleep_lines
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.simulator.results import Result
    from slurm_elastic.simulator.workloads.accounting_trace import AccountingTrace
    from slurm_elastic.simulator.workloads.cluster_text import Cluster

POLICIES = "sia,gavel,las,fifo"
PAST_POLICIES = "static,fair,sia"
#: Assumed scaling of jobs of the past: from pessimistic to optimistic.
SCALINGS = ("amdahl:0.9", "amdahl:0.99")

#: Policies that represent plain Slurm: a job of the past keeps its GPU type.
_PLAIN = ("static", "fifo")

#: Header, key of the summary, decimals.
_FIGURES = (
    ("AVG_JCT_H", "avg_jct_h", 2),
    ("P50_JCT_H", "p50_jct_h", 2),
    ("P99_JCT_H", "p99_jct_h", 2),
    ("MAKESPAN_H", "makespan_h", 2),
    ("GPU_H_PER_JOB", "gpu_h_per_job", 2),
    ("RESTARTS_PER_JOB", "restarts_per_job", 2),
    ("RHO_MAX", "rho_max", 2),
    ("UNFAIR", "unfair_fraction", 3),
    ("POLICY_MS_P50", "policy_ms_p50", 1),
)
#: Columns beside the accounting; ranges are wide.
_PAST_FIGURES = tuple(
    f for f in _FIGURES if f[0] not in ("MAKESPAN_H", "RHO_MAX", "UNFAIR", "POLICY_MS_P50")
)
#: Figures with a ratio to the first policy.
_RATIOS = ("avg_jct_h", "p50_jct_h", "p99_jct_h", "makespan_h", "gpu_h_per_job")
_AS_IT_WAS = "as it was"
#: GPUs of a node in the example of --cluster, where a file shows more than a node has.
_USUAL_PER_NODE = 8
_MOST_PER_NODE = 16


@options.verb
@simulation_options.shared_options
@click.option(
    "--policies", metavar="NAME,…",
    help=f"Policies; ratios are to the first ({POLICIES}; with --sacct {PAST_POLICIES}).",
)  # fmt: skip
@click.option(
    "--sacct",
    metavar="FILE",
    help="Simulate past jobs: accounting (`sacct -P` or `--json`), or a published trace.",
)
@click.option(
    "--scaling", "scalings", metavar="CURVE", multiple=True,
    help="With --sacct: from pessimistic to optimistic (amdahl:0.9 and amdahl:0.99).",
)  # fmt: skip
@click.option(
    "--grow", type=click.FloatRange(1, 1000), metavar="X",
    help="With --sacct: jobs grow to X times the GPUs they requested (4).",
)  # fmt: skip
@click.option(
    "--sleep", is_flag=True,
    help="Show how long idle nodes could have slept, by [sleep] of --config (docs/sleep.md).",
)  # fmt: skip
@past_options("With --sacct: ")
@options.as_json
def compare(
    *,
    workloads: tuple[str, ...],
    policies: str | None,
    sacct: str | None,
    scalings: tuple[str, ...],
    grow: float | None,
    start: str | None,
    end: str | None,
    partition: str | None,
    completed_only: bool,
    sleep: bool,
    jobs_csv: str | None,
    plot: str | None,
    json_: bool,
    **shared: Any,
) -> None:
    """Run the same workloads under several policies.

    With --neighbours each policy runs twice; in the rows `POLICY+apart` its placement keeps jobs
    apart that hurt each other (docs/colocation.md). With --gpu-pairs, too; in the rows
    `POLICY+share` two jobs may have one GPU.

    With --sacct: what elasticity would have changed for past jobs. Accounting does not record how
    jobs scale, so the answer is a range over the given curves. A CURVE is `linear`, `amdahl:0.95`,
    `none`, `"1=1;2=1.9;4=3.5"` or a CSV file with the columns match, scaling.
    """
    inputs = simulation_options.Inputs(**shared)
    with simulation_inputs.refusals():
        names = _policies(policies or (POLICIES if sacct is None else PAST_POLICIES))
        simulation_inputs.check(inputs, plot=plot, jobs_csv=jobs_csv)
        if sacct is None:
            for value, option in (
                (scalings, "--scaling"), (grow, "--grow"), (completed_only, "--completed-only"),
                (start, "--start"), (end, "--end"), (partition, "--partition"),
            ):  # fmt: skip
                if value:
                    raise CliError(f"{option} needs --sacct FILE", USAGE)
            machines = simulation_inputs.cluster(inputs, builtin=inputs.profiles is None)
            loaded = simulation_inputs.load(workloads, inputs, machines)
            suffixes = variants(
                apart=inputs.neighbours is not None, share=inputs.gpu_pairs is not None
            )
            tasks = [
                acting(simulation_inputs.task(workload, machines, inputs, name), variant)
                for name in names
                for variant in suffixes
                for workload in loaded
            ]
            names = [name + variant for name in names for variant in suffixes]
            results = simulation_inputs.run(tasks, inputs)
            by_name = {
                name: results[i * len(loaded) : (i + 1) * len(loaded)]
                for i, name in enumerate(names)
            }
            answer = compared_figures(by_name)
            lines = shown(by_name, answer)
            policy_runs = [
                _PolicyRuns(name, name, "", runs, answer["policies"][name]["ratio"])
                for name, runs in by_name.items()
            ]
        else:
            if workloads:
                raise CliError("name either WORKLOAD or --sacct FILE, not both", USAGE)
            policy_runs, answer, lines = _compare_past(
                Path(sacct), names, scalings or SCALINGS, inputs,
                grow=grow,
                chosen={
                    "start": start, "end": end, "partition": partition,
                    "completed_only": completed_only,
                },
            )  # fmt: skip
        if sleep:
            runs = {one.name: one.results for one in policy_runs}
            answer["sleep"] = sleep_by_run(runs, simulation_inputs.settings(inputs, "").sleep)
            lines += sleep_lines(answer["sleep"])
        _write(policy_runs, jobs_csv, plot, Path(sacct).name if sacct else "")
    if json_:
        options.put_json(simulation_inputs.plain(answer))
    elif jobs_csv != "-":
        options.put(lines)


def _policies(text: str) -> list[str]:
    names = [simulation_inputs.known_policy(n.strip(), "--policies") for n in text.split(",")]
    for name in names:
        if names.count(name) > 1:
            raise CliError(f"--policies: duplicate policy {name}", USAGE)
    return names


class _PolicyRuns(NamedTuple):
    """Results of one policy, under one assumption about scaling ("" if it is known)."""

    name: str
    policy: str
    scaling: str
    results: Sequence[Result]
    ratios: Mapping[str, float]


def _write(runs: Sequence[_PolicyRuns], jobs_csv: str | None, plot: str | None, title: str) -> None:
    from slurm_elastic.simulator import plots  # noqa: PLC0415
    from slurm_elastic.simulator.results import jobs_csv as rows  # noqa: PLC0415

    if jobs_csv is not None:
        results = [r for policy_runs in runs for r in policy_runs.results]
        simulation_inputs.write_text(jobs_csv, rows(results), "--jobs-csv")
    if plot is not None:
        first = runs[0].policy
        jobs = f"{title} ({len(runs[0].results[0].jobs)} jobs)" if title else ""
        drawn = [
            plots.Drawn(
                name=one.name,
                policy=one.policy,
                results=one.results,
                ratios={} if one.policy == first else one.ratios,
            )
            for one in runs
        ]
        plots.draw_comparison(drawn, Path(plot), title=jobs)


def compared_figures(results: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Return the figures of each policy, with ratios to the first."""
    figures = {name: simulation_answer.elastic_figures(runs) for name, runs in results.items()}
    first = next(iter(figures.values()))
    return {
        "workloads": first["workloads"],
        "cluster": first["cluster"],
        "jobs": first["jobs"],
        "first": next(iter(figures)),
        "policies": {name: {**one, "ratio": _ratios(one, first)} for name, one in figures.items()},
    }


def _ratios(run_figures: Mapping[str, Any], reference: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: run_figures[key] / reference[key] if reference[key] else math.nan for key in _RATIOS
    }


def shown(results: Mapping[str, Sequence[Result]], answer: Mapping[str, Any]) -> list[str]:
    """Return the lines of the answer."""
    first_runs = next(iter(results.values()))
    gpus = sum(g for _, g in first_runs[0].gpus)
    name_ = clean(first_runs[0].workload)
    workloads = name_ if len(first_runs) == 1 else f"{len(first_runs)} workloads"
    rows = [
        {"POLICY": name, **{h: _cell([one], key, places) for h, key, places in _FIGURES}}
        for name, one in answer["policies"].items()
    ]
    return [
        (
            f"{answer['jobs']} jobs of {workloads} on {answer['cluster']} ({gpus} GPUs);"
            f" x: times {answer['first']}'s"
        ),
        *_table(rows, _FIGURES),
        *(
            f"{name} rejected {one['dropped']} jobs, which its row does not count; compare the"
            " numbers of jobs, too"
            for name, one in answer["policies"].items()
            if one["dropped"]
        ),
    ]


def _table(rows: Sequence[Mapping[str, str]], figures: Sequence[tuple[str, str, int]]) -> list[str]:
    headers = ["POLICY", *(h for h, _, _ in figures)]
    columns = [_column(h) for h in headers]
    return render(rows, columns, headers, TableLayout())


def _column(header: str) -> Column:
    return Column(header, lambda row: row.get(header, "-"), right=header != "POLICY")


def _cell(figures: Sequence[Mapping[str, Any]], key: str, places: int) -> str:
    """Return a figure, or its range, with its ratio to the first policy."""
    text = _range([one[key] for one in figures], places)
    ratios = [one["ratio"][key] for one in figures if key in one.get("ratio", ())]
    return f"{text} x{_range(ratios, 2)}" if ratios else text


def _range(values: Sequence[float], places: int) -> str:
    texts = list(dict.fromkeys(f"{v:.{places}f}" for v in values))
    return texts[0] if len(texts) == 1 else f"{texts[0]}..{texts[-1]}"


def _compare_past(
    path: Path,
    names: Sequence[str],
    scalings: Sequence[str],
    inputs: simulation_options.Inputs,
    *,
    grow: float | None,
    chosen: Mapping[str, Any],
) -> tuple[list[_PolicyRuns], dict[str, Any], list[str]]:
    """Simulate the jobs of the accounting; return the runs, the JSON answer and the lines.

    `chosen` are the values of `past_options`.
    """
    from slurm_elastic.simulator.workloads import curve_jobs, scaling_curves  # noqa: PLC0415

    if inputs.neighbours is not None:
        raise CliError("--neighbours does not apply to --sacct; leave it out", USAGE)
    if inputs.gpu_pairs is not None:
        raise CliError("--gpu-pairs does not apply to --sacct; leave it out", USAGE)
    if inputs.profiles is not None:
        raise CliError("--profiles does not apply to --sacct; leave it out", USAGE)
    rules = [scaling_curves.rules(text) for text in scalings]
    past = read_past(path, **chosen)
    if inputs.cluster is None:
        raise CliError(f"--cluster is missing; {clean(_most_used(past))}", USAGE)
    machines = simulation_inputs.cluster(inputs, builtin=False)
    speeds = simulation_options.type_speeds(inputs.speeds)
    factor = grow or curve_jobs.GROW
    jobs = {
        text: curve_jobs.from_accounting(past, rule, grow=factor, speeds=speeds)
        for text, rule in zip(scalings, rules, strict=True)
    }
    tasks = [
        simulation_inputs.task(
            curve_jobs.build(
                f"{path.stem} {text}",
                scaled_jobs,
                machines.types,
                speeds=speeds,
                keep_types=name in _PLAIN,
            ),
            machines,
            inputs,
            name,
        )
        for name in names
        for text, scaled_jobs in jobs.items()
    ]
    results = iter(simulation_inputs.run(tasks, inputs))
    by_policy = {name: {text: next(results) for text in scalings} for name in names}
    figures: dict[str, dict[str, dict[str, Any]]] = {
        name: {text: dict(simulation_answer.elastic_figures((run,))) for text, run in runs.items()}
        for name, runs in by_policy.items()
    }
    reference = figures[names[0]]
    for runs in figures.values():
        for text, run_figures in runs.items():
            run_figures["ratio"] = _ratios(run_figures, reference[text])
    accounted = _accounted(past)
    oversized = curve_jobs.oversized(next(iter(jobs.values())), machines, speeds)
    answer = {
        "file": str(path), "read": past.summary(), "cluster": str(machines), "grow": factor,
        "scalings": list(scalings), "first": names[0], "oversized": oversized,
        "as_it_was": accounted, "policies": figures,
    }  # fmt: skip
    policy_runs = [
        _PolicyRuns(
            f"{name} ({text})" if len(scalings) > 1 else name,
            name,
            text,
            [result],
            figures[name][text]["ratio"],
        )
        for name, runs in by_policy.items()
        for text, result in runs.items()
    ]
    return policy_runs, answer, _past_lines(answer, machines, path)


def _past_lines(answer: Mapping[str, Any], machines: Cluster, path: Path) -> list[str]:
    rows = [
        {
            "POLICY": name,
            **{h: _cell(list(runs.values()), key, places) for h, key, places in _PAST_FIGURES},
        }
        for name, runs in answer["policies"].items()
    ]
    accounted = answer["as_it_was"]
    rows.insert(
        0,
        {"POLICY": _AS_IT_WAS, **{h: f"{accounted[k]:.{p}f}" for h, k, p in _PAST_FIGURES}},
    )
    curves = answer["scalings"]
    assumed = (
        f"pessimistic {curves[0]} .. optimistic {curves[-1]}" if len(curves) > 1 else curves[0]
    )
    return [
        f"{clean(path.name)}: {clean(answer['read'])}",
        (
            f"on {machines} ({machines.gpus} GPUs); assumed, not measured: jobs scale as"
            f" {clean(assumed)} and grow to {answer['grow']:g} times what they asked for;"
            f" x: times {answer['first']}'s"
        ),
        *_oversized_line(answer["oversized"]),
        *_table(rows, _PAST_FIGURES),
    ]


def _oversized_line(count: int) -> list[str]:
    if not count:
        return []
    line = (
        f"{count} of them asked for more GPUs than --cluster has of their type: here they run on"
        " fewer; name more nodes to have them as they were"
    )
    return [line]


def _accounted(past: AccountingTrace) -> dict[str, float]:
    """Return the same figures of the accounting itself."""
    jct = sorted((j.end - j.submit) / 3600 for j in past.jobs)
    begin, end = min(j.submit for j in past.jobs), max(j.end for j in past.jobs)
    gpu_s = sum(r.seconds * r.gpus for j in past.jobs for r in j.runs)
    runs = sum(len(j.runs) - 1 for j in past.jobs)
    return {
        "avg_jct_h": sum(jct) / len(jct),
        "p50_jct_h": jct[int(0.5 * len(jct))],
        "p99_jct_h": jct[int(0.99 * len(jct))],
        "makespan_h": (end - begin) / 3600,
        "gpu_h_per_job": gpu_s / 3600 / len(jct),
        "restarts_per_job": runs / len(jct),
    }


def _most_used(past: AccountingTrace) -> str:
    """Return the smallest cluster that holds the GPUs that were in use at once."""
    peaks: dict[str, tuple[int, int]] = {}
    for kind in sorted({r.gpu_type for j in past.jobs for r in j.runs}):
        runs = [r for j in past.jobs for r in j.runs if r.gpu_type == kind]
        edges = sorted(
            [(r.start, r.gpus) for r in runs] + [(r.start + r.seconds, -r.gpus) for r in runs]
        )
        peak = gpus_held = 0
        for _, change in edges:
            gpus_held += change
            peak = max(peak, gpus_held)
        each = max(math.ceil(r.gpus / r.nodes) for r in runs)
        peaks[kind] = (peak, each if each <= _MOST_PER_NODE else _USUAL_PER_NODE)
    used = ", ".join(f"{peak} {kind or 'GPUs'}" for kind, (peak, _) in peaks.items())
    example = ",".join(
        f"{kind or 'gpu'}:{math.ceil(peak / each)}x{each}" for kind, (peak, each) in peaks.items()
    )
    return f"{used} were in use at once: write at least --cluster {example}"
