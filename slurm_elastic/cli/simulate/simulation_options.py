"""Options that `simulate` and `compare` share, and the values in them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import click

from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate.network_options import network_options

F = TypeVar("F", bound=Callable[..., Any])

#: Copy of `simulator.truth.freezing_truth.BELIEFS`, which is only imported when a command runs.
_BELIEFS = ("pessimistic", "central", "optimistic")
_CLASSES = ("adaptive", "strong-scaling", "rigid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Values of the options that `simulate` and `compare` share."""

    profiles: str | None
    cluster: str | None
    interval: float
    clock: str
    seed: int
    class_: str | None
    restarts: str | None
    in_place: str | None
    speeds: str | None
    freezing: str | None
    config: str | None
    artifact_compat: bool
    jobs: int | None
    racks: int | None
    uplink_gbit: float | None
    congestion: float | None
    gradient_bytes: str | None
    neighbours: str | None
    gpu_pairs: str | None

    @property
    def network(self) -> dict[str, Any]:
        """Arguments of `network`."""
        names = ("racks", "uplink_gbit", "congestion", "gradient_bytes")
        return {name: getattr(self, name) for name in names}


def shared_options(command: F) -> F:
    """Add the options of `Inputs`, and those of the answer."""
    options = (
        click.argument("workloads", metavar="[WORKLOAD.csv]...", nargs=-1),
        click.option("--profiles", metavar="DIR", help="Profiles of the applications (built-in)."),
        click.option(
            "--cluster", metavar="TYPE:NODESxGPUS,…",
            help="Nodes of the cluster, e.g. aws:6x4,dgx-ext:2x8,rtx:3x8.",
        ),
        click.option(
            "--interval", type=click.FloatRange(1, 86400), default=60.0, show_default=True,
            metavar="SECONDS", help="Time between rounds.",
        ),
        click.option(
            "--clock", type=click.Choice(["round", "event"]), default="round", show_default=True,
            help="Rounds at fixed times only (round), or at each arrival and end, too (event).",
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True, metavar="N",
            help="Seed of random policies and of the generated workload.",
        ),
        click.option(
            "--class", "class_", type=click.Choice(_CLASSES), help="Run all jobs as this class."
        ),
        click.option(
            "--restarts", metavar="FILE|SECONDS", help="Cost of a restart (from the profiles)."
        ),
        click.option(
            "--in-place", type=click.Choice(["auto", "never"]),
            help="Change jobs in place where that can be done (as --config says, else never).",
        ),
        click.option(
            "--speeds", metavar="TYPE=X,…",
            help="Relative speed of GPU types: jobs with a given scaling curve may change type.",
        ),
        network_options,
        click.option(
            "--neighbours", metavar="FILE",
            help="CSV application,other,speed: relative speed beside a job on the same node (1).",
        ),
        click.option(
            "--gpu-pairs", metavar="FILE",
            help="CSV application,other,speed: relative speed of jobs that may share a GPU.",
        ),
        click.option(
            "--freezing", type=click.Choice(_BELIEFS),
            help="Let all jobs freeze layers, under this assumption of its effect.",
        ),
        click.option("--config", metavar="FILE", help="Configuration of a site (defaults)."),
        click.option(
            "--artifact-compat", is_flag=True,
            help="Decide as Sia's artifact does where it differs from its paper.",
        ),
        click.option(
            "--jobs", type=click.IntRange(1, 4096), metavar="N",
            help="Number of processes (one per CPU).",
        ),
        click.option(
            "--jobs-csv", metavar="FILE", help="Write a row per job; `-` is standard output."
        ),
        click.option(
            "--plot", metavar="FILE", help="Draw the answer to a .png, .svg or .pdf file."
        ),
    )  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command


def type_speeds(text: str | None) -> dict[str, float]:
    """Parse the value of --speeds.

    Raises:
        CliError: a part is not TYPE=NUMBER, or a speed is 0.
    """
    by_type = weights(text, "--speeds")
    for name, speed in by_type.items():
        if not speed:
            raise CliError(
                f"--speeds: {clean(name)}=0 is invalid: expected a speed above 0; leave out types"
                " that jobs shall not use",
                USAGE,
            )
    return by_type


def weights(text: str | None, option: str) -> dict[str, float]:
    """Parse `a100=2,v100=1`; {} if it is not given."""
    by_name: dict[str, float] = {}
    for part in (text or "").split(",") if text else ():
        name, _, value = part.strip().rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not name or not 0 <= number < math.inf:
            raise CliError(
                f'{option}: "{clean(part.strip())}" is invalid: expected NAME=NUMBER, from 0 on',
                USAGE,
            )
        if name in by_name:
            raise CliError(f"{option}: duplicate name {clean(name)}", USAGE)
        by_name[name] = number
    return by_name
