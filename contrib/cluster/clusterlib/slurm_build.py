"""Releases of Slurm that a cluster can run: Debian's package, a built tree, or the source.

Imported on the host and, to write Slurm's configuration, in the containers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from clusterlib.progress import ClusterError

#: Release of the packages of the base image's Debian.
DEBIAN_RELEASE = "24.11.5"
#: Folders with built trees, separated by colons.
VARIABLE = "SLURM_TREES"
_TREE = re.compile(r"slurm-(\d+\.\d+\.\d+)-trixie-(\w+)\.tar(?:\.\w+)?")
_SOURCE = re.compile(r"slurm-(\d+\.\d+\.\d+)\S*\.tar(?:\.\w+)?")
_RELEASE = re.compile(r"\d+\.\d+(?:\.\d+)?")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class SlurmBuild:
    """Slurm as an image gets it.

    Attributes:
        release: for example "25.11.7".
        tree: archive of a built /opt/slurm; None: there is none.
        source: the maker's archive, built in the image; None: there is none. With neither archive
            it is Debian's package.
        pyslurm: whether to install the package index's pyslurm of the same release.
    """

    release: str = DEBIAN_RELEASE
    tree: Path | None = None
    source: Path | None = None
    pyslurm: bool = False


def series(release: str) -> tuple[int, int]:
    """Return the first two numbers of a release: what is compared, as text cannot be.

    >>> series("25.05.8") < series("25.11.0")
    True
    """
    major, minor = release.split(".")[:2]
    return int(major), int(minor)


def tree_folders() -> list[Path]:
    """Return the folders in which built trees are looked for."""
    named = os.environ.get(VARIABLE, "")
    checkout = Path(__file__).resolve().parents[3]
    beside = checkout.parent / "shared" / "slurm"
    return [Path(name) for name in named.split(os.pathsep) if name] or [beside]


def find_trees() -> dict[str, Path]:
    """Return the built trees for this machine, by release."""
    machine = os.uname().machine
    architecture = _ARCHITECTURES.get(machine, machine)
    trees = {}
    for folder in reversed(tree_folders()):
        for path in sorted(folder.glob("slurm-*")):
            match = _TREE.fullmatch(path.name)
            if match and match[2] == architecture:
                trees[match[1]] = path
    return trees


def choose(
    release: str = "",
    *,
    tree: Path | None = None,
    source: Path | None = None,
    pyslurm: bool = False,
) -> SlurmBuild:
    """Return the requested build of Slurm.

    Args:
        release: "25.11.7", or "25.11" for the newest of that series; "": that of `tree` or
            `source`, else Debian's.
        tree: archive of a built /opt/slurm.
        source: the maker's archive.
        pyslurm: see `SlurmBuild`.

    Raises:
        ClusterError: there is no such release, or a file is not what it should be.
    """
    if release and not _RELEASE.fullmatch(release):
        raise ClusterError(f"--slurm {release} is invalid: expected a release, for example 25.11.7")
    archive = tree or source
    if archive:
        return _of_archive(archive, release, built=tree is not None, pyslurm=pyslurm)
    trees = find_trees()
    found = newest(release, {DEBIAN_RELEASE, *trees}) if release else DEBIAN_RELEASE
    if not found:
        folders = ", ".join(map(str, tree_folders()))
        raise ClusterError(
            f"--slurm {release}: Debian has {DEBIAN_RELEASE}, and {folders} has no tree of it:"
            f" set {VARIABLE}, or name --slurm-tree FILE or --slurm-source FILE"
        )
    if found == DEBIAN_RELEASE:
        if pyslurm:
            raise ClusterError(f"--pyslurm: the image has it for {DEBIAN_RELEASE} already: omit it")
        return SlurmBuild()
    return SlurmBuild(found, tree=trees[found], pyslurm=pyslurm)


def newest(release: str, known: Iterable[str]) -> str:
    """Return the newest known release that `release` names; "" if there is none.

    >>> newest("25.11", ["25.11.7", "25.11.10", "25.5.1"])
    '25.11.10'
    """
    fitting = [r for r in known if r == release or r.startswith(f"{release}.")]
    return max(fitting, key=lambda r: [int(part) for part in r.split(".")], default="")


def _of_archive(archive: Path, release: str, *, built: bool, pyslurm: bool) -> SlurmBuild:
    option = f"--slurm-{'tree' if built else 'source'} {archive}"
    if not archive.is_file():
        raise ClusterError(f"{option}: no such file")
    match = (_TREE if built else _SOURCE).fullmatch(archive.name)
    known = match[1] if match else release
    if known.count(".") != 2:
        raise ClusterError(f"{option}: its name does not say which release it is: add --slurm")
    if release and newest(release, [known]) != known:
        raise ClusterError(f"{option}: it is {known}, and --slurm says {release}")
    return SlurmBuild(
        known,
        tree=archive if built else None,
        source=None if built else archive,
        pyslurm=pyslurm,
    )
