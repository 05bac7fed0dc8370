"""`selastic profile` in a new job: submits the same command with sbatch."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from slurm_elastic.cli.exit_codes import REFUSED, CliError
from slurm_elastic.cli.formatting import clean

#: Options that describe the job, each with a value; removed from the command inside it.
_JOB_OPTIONS = ("-p", "--partition", "--nodes", "--gpus-per-node", "--time")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilingJob:
    """Options of sbatch; None: the default of the site."""

    partition: str | None
    nodes: int
    gpus_per_node: str
    time: str | None


def submit(job: ProfilingJob, argv: Sequence[str], *, directory: Path, dry_run: bool) -> int:
    """Submit a job, wait for its end, print its output, and return its exit code.

    Raises:
        CliError: sbatch is missing, or refuses the job.
    """
    if shutil.which("sbatch") is None:
        raise CliError(
            "no sbatch on this machine: leave out --partition, --nodes, --gpus-per-node and --time"
            " to measure here"
        )
    log = directory.absolute() / "job.log"
    command = sbatch(job, inner(argv), log)
    if dry_run:
        click.echo(shlex.join(command))
        return 0
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(f"--dir {clean(directory)}: {error.strerror}") from None
    log.unlink(missing_ok=True)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    job_id = process.stdout.readline().strip().split(";")[0]
    if job_id:
        click.echo(f"selastic: job {clean(job_id)} submitted, waiting for it ({log})", err=True)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        if job_id:
            subprocess.run(["scancel", job_id], check=False)
        raise
    if not job_id:
        raise CliError("sbatch refused the job", REFUSED)
    if log.exists():
        click.echo(log.read_text(encoding="utf-8", errors="replace").rstrip())
    return code


def sbatch(job: ProfilingJob, command: Sequence[str], log: Path) -> list[str]:
    """Return the command line of sbatch."""
    return [
        *("sbatch", "--parsable", "--wait", "--job-name=selastic-profile", f"--output={log}"),
        *(("--partition=" + job.partition,) if job.partition else ()),
        *(("--time=" + job.time,) if job.time else ()),
        f"--nodes={job.nodes}",
        f"--gpus-per-node={job.gpus_per_node}",
        f"--ntasks-per-node={_count(job.gpus_per_node)}",
        "--wrap=" + shlex.join(command),
    ]


def inner(argv: Sequence[str]) -> list[str]:
    """Return the command without the options of the job, by absolute path.

    >>> inner(["/usr/bin/selastic", "profile", "-p", "gpu", "--time=5", "--", "a", "-p", "b"])
    ['/usr/bin/selastic', 'profile', '--', 'a', '-p', 'b']
    """
    arguments, inner_command = list(argv), []
    path = shutil.which(arguments[0])
    inner_command.append(str(Path(path).absolute()) if path else arguments[0])
    remaining_arguments = iter(arguments[1:])
    for word in remaining_arguments:
        if word == "--":
            return [*inner_command, word, *remaining_arguments]
        if word in _JOB_OPTIONS:
            next(remaining_arguments, None)
        elif word in ("-n", "--dry-run"):
            continue
        elif not word.startswith(tuple(f"{o}=" for o in _JOB_OPTIONS if o.startswith("--"))):
            inner_command.append(word)
    return inner_command


def _count(gpus_per_node: str) -> str:
    count = gpus_per_node.rpartition(":")[2]
    if not count.isdecimal() or not int(count):
        raise CliError(f"--gpus-per-node {clean(gpus_per_node)} is invalid: expected 4 or a100:4")
    return count
