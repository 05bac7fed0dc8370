"""`selastic workload`: workloads for the simulator, generated or from a site's accounting."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import click

from slurm_elastic.cli import options
from slurm_elastic.cli.exit_codes import USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate import simulation_inputs, simulation_options
from slurm_elastic.cli.simulate.past_options import past_options, read_past

_CLASSES = {"adaptive": "adaptive", "strong-scaling": "scale-gpus", "rigid": "rigid"}


@click.group(cls=options.rich_if_terminal("RichGroup", click.Group))
def workload() -> None:
    """Make workloads for simulate and compare."""


_output = click.option(
    "-o", "--output", metavar="FILE", default="-", help="Write to this file (standard output)."
)


@workload.command(cls=options.rich_if_terminal("RichCommand", click.Command))
@click.option(
    "--jobs", type=click.IntRange(1, 1_000_000), default=160, show_default=True, metavar="N",
    help="Number of jobs.",
)  # fmt: skip
@click.option(
    "--hours", type=click.FloatRange(0.01, 100_000), default=8.0, show_default=True,
    metavar="H", help="Time within which all jobs are submitted.",
)  # fmt: skip
@click.option(
    "--arrivals", type=click.Choice(["poisson", "diurnal", "bursts"]), default="poisson",
    show_default=True, help="Distribution of the submissions over time.",
)  # fmt: skip
@click.option("--mix", metavar="APP=W,…", help="Weights of the applications.")
@click.option("--sizes", metavar="GPUS=W,…", help="Weights of the numbers of requested GPUs.")
@click.option("--classes", metavar="CLASS=W,…", help="Weights of the job classes (adaptive=1).")
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    metavar="N",
    help="Seed of the random numbers.",
)
@click.option("--profiles", metavar="DIR", help="Profiles of the applications (built-in).")
@_output
def generate(
    *,
    jobs: int,
    hours: float,
    arrivals: str,
    mix: str | None,
    sizes: str | None,
    classes: str | None,
    seed: int,
    profiles: str | None,
    output: str,
) -> None:
    """Generate a workload."""
    from slurm_elastic.simulator.workloads import generate as inventing  # noqa: PLC0415

    with simulation_inputs.refusals():
        asks = _patterns(profiles, mix, sizes)
        lines = inventing.generate(
            asks, jobs=jobs, hours=hours, arrivals=arrivals, classes=_classes(classes), seed=seed
        )
    stream = io.StringIO()
    inventing.write(lines, stream)
    simulation_inputs.write_text(output, stream.getvalue(), "--output")


@workload.command("from-sacct", cls=options.rich_if_terminal("RichCommand", click.Command))
@click.argument("file", metavar="FILE")
@click.option(
    "--scaling", default="amdahl:0.95", show_default=True, metavar="CURVE|FILE",
    help="How jobs scale: linear, amdahl:P, none, 1=1;2=1.9;4=3.5, or a CSV match,scaling.",
)  # fmt: skip
@click.option(
    "--grow", type=click.FloatRange(1, 1000), default=4.0, show_default=True, metavar="X",
    help="Jobs grow to X times the GPUs they requested.",
)  # fmt: skip
@click.option("--speeds", metavar="TYPE=X,…", help="Relative speed of GPU types.")
@past_options()
@_output
def from_sacct(
    *,
    file: str,
    scaling: str,
    grow: float,
    speeds: str | None,
    start: str | None,
    end: str | None,
    partition: str | None,
    completed_only: bool,
    output: str,
) -> None:
    """Convert the output of `sacct -P` or `sacct --json`, or a published trace, to a workload."""
    from slurm_elastic.simulator.workloads import curve_jobs  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.scaling_curves import rules  # noqa: PLC0415

    with simulation_inputs.refusals():
        curves = rules(scaling)
        past = read_past(
            Path(file), start=start, end=end, partition=partition, completed_only=completed_only
        )
        factors = simulation_options.type_speeds(speeds)
        jobs = curve_jobs.from_accounting(past, curves, grow=grow, speeds=factors)
    stream = io.StringIO()
    curve_jobs.write(jobs, stream)
    simulation_inputs.write_text(output, stream.getvalue(), "--output")
    click.echo(f"{clean(Path(file).name)}: {clean(past.summary())}", err=True)


@workload.command(cls=options.rich_if_terminal("RichCommand", click.Command))
@click.argument("folder", metavar="DIR")
def profiles(folder: str) -> None:
    """Write the built-in profiles to a folder, as a pattern; their figures are our choice."""
    from slurm_elastic.simulator.workloads import builtin_profiles  # noqa: PLC0415

    try:
        builtin_profiles.write(Path(folder))
    except OSError as error:
        raise CliError(f"{clean(folder)}: {error.strerror}", USAGE) from None


def _patterns(folder: str | None, mix: str | None, sizes: str | None) -> dict[str, Any]:
    """Return the request patterns of the applications, with the user's weights."""
    import dataclasses  # noqa: PLC0415

    from slurm_elastic.simulator.workloads import builtin_profiles  # noqa: PLC0415

    asks = (
        builtin_profiles.request_patterns() if folder is None else _profiled_patterns(Path(folder))
    )
    weights = simulation_options.weights(mix, "--mix")
    for name in weights:
        if name not in asks:
            known_names = ", ".join(sorted(asks))
            raise CliError(f"--mix: {clean(name)} has no profile; known: {known_names}", USAGE)
    if weights:
        asks = {n: dataclasses.replace(a, weight=weights.get(n, 0.0)) for n, a in asks.items()}
    if sizes:
        sizes_ = []
        for name, weight in simulation_options.weights(sizes, "--sizes").items():
            if not name.isdecimal() or not 1 <= int(name) <= 65536:
                raise CliError(
                    f'--sizes: "{clean(name)}" is invalid: expected GPUs from 1 to 65536', USAGE
                )
            sizes_.append((int(name), weight))
        asks = {n: dataclasses.replace(a, sizes=tuple(sizes_)) for n, a in asks.items()}
    return asks


def _profiled_patterns(folder: Path) -> dict[str, Any]:
    """Return request patterns of a profile set; batches are those of its validation runs."""
    from slurm_elastic.simulator.workloads import application_profiles as tables  # noqa: PLC0415
    from slurm_elastic.simulator.workloads import generate as inventing  # noqa: PLC0415

    patterns = {}
    for name in tables.applications(folder):
        home = folder / name
        types = sorted(p.stem.partition("-")[2] for p in home.glob("placements-*.csv"))
        batches = tables.read_one(home, types).batches
        patterns[name] = inventing.RequestPattern(batches=(batches[0], batches[-1]))
    return patterns


def _classes(text: str | None) -> dict[str, float] | None:
    weights = simulation_options.weights(text, "--classes")
    for name in weights:
        if name not in _CLASSES:
            known_classes = ", ".join(_CLASSES)
            raise CliError(f'--classes: "{clean(name)}" is unknown; known: {known_classes}', USAGE)
    return {_CLASSES[n]: w for n, w in weights.items()} or None
