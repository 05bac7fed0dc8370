"""`selastic partition`: pipeline stages, spatial groups, or execution plans of a model."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli import fitting_plans, group_sizes, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean, short_seconds, size
from slurm_elastic.cli.tables import Column, TableLayout, render

if TYPE_CHECKING:
    from slurm_elastic.models.pipedream.partitioner import Level, PipelinePartition
    from slurm_elastic.models.spatial.volume_layers import VolumeNetwork

#: Most GPUs of a spatial group where --machines does not say how many a node has.
_GROUP = 64

_COLUMNS = (
    Column("STAGE", lambda r: str(r["stage"]), right=True),
    Column("REPLICAS", lambda r: str(r["replicas"]), right=True),
    Column("LAYERS", lambda r: _layers(r["layers"])),
    Column("COMPUTE", lambda r: short_seconds(r["compute_s"]), right=True),
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
    "--batch", metavar="N",
    help="For a network on volumes: samples that a spatial group holds at once (1). With --plans:"
    " samples of a step (as many as the profile is of).",
)  # fmt: skip
@click.option(
    "--plans", is_flag=True,
    help="List execution plans with the memory that they need, by number of GPUs.",
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
    batch: str | None,
    plans: bool,
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

    With --plans: what each execution plan (docs/rubick.md) needs of the memory of a GPU, and those
    that fit into --memory. --bandwidth adds the time of a step.
    """
    from slurm_elastic.models.spatial import network_file  # noqa: PLC0415

    try:
        network = network_file.read_network(Path(profile))
    except network_file.VolumeNetworkError as error:
        raise CliError(clean(error), USAGE) from None
    memory_bytes = options.number(memory, "--memory") if memory else None
    layout, name = options.layout(format_, noheader, parsable), Path(profile).name
    lines: Callable[[], list[str]]
    if plans:
        unused = {"--activations": activations, "--straight": straight, "--paper": paper,
                  "--free-sources": free_sources, "--states": states}  # fmt: skip
        _check_plans(profile, network, [option for option, value in unused.items() if value])
        reply = _plans(Path(profile), machines, bandwidth, memory_bytes, batch)
        lines = partial(fitting_plans.shown_plans, reply, name, layout)
    elif network is not None:
        most = options.whole_number(machines.split(",")[0], "--machines") if machines else _GROUP
        samples = options.whole_number(batch or "1", "--batch")
        reply = group_sizes.group_answer(
            network, most=most, batch=samples, memory_bytes=memory_bytes
        )
        lines = partial(group_sizes.shown_groups, reply, name, layout, memory_bytes)
    else:
        levels, result = _partitioned(
            profile,
            machines,
            bandwidth,
            paper=paper,
            compression=1.0 if activations else None,
            memory=memory_bytes,
            straight=straight,
            free_sources=free_sources,
            states=states,
        )
        reply = answer(result)
        lines = partial(shown, result, levels, name, layout)
    if json_:
        options.put_json(reply)
    else:
        options.put(lines())


def _partitioned(
    profile: str,
    machines: str | None,
    bandwidth: str | None,
    *,
    paper: bool,
    states: str | None,
    **arguments: Any,
) -> tuple[tuple[Level, ...], PipelinePartition]:
    """Return the levels of machines, and the fastest pipeline on them.

    Raises:
        CliError: an option is missing or invalid, or there is no pipeline.
    """
    from slurm_elastic.models.pipedream import partitioner, profile_reader  # noqa: PLC0415

    for option, value in (("--machines", machines), ("--bandwidth", bandwidth)):
        if value is None:
            raise CliError(f"Missing option '{option}'.", USAGE)
    levels = _levels(machines or "", bandwidth or "")
    try:
        return levels, partitioner.partition(
            profile_reader.read(Path(profile)),
            levels,
            cost=partitioner.Cost.PAPER if paper else partitioner.Cost.PUBLISHED,
            limit=options.whole_number(states, "--states") if states else partitioner.LIMIT,
            **arguments,
        )
    except (profile_reader.LayerProfileError, partitioner.ArgumentError) as error:
        raise CliError(clean(error), USAGE) from None
    except partitioner.PipelineError as error:
        raise CliError(f"{clean(profile)}: {clean(error)}", REFUSED) from None


def _check_plans(profile: str, network: VolumeNetwork | None, unused: list[str]) -> None:
    """Check what is given with --plans.

    Raises:
        CliError: an option that it does not use, or a network on volumes.
    """
    if network is not None:
        raise CliError(f"--plans: {clean(profile)} is a network on volumes; leave it out", USAGE)
    if unused:
        raise CliError(f"--plans: {unused[0]} has no effect with it; leave it out", USAGE)


def _plans(
    path: Path,
    machines: str | None,
    bandwidth: str | None,
    gpu_bytes: float | None,
    batch: str | None,
) -> dict[str, Any]:
    """Return the answer of --plans --json."""
    from slurm_elastic.core.layout import MAX_WORLD  # noqa: PLC0415
    from slurm_elastic.models.execution.profile_plans import (  # noqa: PLC0415
        ProfiledCluster,
        profiled_plans,
    )
    from slurm_elastic.models.pipedream import profile_reader  # noqa: PLC0415

    if machines is None:
        raise CliError("Missing option '--machines'.", USAGE)
    counts = [options.whole_number(text, "--machines") for text in machines.split(",")]
    gpus = math.prod(counts)
    if gpus > MAX_WORLD:
        raise CliError(f"--machines: {gpus} GPUs is invalid: expected at most {MAX_WORLD}", USAGE)
    levels = _levels(machines, bandwidth) if bandwidth else ()
    reaches = itertools.accumulate(counts, operator.mul)
    cluster = ProfiledCluster(
        node_gpus=counts[0],
        nodes=math.prod(counts[1:]),
        bandwidths=tuple(
            (reach, level.bandwidth) for reach, level in zip(reaches, levels, strict=False)
        ),
    )
    try:
        layers, samples = profile_reader.read_with_samples(path)
    except profile_reader.LayerProfileError as error:
        raise CliError(clean(error), USAGE) from None
    step = options.whole_number(batch, "--batch") if batch else samples
    if step is None:
        raise CliError(
            f"{clean(path)}: does not tell of how many samples it is: give them by --batch", USAGE
        )
    samples = samples or step
    rows = profiled_plans(layers, cluster, samples=samples, batch=step, gpu_bytes=gpu_bytes)
    return fitting_plans.plan_answer(rows, samples=samples, batch=step, gpu_bytes=gpu_bytes)


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
            f"{clean(name)} on {gpus} GPUs: {short_seconds(result.pipeline_time_s)} per minibatch;"
            f" data parallel {short_seconds(result.data_parallel_time_s)} ({ratio:.2f} times that);"
            f" one GPU {short_seconds(result.single_time_s)}"
        ),
        *table,
    ]
    if not result.exact:
        lines.append(
            f"Approximate: {result.states} ways to cut were examined, there are more; every plan"
            f" takes at least {short_seconds(result.bound_s)}. --states=N examines more."
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
