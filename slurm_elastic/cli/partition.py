"""`selastic partition`: pipeline stages with replicas, or spatial groups, for a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import group_sizes, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean, digits, size
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.models.pipedream.partitioner import Level, PipelinePartition

#: Most GPUs of a spatial group where --machines does not say how many a node has.
_GROUP = 64

_COLUMNS = (
    Column("STAGE", lambda r: str(r["stage"]), right=True),
    Column("REPLICAS", lambda r: str(r["replicas"]), right=True),
    Column("LAYERS", lambda r: _layers(r["layers"])),
    Column("COMPUTE", lambda r: _seconds(r["compute_s"]), right=True),
    Column("PARAMETERS", lambda r: size(r["parameter_bytes"]), right=True),
    Column("OUTPUT", lambda r: size(r["output_bytes"]), right=True),
    Column("INFLIGHT", lambda r: str(r["in_flight"]), right=True),
    Column("MEMORY", lambda r: size(r["memory_bytes"]), right=True),
    Column("LEVELS", lambda r: "x".join(map(str, r["replicas_by_level"]))),
)


@options.verb
@click.argument("profile", metavar="PROFILE")
@click.option(
    "--machines", metavar="N[,N…]",
    help="GPUs per node, then nodes per rack, and so on.",
)  # fmt: skip
@click.option(
    "--bandwidth", metavar="BYTES/S[,…]",
    help="Bandwidth of each level of --machines in bytes/s, e.g. 1e10,1.25e9.",
)  # fmt: skip
@click.option("--activations", is_flag=True, help="Count the time that activations take.")
@click.option(
    "--memory", metavar="BYTES", help="Memory of one GPU for weight versions and activations."
)
@click.option(
    "--batch", default="1", metavar="N",
    help="For a network on volumes: samples that a spatial group holds at once (1).",
)  # fmt: skip
@click.option("--straight", is_flag=True, help="Replicate no stage.")
@click.option(
    "--paper", is_flag=True, help="Use the cost model of the paper instead of the published code."
)
@click.option(
    "--free-sources",
    is_flag=True,
    help="Place other input layers, such as a decoder's embedding, apart from their readers.",
)
@click.option(
    "--states", metavar="N",
    help="Most ways to cut the model that are compared exactly (2000).",
)  # fmt: skip
@options.table
@options.as_json
def partition(
    *,
    profile: str,
    machines: str | None,
    bandwidth: str | None,
    activations: bool,
    memory: str | None,
    batch: str,
    straight: bool,
    paper: bool,
    free_sources: bool,
    states: str | None,
    format_: str,
    noheader: bool,
    parsable: bool,
    json_: bool,
) -> None:
    """Divide a model into pipeline stages, as PipeDream does.

    Stages may be replicated. PROFILE is a layer profile: PipeDream's text, or the JSON of
    `selastic show --profile`. An approximate answer is marked as such. See docs/pipeline.md.

    For a network on volumes (docs/spatial.md): the memory of a GPU by the size of its spatial
    group, of up to the first number of --machines, and the least that fits into --memory.
    """
    from slurm_elastic.models.pipedream import (  # noqa: PLC0415
        partitioner,
        profile_reader,
    )
    from slurm_elastic.models.spatial import network_file  # noqa: PLC0415

    try:
        network = network_file.read_network(Path(profile))
    except network_file.VolumeNetworkError as error:
        raise CliError(clean(error), USAGE) from None
    memory_bytes = options.number(memory, "--memory") if memory else None
    if network is not None:
        most = options.whole_number(machines.split(",")[0], "--machines") if machines else _GROUP
        groups = group_sizes.group_answer(
            network,
            most=most,
            batch=options.whole_number(batch, "--batch"),
            memory_bytes=memory_bytes,
        )
        if json_:
            options.put_json(groups)
            return
        layout = options.layout(format_, noheader, parsable)
        name = Path(profile).name
        options.put(group_sizes.shown_groups(groups, name, layout, memory_bytes))
        return
    for option, value in (("--machines", machines), ("--bandwidth", bandwidth)):
        if value is None:
            raise CliError(f"Missing option '{option}'.", USAGE)
    levels = _levels(machines or "", bandwidth or "")
    try:
        result = partitioner.partition(
            profile_reader.read(Path(profile)),
            levels,
            cost=partitioner.Cost.PAPER if paper else partitioner.Cost.PUBLISHED,
            compression=1.0 if activations else None,
            memory=memory_bytes,
            straight=straight,
            free_sources=free_sources,
            limit=options.whole_number(states, "--states") if states else partitioner.LIMIT,
        )
    except profile_reader.LayerProfileError as error:
        raise CliError(clean(error), USAGE) from None
    except partitioner.ArgumentError as error:
        raise CliError(clean(error), USAGE) from None
    except partitioner.PipelineError as error:
        raise CliError(f"{clean(profile)}: {clean(error)}", REFUSED) from None
    if json_:
        options.put_json(answer(result))
    else:
        layout = options.layout(format_, noheader, parsable)
        options.put(shown(result, levels, Path(profile).name, layout))


def answer(result: PipelinePartition) -> dict[str, Any]:
    """Return the answer of --json."""
    fields = dataclasses.asdict(result)
    rows = [{"stage": i, **row} for i, row in enumerate(fields.pop("stages"))]
    return {**fields, "in_flight": result.in_flight, "stages": rows}


def shown(
    result: PipelinePartition, levels: tuple[Level, ...], name: str, layout: TableLayout
) -> list[str]:
    """Return the lines of the answer."""
    rows = answer(result)["stages"]
    table = render(rows, _COLUMNS, [c.header for c in _COLUMNS[:-1]], layout)
    if layout.parsable or not layout.header:
        return table
    gpus = "x".join(str(level.machines) for level in levels)
    ratio = 1.0
    if result.pipeline_time_s:
        ratio = result.data_parallel_time_s / result.pipeline_time_s
    lines = [
        (
            f"{clean(name)} on {gpus} GPUs: {_seconds(result.pipeline_time_s)} per minibatch; data"
            f" parallel {_seconds(result.data_parallel_time_s)} ({ratio:.2f} times that);"
            f" one GPU {_seconds(result.single_time_s)}"
        ),
        *table,
    ]
    if not result.exact:
        lines.append(
            f"Approximate: {result.states} ways to cut were examined, there are more; every plan"
            f" takes at least {_seconds(result.bound_s)}. --states=N examines more."
        )
    return lines


def _levels(machines: str, bandwidth: str) -> tuple[Level, ...]:
    from slurm_elastic.models.pipedream.partitioner import Level  # noqa: PLC0415

    counts = [options.whole_number(text, "--machines") for text in machines.split(",")]
    speeds = [options.number(text, "--bandwidth") for text in bandwidth.split(",")]
    if len(counts) != len(speeds):
        raise CliError(
            f"--bandwidth: {len(speeds)} given: expected {len(counts)}, one for each level of"
            " --machines",
            USAGE,
        )
    return tuple(Level(n, b) for n, b in zip(counts, speeds, strict=True))


def _layers(names: list[str]) -> str:
    if len(names) < 3:
        return ",".join(names)
    return f"{names[0]}..{names[-1]} ({len(names)})"


def _seconds(value: float) -> str:
    if value >= 1 or value == 0:
        return f"{digits(value)} s"
    for unit, scale in (("ms", 1e3), ("us", 1e6)):
        if value * scale >= 0.1:
            return f"{value * scale:.3g} {unit}"
    return f"{value:.3g} s"
