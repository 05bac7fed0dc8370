"""`selastic simulate`: a workload under one policy, on a cluster that need not exist."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from slurm_elastic.cli import options
from slurm_elastic.cli.formatting import clean, digits
from slurm_elastic.cli.reason_text import sentence
from slurm_elastic.cli.simulate import gang_inputs, simulation_inputs

if TYPE_CHECKING:
    from slurm_elastic.simulator.results import Result


@options.verb
@simulation_inputs.shared
@click.option("--policy", default="sia", show_default=True, metavar="NAME", help="Who decides.")
@gang_inputs.only_gangs
@options.as_json
@click.pass_context
def simulate(
    context: click.Context,
    /,
    *,
    workloads: tuple[str, ...],
    policy: str,
    format_: str,
    slowdown: str | None,
    timers: str | None,
    lease: float,
    slots: int,
    jobs_csv: str | None,
    plot: str | None,
    json_: bool,
    **shared: Any,
) -> None:
    """Replay workloads through the decisions that run live.

    Without --profiles the built-in, invented applications are used; without WORKLOAD an invented
    workload of them.
    """
    inputs = simulation_inputs.Inputs(**shared)
    gangs = gang_inputs.GangInputs(slowdown=slowdown, timers=timers, lease=lease, slots=slots)
    if format_ == "dally":
        chosen = context.get_parameter_source("policy") is not ParameterSource.DEFAULT
        with simulation_inputs.refusals():
            gang_inputs.refuse(inputs, plot)
            found = gang_inputs.run(workloads, policy if chosen else "dally", inputs, gangs)
            gang_inputs.put(found, as_json=json_, jobs_csv=jobs_csv)
        return
    gangs.unused()
    with simulation_inputs.refusals():
        simulation_inputs.known_policy(policy, "--policy")
        simulation_inputs.check(inputs, plot=plot, jobs_csv=jobs_csv)
        machines = simulation_inputs.cluster(inputs, builtin=inputs.profiles is None)
        loaded = simulation_inputs.load(workloads, inputs, machines)
        tasks = [simulation_inputs.task(one, machines, inputs, policy) for one in loaded]
        results = simulation_inputs.run(tasks, inputs)
        _write(results, jobs_csv, plot)
    if json_:
        options.put_json(simulation_inputs.plain(answer(results)))
    elif jobs_csv != "-":
        options.put(shown(results))


def _write(results: Sequence[Result], jobs_csv: str | None, plot: str | None) -> None:
    from slurm_elastic.simulator import plots  # noqa: PLC0415
    from slurm_elastic.simulator.results import jobs_csv as rows  # noqa: PLC0415

    if jobs_csv is not None:
        simulation_inputs.write_text(jobs_csv, rows(results), "--jobs-csv")
    if plot is not None:
        plots.draw_run(results, Path(plot))


def answer(results: Sequence[Result]) -> dict[str, Any]:
    """The whole answer: figures over all workloads, then those of each."""
    from slurm_elastic.simulator.results import summary  # noqa: PLC0415

    notes = sorted({n if isinstance(n, str) else sentence(n) for r in results for n in r.notes})
    return {**summary(results), "notes": notes, "each": [r.summary() for r in results]}


def shown(results: Sequence[Result]) -> list[str]:
    """The answer for people."""
    said = answer(results)
    gpus = sum(g for _, g in results[0].gpus)
    many = clean(results[0].workload) if len(results) == 1 else f"{len(results)} workloads"
    lost = said["gpu_h_lost_per_job"] / said["gpu_h_per_job"] if said["gpu_h_per_job"] else 0.0
    lines = [
        (
            f"{said['jobs']} jobs of {many}, policy {said['policy']}, on {said['cluster']}"
            f" ({gpus} GPUs)"
        ),
        (
            f"  completion time   {_hours(said['avg_jct_h'])} on average,"
            f" {_hours(said['p50_jct_h'])} median, {_hours(said['p99_jct_h'])} p99"
        ),
        f"  makespan          {_hours(said['makespan_h'])}",
        (
            f"  GPU time          {digits(said['gpu_h_per_job'])} GPU h per job, {100 * lost:.1f} %"
            f" of it in restarts; {100 * said['utilisation']:.0f} % of the cluster"
        ),
        f"  restarts          {said['restarts_per_job']:.2f} per job",
        (
            f"  contention        {said['contention_mean']:.1f} jobs at once on average,"
            f" {said['contention_max']} at most"
        ),
        (
            f"  policy            {said['policy_ms_p50']:.1f} ms per round,"
            f" {said['policy_ms_p95']:.1f} ms p95; simulation {digits(said['cpu_s'])} s of CPU"
        ),
    ]
    if said.get("dropped"):
        lines.insert(
            1, f"  turned away       {said['dropped']} more jobs, which count in nothing below"
        )
    if any(r.crossing_gpu_s for r in results):
        lines.insert(
            -1,
            f"  crossing racks    {digits(said['crossing_gpu_h'])} GPU h lost to communication"
            " between racks",
        )
    if "freezing_layers" in said:
        lines.insert(
            -1,
            f"  freezing          {100 * said['freezing_layers']:.0f} % of the layers on average;"
            f" {100 * said['freezing_lost']:.1f} % more progress to make for it",
        )
    if not math.isnan(said["unfair_fraction"]):
        lines.insert(
            -1,
            f"  fairness          rho {said['rho_mean']:.2f} on average,"
            f" {said['rho_max']:.2f} at most;"
            f" {100 * said['unfair_fraction']:.1f} % of the jobs above 1",
        )
    if len(results) > 1:
        lines += [
            f"  {clean(r.workload)}: {_hours(s['avg_jct_h'])} on average, makespan"
            f" {_hours(s['makespan_h'])}, {s['restarts_per_job']:.2f} restarts per job"
            for r, s in zip(results, said["each"], strict=True)
        ]
    if said["notes"]:
        lines.append(f"  notes             {len(said['notes'])} of rounds; --json lists them")
    return lines


def _hours(hours: float) -> str:
    return f"{hours:.3f} h" if hours < 1 else f"{hours:.2f} h"
