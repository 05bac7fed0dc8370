"""Inputs of `simulate` and `compare` from their options, and runs with a progress bar.

The simulator is imported when a command runs, so that `--help` stays fast.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from slurm_elastic.cli.exit_codes import REFUSED, USAGE, CliError
from slurm_elastic.cli.formatting import clean
from slurm_elastic.cli.simulate import progress
from slurm_elastic.cli.simulate.neighbour_options import neighbours
from slurm_elastic.cli.simulate.network_options import check_network, network
from slurm_elastic.cli.simulate.simulation_options import Inputs, type_speeds

if TYPE_CHECKING:
    from slurm_elastic.config.schema import Config
    from slurm_elastic.simulator.parallel_runs import Task
    from slurm_elastic.simulator.results import Result
    from slurm_elastic.simulator.truth.restart_costs import RestartCosts
    from slurm_elastic.simulator.workloads.application_profiles import Profiles
    from slurm_elastic.simulator.workloads.cluster_text import Cluster
    from slurm_elastic.simulator.workloads.workload import Workload

_INVENTED_JOBS = 160
_INVENTED_HOURS = 8.0


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """Turn the simulator's errors about input into one line and exit code 2."""
    from slurm_elastic.config.schema import ConfigError  # noqa: PLC0415
    from slurm_elastic.models.communication import CommunicationError  # noqa: PLC0415
    from slurm_elastic.policies.policy_protocol import PolicyError  # noqa: PLC0415
    from slurm_elastic.simulator.parallel_runs import RunError  # noqa: PLC0415
    from slurm_elastic.simulator.plots import PlotError  # noqa: PLC0415
    from slurm_elastic.simulator.simulation import SimulationError  # noqa: PLC0415
    from slurm_elastic.simulator.truth.restart_costs import RestartCostError  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.accounting_row import SacctError  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.application_profiles import ApplicationProfileError  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.cluster_text import ClusterError  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.generate import GenerateError  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.scaling_curves import ScalingError  # noqa: PLC0415
    from slurm_elastic.simulator.workloads.workload import WorkloadError  # noqa: PLC0415

    try:
        yield
    except (
        ClusterError, CommunicationError, ConfigError, GenerateError, PlotError, PolicyError,
        ApplicationProfileError, RestartCostError, SacctError, ScalingError, SimulationError,
        WorkloadError,
    ) as error:  # fmt: skip
        raise CliError(clean(error), USAGE) from None
    except RunError as error:
        raise CliError(clean(error), REFUSED) from None


def known_policy(name: str, option: str) -> str:
    """Return the name of an installed policy.

    Raises:
        CliError: it is not installed.
    """
    from slurm_elastic.policies import policy_protocol  # noqa: PLC0415

    installed = policy_protocol.known()
    if name not in installed:
        raise CliError(f'{option}: "{name}" is unknown; known: {", ".join(installed)}', USAGE)
    return name


def settings(inputs: Inputs, policy: str) -> Config:
    """Return the site's configuration with this policy."""
    from slurm_elastic.config import schema  # noqa: PLC0415

    chosen = _config_file(inputs)
    site = schema.load(Path(chosen)) if chosen else schema.Config()
    # The policy starts all jobs in simulations; sia suspends only jobs that it may start.
    controller = dataclasses.replace(site.controller, policy=policy, queue="controller")
    site = dataclasses.replace(site, controller=controller)
    if inputs.artifact_compat:
        site = dataclasses.replace(site, sia=dataclasses.replace(site.sia, artifact_compat=True))
    return site


def _config_file(inputs: Inputs) -> str | None:
    """Return the file that the command names, if any."""
    path: str | None = inputs.config
    return path or click.get_current_context().find_root().params.get("config")


def cluster(inputs: Inputs, *, builtin: bool) -> Cluster:
    """Return --cluster, or the example cluster of the built-in profiles."""
    from slurm_elastic.simulator.workloads import builtin_profiles as own  # noqa: PLC0415
    from slurm_elastic.simulator.workloads import cluster_text  # noqa: PLC0415

    if inputs.cluster is None and not builtin:
        raise CliError("--cluster is missing; write e.g. --cluster aws:6x4,dgx-ext:2x8", USAGE)
    return cluster_text.parse(inputs.cluster or own.CLUSTER)


def check_builtin(machines: Cluster) -> None:
    """Refuse a cluster on which the built-in applications cannot run.

    Raises:
        CliError: it has none of their GPU types.
    """
    from slurm_elastic.simulator.workloads import builtin_profiles  # noqa: PLC0415

    builtin_types = [gpu.name for gpu in builtin_profiles.GPUS]
    if not set(builtin_types) & set(machines.types):
        raise CliError(
            f"--cluster {machines}: the built-in profiles have {', '.join(builtin_types)} only;"
            " use one of these, or --profiles DIR",
            USAGE,
        )


def load(
    paths: Sequence[str], inputs: Inputs, machines: Cluster
) -> list[tuple[Workload, Profiles]]:
    """Read the workloads, and the profiles that each of them needs."""
    from slurm_elastic.simulator.workloads import (  # noqa: PLC0415
        application_profiles,
        builtin_profiles,
        curve_jobs,
        workload,
    )

    by_type = type_speeds(inputs.speeds)
    unknown = set(by_type) - set(machines.types)
    if by_type and not set(by_type) & set(machines.types):
        raise CliError(f"--speeds: no GPU of type {min(unknown)} in --cluster {machines}", USAGE)
    with contextlib.ExitStack() as stack:
        folder = Path(inputs.profiles) if inputs.profiles else None
        loaded: list[tuple[Workload, Profiles]] = []
        for path in map(Path, paths):
            if curve_jobs.has_curves(path):
                name, jobs = curve_jobs.read(path)
                loaded.append(curve_jobs.build(name, jobs, machines.types, speeds=by_type))
                continue
            if folder is None:
                check_builtin(machines)
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                builtin_profiles.write(folder)
            known_applications = application_profiles.applications(folder)
            try:
                jobs_ = workload.read(path, applications=known_applications)
            except workload.WorkloadError as error:
                text = _kind_hint(path) or _with_hint(str(error), inputs)
                raise CliError(text, USAGE) from None
            loaded.append(
                (jobs_, application_profiles.read(folder, jobs_.applications, machines.types))
            )
        if not paths:
            loaded.append(_generated(stack, inputs, machines))
    return _with_unique_names(loaded, paths)


def _with_unique_names(
    loaded: list[tuple[Workload, Profiles]], paths: Sequence[str]
) -> list[tuple[Workload, Profiles]]:
    """Put the folder before the names of workloads if two files share a name."""
    if len({jobs.name for jobs, _ in loaded}) == len(loaded):
        return loaded
    return [
        (dataclasses.replace(jobs, name=f"{Path(path).resolve().parent.name}/{jobs.name}"), tables)
        for (jobs, tables), path in zip(loaded, paths, strict=True)
    ]


def _kind_hint(path: Path) -> str:
    """Return a message about a file of accounting that is given as a workload; "" for others."""
    from slurm_elastic.simulator.workloads import accounting_trace  # noqa: PLC0415

    if not accounting_trace.is_recognised(path):
        return ""
    name = clean(path)
    return (
        f"{name}: is accounting or a trace, no workload: selastic compare --sacct {name}, or"
        f" selastic workload from-sacct {name} -o FILE.csv"
    )


def _with_hint(text: str, inputs: Inputs) -> str:
    if inputs.profiles is None and "has no profile" in text:
        return clean(text.replace("add its folder to --profiles", "name its --profiles DIR"))
    return clean(text)


def _generated(
    stack: contextlib.ExitStack, inputs: Inputs, machines: Cluster
) -> tuple[Workload, Profiles]:
    """Generate a workload of the built-in applications."""
    from slurm_elastic.simulator.workloads import (  # noqa: PLC0415
        application_profiles,
        builtin_profiles,
        generate,
        workload,
    )

    if inputs.profiles is not None:
        raise CliError(
            "WORKLOAD is missing; name one, or generate one: selastic workload generate --profiles"
            f" {clean(inputs.profiles)} -o FILE.csv",
            USAGE,
        )
    check_builtin(machines)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    builtin_profiles.write(folder)
    path = folder / "invented.csv"
    lines = generate.generate(
        builtin_profiles.request_patterns(),
        jobs=_INVENTED_JOBS,
        hours=_INVENTED_HOURS,
        seed=inputs.seed,
    )
    with path.open("w", encoding="utf-8") as stream:
        generate.write(lines, stream)
    jobs = workload.read(path)
    click.echo(
        f"selastic: no WORKLOAD given, using an invented one: {_INVENTED_JOBS} jobs in"
        f" {_INVENTED_HOURS:g} h on {machines}",
        err=True,
    )
    return jobs, application_profiles.read(folder, jobs.applications, machines.types)


def restarts(inputs: Inputs) -> RestartCosts | None:
    """Return the costs of --restarts, seconds or a file; None if it is not given."""
    from slurm_elastic.simulator.truth import restart_costs as costs  # noqa: PLC0415

    text = inputs.restarts
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return costs.read(Path(text))
    if not 0 <= seconds <= 1e6:
        raise CliError(
            f"--restarts: {text} is invalid: expected seconds from 0 to 1000000, or a file", USAGE
        )
    return costs.RestartCosts(default_s=seconds)


def task(loaded: tuple[Workload, Profiles], machines: Cluster, inputs: Inputs, policy: str) -> Task:
    """Return the task of one simulation."""
    from slurm_elastic.core.application import JobClass  # noqa: PLC0415
    from slurm_elastic.simulator.parallel_runs import Task  # noqa: PLC0415
    from slurm_elastic.simulator.truth.resize_costs import ResizeCosts  # noqa: PLC0415

    site = settings(inputs, policy)
    in_place = inputs.in_place or (site.resize.in_place if _config_file(inputs) else "never")
    return Task(
        workload=loaded[0],
        profiles=loaded[1],
        cluster=machines,
        config=site,
        resizes=ResizeCosts() if in_place == "auto" else None,
        interval_s=inputs.interval,
        clock=inputs.clock,  # type: ignore[arg-type]  # click.Choice
        seed=inputs.seed,
        job_class=JobClass(inputs.class_) if inputs.class_ else None,
        restarts=_by_job(restarts(inputs), loaded[1]),
        freezing=inputs.freezing,
        neighbours=neighbours(inputs.neighbours),
        gpu_pairs=neighbours(inputs.gpu_pairs, option="--gpu-pairs"),
        network=network(
            machines,
            loaded[0],
            builtin=inputs.profiles is None and "#" not in min(loaded[0].applications),
            **inputs.network,
        ),
    )


def _by_job(costs: RestartCosts | None, tables: Profiles) -> RestartCosts | None:
    """Add the costs of profiles of single jobs, named `APPLICATION#JOB` (`curve_jobs`)."""
    if costs is None:
        return None
    seconds = costs.seconds
    of_jobs = {n: seconds[n.partition("#")[0]] for n in tables if n.partition("#")[0] in seconds}
    return dataclasses.replace(costs, seconds={**seconds, **of_jobs})


def run(tasks: Sequence[Task], inputs: Inputs) -> list[Result]:
    """Run all tasks with a progress display, and return their results."""
    from slurm_elastic.simulator.parallel_runs import run_all  # noqa: PLC0415

    cpus = len(os.sched_getaffinity(0))
    names = [f"{t.config.controller.policy} {t.workload.name}" for t in tasks]
    sizes = [len(t.workload.jobs) for t in tasks]
    with progress.shown(names, sizes) as report:
        return run_all(tasks, processes=inputs.jobs or cpus, report=report)


def check(inputs: Inputs, *, plot: str | None, jobs_csv: str | None) -> None:
    """Check inputs and output files before a long run."""
    from slurm_elastic.simulator import plots  # noqa: PLC0415

    restarts(inputs)
    settings(inputs, "")
    check_network(**inputs.network)
    neighbours(inputs.neighbours)
    neighbours(inputs.gpu_pairs, option="--gpu-pairs")
    if plot is not None:
        plots.check(Path(plot))
    if jobs_csv is not None and not Path(jobs_csv).resolve().parent.is_dir():
        raise CliError(f"--jobs-csv: {clean(jobs_csv)}: no such folder; create it first", USAGE)


def write_text(path: str, text: str, option: str) -> None:
    """Write a file; `-` is standard output."""
    if path == "-":
        click.echo(text, nl=False)
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{option}: {clean(path)}: {error.strerror}", USAGE) from None


def plain(value: Any) -> Any:
    """Prepare a value for JSON: floats have six digits, infinity and NaN become None."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return value
