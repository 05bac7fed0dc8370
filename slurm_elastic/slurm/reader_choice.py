"""Choice between pyslurm and Slurm's JSON, by release and by trial."""

from __future__ import annotations

import signal
import subprocess
import sys

from slurm_elastic.slurm.cluster_reader import ClusterReader, ReaderChoice
from slurm_elastic.slurm.json_source import JsonSource
from slurm_elastic.slurm.limits import AccountingLimits
from slurm_elastic.slurm.pyslurm_source import PyslurmSource, pyslurm_version
from slurm_elastic.slurm.release_rules import Release
from slurm_elastic.slurm.scontrol import SlurmUnreachableError
from slurm_elastic.slurm.slurm_command import installed_release

_PROBE = "slurm_elastic.slurm.pyslurm_probe"
_PROBE_S = 60.0


def choose(setting: str = "auto") -> ReaderChoice:
    """Return how slurmctld is to be read.

    Args:
        setting: `auto`, `pyslurm` or `json`.

    Raises:
        SlurmUnreachableError: no reader can be used; the message has the remedy.
    """
    release = installed_release()
    if setting == "json":
        return ReaderChoice("json", '[slurm] reader = "json"', release)
    problem = misfit(release)
    if not problem:
        return ReaderChoice("pyslurm", f"{pyslurm_version()} fits Slurm {release}", release)
    if setting == "pyslurm":
        raise SlurmUnreachableError(f'{problem}: install one that fits, or set reader = "auto"')
    return ReaderChoice("json", problem, release)


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
    choice = choose(setting)
    source = (
        PyslurmSource()
        if choice.name == "pyslurm"
        else JsonSource(choice.release, timeout_s=timeout_s)
    )
    return ClusterReader(
        source, reservation_prefix=reservation_prefix, limits=limits, choice=choice
    )


def misfit(release: Release) -> str:
    """Return why pyslurm cannot be used with this release; "" if it can."""
    version = pyslurm_version()
    if not version:
        return "pyslurm is not installed"
    if not release.fits(version):
        return f"pyslurm {version} does not fit Slurm {release}"
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
