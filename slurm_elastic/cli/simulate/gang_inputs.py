"""`selastic simulate --format dally`: rigid gangs placed by offers (docs/dally-published.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_elastic.cli import options
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean, digits
from slurm_elastic.cli.simulate import (
    progress,
    simulation_answer,
    simulation_inputs,
    simulation_options,
)

if TYPE_CHECKING:
    from slurm_elastic.models.communication import Communication
    from slurm_elastic.simulator.gangs.gang_policy import GangPolicy
    from slurm_elastic.simulator.gangs.gang_results import GangResult

F = TypeVar("F", bound=Callable[..., Any])

POLICIES = ("dally", "gandiva", "tiresias", "tiresias-condfix")
#: Our own order and tuner; every other word selects the published system.
OWN = "own"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GangInputs:
    """Values of the options that only `--format dally` has."""

    slowdown: str | None
    timers: str | None
    lease: float
    slots: int

    def refuse_without_gangs(self) -> None:
        """Refuse the options without `--format dally`.

        Raises:
            CliError: one was given.
        """
        for value, option in ((self.slowdown, "--slowdown"), (self.timers, "--timers")):
            if value is not None:
                raise CliError(f"{option} needs --format dally", USAGE)


def refuse(inputs: simulation_options.Inputs, plot: str | None) -> None:
    """Refuse options that do not apply to gangs.

    Raises:
        CliError: one was given.
    """
    inapplicable = (
        (inputs.profiles, "--profiles"),
        (inputs.class_, "--class"),
        (inputs.freezing, "--freezing"),
        (inputs.in_place, "--in-place"),
        (plot, "--plot"),
        (inputs.racks, "--racks"),
        (inputs.uplink_gbit, "--uplink-gbit"),
        (inputs.congestion, "--congestion"),
        (inputs.gradient_bytes, "--gradient-bytes"),
    )
    for value, option in inapplicable:
        if value is not None:
            raise CliError(f"{option} does not apply to --format dally; leave it out", USAGE)


def only_gangs(command: F) -> F:
    """Add the options of `GangInputs`, and `--format`."""
    added = (
        click.option(
            "--format", "format_", type=click.Choice(["jobs", "dally"]), default="jobs",
            show_default=True,
            help="Workload of elastic jobs, or of rigid gangs placed by offers (docs/dally.md).",
        ),
        click.option(
            "--slowdown", metavar="FILE",
            help="With dally: CSV of the slowdown of each model by distance.",
        ),
        click.option(
            "--timers", metavar="T",
            help="With dally: own, or the published auto, nowait, full, or NODE,RACK in leases.",
        ),
        click.option(
            "--lease", type=click.FloatRange(1, 1e7), default=3600.0, show_default=True,
            metavar="SECONDS", help="With dally: time after which a gang bids again.",
        ),
        click.option(
            "--slots", type=click.IntRange(1, 64), default=2, show_default=True, metavar="N",
            help="With dally: GPU link domains of a node.",
        ),
    )  # fmt: skip
    for option in reversed(added):
        command = option(command)
    return command


def policy(name: str, gangs: GangInputs, communication: Communication) -> GangPolicy:
    """Return the policy of this name, one of `POLICIES`.

    Raises:
        CliError: the policy is unknown, or has no timers but some were given.
    """
    from slurm_elastic.placement.delay.timers import Timers, TimersError  # noqa: PLC0415
    from slurm_elastic.simulator.gangs.gandiva import Gandiva  # noqa: PLC0415
    from slurm_elastic.simulator.gangs.own_dally import OwnDally  # noqa: PLC0415
    from slurm_elastic.simulator.gangs.published_dally import PublishedDally  # noqa: PLC0415
    from slurm_elastic.simulator.gangs.tiresias import Tiresias  # noqa: PLC0415

    if name not in POLICIES:
        known_policies = ", ".join(POLICIES)
        raise CliError(f'--policy: "{name}" is unknown for gangs; known: {known_policies}', USAGE)
    if name != "dally" and gangs.timers is not None:
        raise CliError(f"--timers does not apply to --policy {name}; leave it out", USAGE)
    if name == "gandiva":
        return Gandiva()
    if name.startswith("tiresias"):
        return Tiresias(published=name == "tiresias")
    if gangs.timers in (None, OWN):
        return OwnDally(communication, lease_s=gangs.lease)
    try:
        return PublishedDally(Timers.parse(gangs.timers or "", lease_s=gangs.lease))
    except TimersError as error:
        raise CliError(f"--{clean(error)}", USAGE) from None


def run(
    workloads: Sequence[str], name: str, inputs: simulation_options.Inputs, gangs: GangInputs
) -> list[GangResult]:
    """Simulate each workload.

    Raises:
        CliError: an input is missing or invalid.
    """
    from slurm_elastic.simulator.gangs import gang_files  # noqa: PLC0415
    from slurm_elastic.simulator.gangs.gang_simulation import simulate_gangs  # noqa: PLC0415

    for value, option, example in (
        (workloads, "WORKLOAD", "workload.csv"),
        (inputs.cluster, "--cluster", "--cluster 2x4x8"),
        (gangs.slowdown, "--slowdown", "--slowdown slowdown.csv"),
    ):
        if not value:
            raise CliError(f"--format dally: {option} is missing; write e.g. {example}", USAGE)
    sites = gang_files.read_sites(inputs.cluster or "", slots=gangs.slots)
    communication = gang_files.read_slowdowns(Path(gangs.slowdown or ""))
    policy(name, gangs, communication)
    loaded = [gang_files.read_workload(Path(path)) for path in workloads]
    results = []
    with progress.shown(
        [f"{name} {workload.name}" for workload in loaded],
        [len(workload.gangs) for workload in loaded],
    ) as report:
        for index, workload in enumerate(loaded):
            results.append(
                simulate_gangs(
                    workload,
                    sites,
                    communication,
                    policy(name, gangs, communication),
                    name=name,
                    lease_s=gangs.lease,
                    progress=lambda done, total, _, i=index: report(i, done, total),  # type: ignore[misc]
                )
            )
    return results


def put(
    results: Sequence[GangResult], *, cluster: str, as_json: bool, jobs_csv: str | None
) -> None:
    """Print the answer, and write the rows."""
    from slurm_elastic.simulator.gangs.gang_results import jobs_csv as rows  # noqa: PLC0415

    if jobs_csv is not None:
        simulation_inputs.write_text(jobs_csv, rows(results), "--jobs-csv")
    if as_json:
        answer = simulation_answer.gang_answer(results, cluster)
        options.put_json(simulation_inputs.plain(answer))
    elif jobs_csv != "-":
        for result in results:
            options.put(shown(result))


def shown(result: GangResult) -> list[str]:
    """Return the lines of one workload."""
    s = result.summary()
    return [
        f"{s['jobs']} gangs of {clean(s['workload'])}, policy {s['policy']}, {s['gpus']} GPUs",
        (
            f"  completion time   {s['avg_jct_h']:.2f} h on average, {s['p50_jct_h']:.2f} h"
            f" median, {s['p99_jct_h']:.2f} h p99"
        ),
        f"  makespan          {s['makespan_h']:.2f} h",
        (
            f"  queueing          {s['avg_queue_h']:.2f} h on average, {s['max_queue_h']:.2f} h at"
            " most"
        ),
        (
            f"  communication     {digits(s['comm_gpu_h'])} of {digits(s['gpu_h'])} GPU h;"
            f" {100 * s['comm_share_2_8']:.1f} % of the time of gangs of 2 to 8"
        ),
        (
            f"  their leases      {100 * s['share_node_2_8']:.1f} % in a node,"
            f" {100 * s['share_rack_2_8']:.1f} % in a rack,"
            f" {100 * s['share_network_2_8']:.1f} % across racks"
        ),
        (
            f"  leases            {s['grants_single']} single, {s['grants_node']} node,"
            f" {s['grants_rack']} rack, {s['grants_network']} network; {s['preemptions']}"
            " preemptions"
        ),
        (
            f"  policy            {s['offer_ms']:.2f} ms per offer, {s['offers']} offers;"
            f" simulation {digits(s['cpu_s'])} s of CPU"
        ),
    ]
