"""`selastic simulate`: workloads under one policy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from slurm_elastic.cli import options
from slurm_elastic.cli.formatting import clean, digits
from slurm_elastic.cli.simulate import (
    gang_inputs,
    simulation_answer,
    simulation_inputs,
    simulation_options,
)

if TYPE_CHECKING:
    from slurm_elastic.cli.simulate.simulation_answer import SimulationAnswer
    from slurm_elastic.simulator.results import Result


@options.verb
@simulation_options.shared_options
@click.option(
    "--policy", default="sia", show_default=True, metavar="NAME", help="Policy that decides."
)
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
    """Replay workloads through the controller's decisions.

    The cluster need not exist. Without --profiles the built-in applications are used, whose
    figures are our choice; without WORKLOAD a generated workload of them.
    """
    inputs = simulation_options.Inputs(**shared)
    gangs = gang_inputs.GangInputs(slowdown=slowdown, timers=timers, lease=lease, slots=slots)
    if format_ == "dally":
        chosen = context.get_parameter_source("policy") is not ParameterSource.DEFAULT
        with simulation_inputs.refusals():
            gang_inputs.refuse(inputs, plot)
            gang_runs = gang_inputs.run(workloads, policy if chosen else "dally", inputs, gangs)
            gang_inputs.put(
                gang_runs, cluster=inputs.cluster or "", as_json=json_, jobs_csv=jobs_csv
            )
        return
    gangs.refuse_without_gangs()
    with simulation_inputs.refusals():
        simulation_inputs.known_policy(policy, "--policy")
        simulation_inputs.check(inputs, plot=plot, jobs_csv=jobs_csv)
        machines = simulation_inputs.cluster(inputs, builtin=inputs.profiles is None)
        loaded = simulation_inputs.load(workloads, inputs, machines)
        tasks = [simulation_inputs.task(one, machines, inputs, policy) for one in loaded]
        results = simulation_inputs.run(tasks, inputs)
        _write(results, jobs_csv, plot)
    answer = simulation_answer.elastic_answer(results)
    if json_:
        options.put_json(simulation_inputs.plain(answer))
    elif jobs_csv != "-":
        options.put(shown(results, answer))


def _write(results: Sequence[Result], jobs_csv: str | None, plot: str | None) -> None:
    from slurm_elastic.simulator import plots  # noqa: PLC0415
    from slurm_elastic.simulator.results import jobs_csv as rows  # noqa: PLC0415

    if jobs_csv is not None:
        simulation_inputs.write_text(jobs_csv, rows(results), "--jobs-csv")
    if plot is not None:
        plots.draw_run(results, Path(plot))


def shown(results: Sequence[Result], answer: SimulationAnswer) -> list[str]:
    """Return the answer as lines of text."""
    workload = clean(results[0].workload)
    workloads = workload if len(results) == 1 else f"{len(results)} workloads"
    gpu_h = answer["gpu_h_per_job"]
    lost = answer["gpu_h_lost_per_job"] / gpu_h if gpu_h else 0.0
    lines = [
        (
            f"{answer['jobs']} jobs of {workloads}, policy {answer['policy']}, on"
            f" {answer['cluster']} ({answer['gpus']} GPUs)"
        ),
        (
            f"  completion time   {_hours(answer['avg_jct_h'])} on average,"
            f" {_hours(answer['p50_jct_h'])} median, {_hours(answer['p99_jct_h'])} p99"
        ),
        f"  makespan          {_hours(answer['makespan_h'])}",
        (
            f"  GPU time          {digits(gpu_h)} GPU h per job, {100 * lost:.1f} %"
            f" of it in restarts; {100 * answer['utilisation']:.0f} % of the cluster"
        ),
        f"  restarts          {answer['restarts_per_job']:.2f} per job",
        (
            f"  contention        {answer['contention_mean']:.1f} jobs at once on average,"
            f" {answer['contention_max']} at most"
        ),
        (
            f"  CPU time          policy {answer['policy_ms_p50']:.1f} ms per round,"
            f" {answer['policy_ms_p95']:.1f} ms p95; simulation {digits(answer['cpu_s'])} s"
        ),
    ]
    if answer["dropped"]:
        lines.insert(
            1,
            f"  rejected          {answer['dropped']} more jobs, not counted in the figures below",
        )
    if any(r.crossing_gpu_s for r in results):
        lines.insert(
            -1,
            f"  crossing racks    {digits(answer['crossing_gpu_h'] or 0.0)} GPU h lost to"
            " communication between racks",
        )
    if answer["in_place_per_job"]:
        lines.insert(-2, f"  in place          {answer['in_place_per_job']:.2f} changes per job")
    if answer["freezing_layers"] is not None:
        lines.insert(
            -1,
            f"  freezing          {100 * answer['freezing_layers']:.0f} % of the layers on average;"
            f" {100 * (answer['freezing_lost'] or 0):.1f} % more progress to make for it",
        )
    if answer["unfair_fraction"] is not None and not math.isnan(answer["unfair_fraction"]):
        lines.insert(
            -1,
            f"  fairness          rho {answer['rho_mean']:.2f} on average,"
            f" {answer['rho_max']:.2f} at most;"
            f" {100 * answer['unfair_fraction']:.1f} % of the jobs above 1",
        )
    if len(results) > 1:
        lines += [
            f"  {clean(r.workload)}: {_hours(s['avg_jct_h'])} on average, makespan"
            f" {_hours(s['makespan_h'])}, {s['restarts_per_job']:.2f} restarts per job"
            for r, s in zip(results, answer["each"], strict=True)
        ]
    if answer["notes"]:
        lines.append(f"  notes             {len(answer['notes'])} of rounds; --json lists them")
    return lines


def _hours(hours: float) -> str:
    return f"{hours:.3f} h" if hours < 1 else f"{hours:.2f} h"
