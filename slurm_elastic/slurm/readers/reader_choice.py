"""Choice between pyslurm and Slurm's JSON, by release and by trial."""

from __future__ import annotations

import signal
import subprocess
import sys

import structlog

from slurm_elastic.slurm.limits import AccountingLimits
from slurm_elastic.slurm.readers.cluster_reader import ClusterReader, ReaderChoice
from slurm_elastic.slurm.readers.deferred_source import DeferredSource
from slurm_elastic.slurm.readers.json_source import JsonSource
from slurm_elastic.slurm.readers.pyslurm_source import PyslurmSource, pyslurm_version
from slurm_elastic.slurm.readers.record_source import RecordSource
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import installed_release, output

#: Name of the choice while slurmctld does not answer, so that pyslurm cannot be tried.
UNDECIDED = "undecided"

_PROBE = "slurm_elastic.slurm.readers.pyslurm_probe"
_PROBE_S = 60.0


def choose(setting: str = "auto", *, timeout_s: float = 30.0) -> ReaderChoice:
    """Return how slurmctld is to be read; `UNDECIDED` if that depends on its answer.

    Args:
        setting: `auto`, `pyslurm` or `json`.
        timeout_s: for each command of Slurm.

    Raises:
        SlurmUnreachableError: no reader can be used; the message has the remedy.
    """
    return _choose(setting, timeout_s)[0]


def _choose(setting: str, timeout_s: float) -> tuple[ReaderChoice, str]:
    """Return the choice, and for `UNDECIDED` the error of the command without an answer."""
    release = installed_release()
    if setting == "json":
        return ReaderChoice("json", '[slurm] reader = "json"', release), ""
    version = pyslurm_version()
    if not version:
        problem = "pyslurm is not installed"
    elif not release.fits(version):
        problem = f"pyslurm {version} does not fit Slurm {release}"
    else:
        # Without an answer the trial fails, whether pyslurm fits or not.
        silence = _silence(timeout_s)
        problem = "" if silence else _failed_trial(version)
        if problem:
            silence = _silence(timeout_s)
        if silence:
            return ReaderChoice(UNDECIDED, "slurmctld does not answer", release), silence
    if not problem:
        return ReaderChoice("pyslurm", f"{version} fits Slurm {release}", release), ""
    if setting == "pyslurm":
        raise SlurmUnreachableError(f'{problem}: install one that fits, or set reader = "auto"')
    return ReaderChoice("json", problem, release), ""


def connect(
    *,
    reservation_prefix: str,
    limits: AccountingLimits | None = None,
    setting: str = "auto",
    timeout_s: float = 30.0,
) -> ClusterReader:
    """Return a reader of this site's slurmctld.

    Args:
        reservation_prefix: beginning of the names of our own reservations.
        limits: limits of the accounting database; None: no limits.
        setting: `auto`, `pyslurm` or `json`.
        timeout_s: for each command of Slurm.

    Raises:
        SlurmUnreachableError: no reader can be used; the message has the remedy.
    """

    def source(choice: ReaderChoice) -> RecordSource:
        if choice.name == "pyslurm":
            return PyslurmSource()
        return JsonSource(choice.release, timeout_s=timeout_s)

    def decide() -> RecordSource:
        choice, silence = _choose(setting, timeout_s)
        if silence:
            raise SlurmUnreachableError(silence)
        chosen = source(choice)
        reader.choice = choice
        structlog.get_logger("reader_choice").info(f"slurmctld is read through {choice}")
        return chosen

    choice = choose(setting, timeout_s=timeout_s)
    reader = ClusterReader(
        DeferredSource(decide) if choice.name == UNDECIDED else source(choice),
        reservation_prefix=reservation_prefix,
        limits=limits,
        choice=choice,
    )
    return reader


def _silence(timeout_s: float) -> str:
    """Return why slurmctld does not answer Slurm's own command; "" if it does."""
    try:
        output("scontrol", "show", "config", timeout_s=timeout_s)
    except SlurmUnreachableError as error:
        return f"slurmctld: {error}"
    return ""


def _failed_trial(version: str) -> str:
    """Return how a trial of pyslurm failed; "" if it did not."""
    try:
        process = subprocess.run(
            [sys.executable, "-m", _PROBE],
            capture_output=True,
            timeout=_PROBE_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return f"pyslurm {version} did not answer in {_PROBE_S:g} s when tried"
    if process.returncode == 0:
        return ""
    if process.returncode < 0:
        name = signal.Signals(-process.returncode).name
        return f"pyslurm {version} crashed when tried ({name})"
    lines = process.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
    return f"pyslurm {version} failed when tried ({lines[-1]:.120})"
