"""`selastic profile`: measures what a training waits for."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from slurm_elastic.cli import client, options
from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean, span

if TYPE_CHECKING:
    from slurm_elastic.profiler.profile_file import StepProfile
    from slurm_elastic.profiler.profile_store import ProfileStore
    from slurm_elastic.profiler.profiling_plan import ProfiledShape
    from slurm_elastic.profiler.profiling_runs import Failure, ProfilingRequest
    from slurm_elastic.profiler.runners import Runner

#: Options of selastic end at the first word that is not an option.
_SETTINGS = {"allow_interspersed_args": False}


@click.command(
    cls=options.rich_if_terminal("RichCommand", click.Command), context_settings=_SETTINGS
)
@click.option(
    "--shapes", metavar="4,8@2,…",
    help="Shapes to measure beside one GPU, as GPUS[@NODES] (a whole node, all nodes).",
)  # fmt: skip
@click.option(
    "--data", metavar="PATH", multiple=True,
    help="File or folder of the data set, removed from the page cache to measure reading it.",
)  # fmt: skip
@click.option("--batch", type=click.IntRange(1), metavar="N", help="Samples per GPU and step.")
@click.option(
    "--repeats", type=click.IntRange(1, 100), default=3, show_default=True, metavar="N",
    help="Repeats of each run.",
)  # fmt: skip
@click.option(
    "--steps", type=click.IntRange(1, 100_000), default=20, show_default=True, metavar="N",
    help="Timed steps of a run.",
)  # fmt: skip
@click.option(
    "--warm-up", type=click.IntRange(0, 100_000), default=5, show_default=True, metavar="N",
    help="Steps before the timed ones.",
)  # fmt: skip
@click.option(
    "--whole", "whole_runs", is_flag=True,
    help="Time whole runs of a script that does --steps steps without the library.",
)  # fmt: skip
@click.option(
    "--timeout", type=click.FloatRange(1), default=600.0, show_default=True, metavar="SECONDS",
    help="Longest duration of a run.",
)  # fmt: skip
@click.option(
    "--dir", "directory", metavar="DIR", default="selastic-profile", show_default=True,
    help="Folder of the measurements; the same command continues them.",
)  # fmt: skip
@click.option("--again", is_flag=True, help="Delete earlier measurements in --dir.")
@click.option("--out", metavar="FILE", help="Output file (profile.json in --dir).")
@click.option("--plot", metavar="FILE", help="Draw the answer to a .png, .svg or .pdf file.")
@click.option("--application", metavar="NAME", default="", help="Application name in the profile.")
@click.option(
    "--gpu-type",
    metavar="TYPE",
    default="",
    help="GPU type in the profile, if Slurm does not report it.",
)
@click.option(
    "--send", metavar="JOBID",
    help="Send the profile to the controller, as estimate for this job and others of its name.",
)  # fmt: skip
@click.option("-p", "--partition", metavar="NAME", help="Run in a new job of this partition.")
@click.option("--nodes", type=click.IntRange(1), metavar="N", help="Nodes of the new job (1).")
@click.option("--gpus-per-node", metavar="[TYPE:]N", help="GPUs per node of the new job (1).")
@click.option("--time", "limit", metavar="TIME", help="Time limit of the new job.")
@options.table
@options.as_json
@options.dry_run
@click.argument("program", nargs=-1, required=True, type=click.UNPROCESSED)
def profile(  # noqa: PLR0917 - click passes them by name
    shapes: str | None,
    data: tuple[str, ...],
    batch: int | None,
    repeats: int,
    steps: int,
    warm_up: int,
    whole_runs: bool,
    timeout: float,
    directory: str,
    again: bool,
    out: str | None,
    plot: str | None,
    application: str,
    gpu_type: str,
    send: str | None,
    partition: str | None,
    nodes: int | None,
    gpus_per_node: str | None,
    limit: str | None,
    format_: str,
    noheader: bool,
    parsable: bool,
    json_: bool,
    dry_run: bool,
    program: tuple[str, ...],
) -> int | None:
    """Measure what a training waits for: other GPUs, network, data.

    Runs PROGRAM, the command of one rank, for some steps on one GPU and on more, with repeated and
    with real data: in the present allocation, in a new job (--partition, --nodes, --gpus-per-node
    or --time), or on this machine. A program that uses slurm_elastic.training writes no checkpoint.
    See docs/profiler.md.
    """
    from slurm_elastic.cli.profile import (  # noqa: PLC0415 - slow to import
        profile_report,
        profile_submission,
    )
    from slurm_elastic.profiler import profiling_runs as runs  # noqa: PLC0415

    layout = options.layout(format_, noheader, parsable)
    if hint := runs.check(program):
        raise CliError(hint, USAGE)
    _check(data, plot)
    if (partition or nodes or gpus_per_node or limit) and "SLURM_JOB_ID" not in os.environ:
        job = profile_submission.ProfilingJob(
            partition=partition, nodes=nodes or 1, gpus_per_node=gpus_per_node or "1", time=limit
        )
        return profile_submission.submit(job, sys.argv, directory=Path(directory), dry_run=dry_run)
    runner = _runner(shapes)
    request = _request(
        program, _shapes(shapes, runner), data=data, batch=batch, repeats=repeats, steps=steps,
        warm_up=warm_up, whole_runs=whole_runs, timeout_s=timeout,
    )  # fmt: skip
    if dry_run:
        options.put(profile_report.planned(request))
        return None
    if send:
        client.ask("ping")  # before hours of measuring
    store = _store(Path(directory), request, again=again)
    failures = _run(request, runner, store)
    for failure in failures:
        _print_failure(failure)
    profile_ = _outcome(
        store, request, application=application, gpu_type=gpu_type or _type_from_slurm()
    )
    _write(Path(out) if out else store.directory / "profile.json", profile_)
    if plot:
        _draw(profile_, plot)
    if send:
        _send(profile_, send)
    if json_:
        from slurm_elastic.profiler.profile_file import to_body  # noqa: PLC0415

        options.put_json(to_body(profile_))
    else:
        options.put(profile_report.lines(profile_, layout, cold=bool(data), whole_runs=whole_runs))
    return REFUSED if failures else None


def _check(data: Sequence[str], plot: str | None) -> None:
    """Refuse missing data and impossible plots before anything runs."""
    for path in data:
        if not Path(path).exists():
            raise CliError(f"--data {clean(path)}: no such file or directory", USAGE)
    if plot:
        from slurm_elastic.simulator import plots  # noqa: PLC0415 - slow to import

        try:
            plots.check(Path(plot))
        except plots.PlotError as error:
            raise CliError(clean(error), USAGE) from None


def _runner(shapes: str | None) -> Runner:
    from slurm_elastic.job.slurm_env import AllocationError  # noqa: PLC0415
    from slurm_elastic.profiler import runners  # noqa: PLC0415

    if "SLURM_JOB_ID" not in os.environ:
        requested = [s.gpus for s in _parsed(shapes) if s.nodes == 1] if shapes else []
        return runners.LocalRunner(max([runners.local_gpus(), *requested]))
    try:
        return runners.AllocationRunner(os.environ)
    except AllocationError as error:
        raise CliError(str(error)) from None


def _shapes(text: str | None, runner: Runner) -> tuple[ProfiledShape, ...]:
    from slurm_elastic.profiler.profiling_plan import default_shapes, fits  # noqa: PLC0415

    if text is None:
        return default_shapes(runner.gpus)
    shapes = _parsed(text)
    for shape in shapes:
        if not fits(shape, runner.gpus):
            present = ", ".join(map(str, runner.gpus))
            raise CliError(f"--shapes {shape} is invalid: the nodes have {present} GPUs", USAGE)
    return shapes


def _parsed(text: str) -> tuple[ProfiledShape, ...]:
    from slurm_elastic.profiler.profiling_plan import PlanError, ProfiledShape  # noqa: PLC0415

    try:
        return tuple(ProfiledShape.parse(word) for word in text.split(","))
    except PlanError as error:
        raise CliError(f"--shapes: {clean(error)}", USAGE) from None


def _request(
    program: tuple[str, ...],
    shapes: Sequence[ProfiledShape],
    *,
    data: Sequence[str],
    batch: int | None,
    repeats: int,
    steps: int,
    warm_up: int,
    whole_runs: bool,
    timeout_s: float,
) -> ProfilingRequest:
    from slurm_elastic.profiler import profiling_plan  # noqa: PLC0415
    from slurm_elastic.profiler.profiling_runs import ProfilingRequest  # noqa: PLC0415

    blocks = profiling_plan.blocks(cold=bool(data), whole_runs=whole_runs)
    return ProfilingRequest(
        program=program,
        needs=tuple(profiling_plan.needs(shapes, repeats=repeats, blocks=blocks)),
        steps=steps,
        warm_up=warm_up,
        batch=batch,
        data=tuple(str(Path(p).absolute()) for p in data),
        whole_runs=whole_runs,
        timeout_s=timeout_s,
    )


def _store(directory: Path, request: ProfilingRequest, *, again: bool) -> ProfileStore:
    from slurm_elastic.profiler.profile_store import ProfileStore, StoreError  # noqa: PLC0415

    settings: dict[str, Any] = {
        "program": list(request.program),
        "steps": request.steps,
        "warm-up": request.warm_up,
        "batch": request.batch,
        "data": list(request.data),
        "whole": request.whole_runs,
    }
    if request.batch is None:
        settings["largest shape"] = request.gpus  # determines the samples per GPU
    try:
        return ProfileStore(directory, settings, again=again)
    except StoreError as error:
        raise CliError(clean(error)) from None


def _run(request: ProfilingRequest, runner: Runner, store: ProfileStore) -> list[Failure]:
    from slurm_elastic.profiler import profiling_runs as runs  # noqa: PLC0415

    start = time.monotonic()

    def progress(runs_done: int, total: int, description: str) -> None:
        passed = time.monotonic() - start
        time_left = (
            f", about {span(passed / runs_done * (total - runs_done))} left" if runs_done else ""
        )
        click.echo(f"selastic: run {runs_done + 1} of {total}: {description}{time_left}", err=True)

    def end(_number: int, _frame: object) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    try:
        return runs.run(request, runner, store, progress)
    except KeyboardInterrupt:
        click.echo(
            f"selastic: stopped; measurements are kept in {clean(store.directory)}, the same"
            " command continues",
            err=True,
        )
        raise
    except OSError as error:
        path = clean(error.filename or request.program[0])
        raise CliError(f"{path}: {error.strerror}") from None


def _print_failure(failure: Failure) -> None:
    from slurm_elastic.profiler.profiling_runs import describe  # noqa: PLC0415

    text = f"selastic: {describe(failure.launch)}: the program {failure.reason}"
    click.echo(text + f" ({clean(failure.log)})", err=True)
    for line in failure.tail:
        click.echo(f"    {clean(line)}", err=True)


def _outcome(
    store: ProfileStore, request: ProfilingRequest, *, application: str, gpu_type: str
) -> StepProfile:
    from slurm_elastic.profiler import profiling_runs as runs  # noqa: PLC0415
    from slurm_elastic.profiler.stalls import NotMeasuredError  # noqa: PLC0415

    if request.batch is None and store.batch() is None and store.steps:
        click.echo(
            "selastic: the script reports no samples per GPU and step; the profile has 1: add"
            " --batch before it is used by `selastic recommend`",
            err=True,
        )
    try:
        return runs.profile(
            store,
            application=application,
            gpu_type=gpu_type,
            batch=request.batch,
            whole_runs=request.whole_runs,
        )
    except NotMeasuredError as error:
        raise CliError(f"{error}; no profile can be computed") from None


def _write(path: Path, measured: StepProfile) -> None:
    from slurm_elastic.profiler import profile_file  # noqa: PLC0415

    try:
        profile_file.write(path, measured)
    except profile_file.ProfileFileError as error:
        raise CliError(clean(error)) from None
    click.echo(f"selastic: {clean(path)} written", err=True)


def _draw(measured: StepProfile, path: str) -> None:
    from slurm_elastic.cli.profile import profile_plot  # noqa: PLC0415 - slow to import
    from slurm_elastic.simulator import plots  # noqa: PLC0415

    try:
        profile_plot.draw(measured, Path(path))
    except plots.PlotError as error:
        raise CliError(clean(error), USAGE) from None


def _send(measured: StepProfile, job: str) -> None:
    from slurm_elastic.profiler.profile_file import to_body  # noqa: PLC0415

    (result,) = client.ask("teach", jobs=[job], profile=to_body(measured))["results"]
    text = f"job {clean(result['display_id'])}: {clean(result['text'])}"
    if not result["ok"]:
        raise CliError(text)
    click.echo(f"selastic: {text}", err=True)


def _type_from_slurm() -> str:
    from slurm_elastic.profiler import runners  # noqa: PLC0415

    job = os.environ.get("SLURM_JOB_ID", "")
    return runners.gpu_type(job) if job else ""
