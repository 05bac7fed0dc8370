"""Racks in simulations of elastic jobs: `--racks` and the options of their uplinks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean

if TYPE_CHECKING:
    from slurm_elastic.simulator.truth.rack_network import Network
    from slurm_elastic.simulator.workloads.cluster_text import Cluster
    from slurm_elastic.simulator.workloads.workload import Workload

F = TypeVar("F", bound=Callable[..., Any])

_UPLINK_GBIT_S = 100.0


def network_options(command: F) -> F:
    """Add `--racks` and the options of the uplinks."""
    added = (
        click.option(
            "--racks", type=click.IntRange(min=1), metavar="N",
            help="Divide the nodes, in order, into N racks of equal size.",
        ),
        click.option(
            "--uplink-gbit", type=click.FloatRange(1e-6, 1e6), metavar="X",
            help=f"Gbit/s of a rack's uplink ({_UPLINK_GBIT_S:g}).",
        ),
        click.option(
            "--congestion", type=click.FloatRange(1, 1e6), metavar="X",
            help="Fraction 1/X of each uplink that is free of other traffic (1).",
        ),
        click.option(
            "--gradient-bytes", metavar="FILE",
            help="CSV application,bytes: bytes that a step sends (of the built-in applications).",
        ),
    )  # fmt: skip
    for option in reversed(added):
        command = option(command)
    return command


def check_network(
    *,
    racks: int | None,
    uplink_gbit: float | None,
    congestion: float | None,
    gradient_bytes: str | None,
) -> None:
    """Refuse options of uplinks without `--racks`.

    Raises:
        CliError: one was given.
    """
    network_values = (
        ("--uplink-gbit", uplink_gbit),
        ("--congestion", congestion),
        ("--gradient-bytes", gradient_bytes),
    )
    for option, value in network_values if racks is None else ():
        if value is not None:
            raise CliError(f"{option} needs --racks N", USAGE)


def network(
    machines: Cluster,
    jobs: Workload,
    *,
    racks: int | None,
    uplink_gbit: float | None,
    congestion: float | None,
    gradient_bytes: str | None,
    builtin: bool,
) -> Network | None:
    """Return the racks and the cost of crossing them; None without `--racks`.

    Args:
        machines: the cluster.
        jobs: the workload.
        racks: --racks.
        uplink_gbit: --uplink-gbit.
        congestion: --congestion.
        gradient_bytes: --gradient-bytes.
        builtin: whether the applications are the built-in ones.

    Raises:
        CliError: an invalid option, or an application without gradient bytes.
    """
    from slurm_elastic.simulator.truth import rack_network as net  # noqa: PLC0415

    if racks is None:
        return None
    nodes = sum(g.nodes for g in machines)
    if racks > nodes:
        raise CliError(
            f"--racks {racks} is invalid: expected 1 to {nodes}, the nodes of the cluster",
            USAGE,
        )
    sent: dict[str, float] = {}
    if gradient_bytes is not None:
        sent = net.read_gradients(Path(gradient_bytes))
    elif builtin:
        sent = net.builtin_gradients()
    elif uplink_gbit is not None or congestion is not None:
        raise CliError(
            "--gradient-bytes is missing: the bytes that these applications send are unknown; write"
            " a CSV file application,bytes",
            USAGE,
        )
    missing = {a.partition("#")[0] for a in jobs.applications} - set(sent)
    if sent and missing:
        raise CliError(
            f"--gradient-bytes {clean(gradient_bytes or '')}: no row for {clean(min(missing))}; add"
            " one, 0 if it sends nothing",
            USAGE,
        )
    return net.Network(
        rack_nodes=-(-nodes // racks),
        uplink_bytes_s=(uplink_gbit or _UPLINK_GBIT_S) * 1e9 / 8,
        gradient_bytes=sent,
        congestion=congestion or 1.0,
    )
