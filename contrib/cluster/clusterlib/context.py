"""Context of the image build: only the files that the image needs, so that layers stay valid."""

from __future__ import annotations

import io
import os
import ssl
import tarfile
import tomllib
from pathlib import Path

from clusterlib.slurm_build import SlurmBuild, series

CLUSTER_DIR = Path(__file__).resolve().parent.parent
PROJECT_DIR = CLUSTER_DIR.parent.parent
# Tests and documents stay out: editing them must not rebuild the image.
PROJECT_PARTS = (
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "slurm_elastic",
    "plugins",
    "wrappers",
    "etc",
    "docs/man",
    "contrib/completion",
    "docs/examples",
    "contrib/cluster/elastic.toml",
    "contrib/cluster/devices.toml",
    "contrib/cluster/image/install-project",
)
IGNORED = ("__pycache__", ".pyc", ".so", ".o", ".egg-info", "_cache")


def build_context(slurm: SlurmBuild) -> bytes:
    """Return a tar archive for `docker build -`."""
    with _Archive() as archive:
        _add_slurm(archive, slurm)
        for part in ("Dockerfile", "clusterlib", "image/cluster-start", "pyslurm"):
            archive.add_tree(CLUSTER_DIR / part, part)
        archive.add("requirements.txt", requirements().encode())
        archive.add_tree(PROJECT_DIR / "requirements" / "frameworks.txt", "frameworks.txt")
        archive.add("host-ca/bundle.crt", host_ca())
        _add_project(archive, "project")
    return archive.content()


def project_archive(folder: str) -> bytes:
    """Return the project as a tar archive, with everything below `folder`."""
    with _Archive() as archive:
        _add_project(archive, folder)
    return archive.content()


def requirements() -> str:
    """Return the controller's requirements, for a layer that is rebuilt only when they change."""
    project = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())["project"]
    return "\n".join([*sorted(project["optional-dependencies"]["controller"]), ""])


def host_ca() -> bytes:
    """Return the certificates that the host trusts, SSL_CERT_FILE included; b"" if none."""
    for name in (os.environ.get("SSL_CERT_FILE"), ssl.get_default_verify_paths().cafile):
        if name and Path(name).is_file():
            return Path(name).read_bytes()
    return b""


def _add_slurm(archive: _Archive, slurm: SlurmBuild) -> None:
    """Add the script that replaces Debian's Slurm, and the release that takes its place, if any."""
    archive.add_tree(CLUSTER_DIR / "slurm", "slurm")
    for path, name in ((slurm.tree, "tree"), (slurm.source, "source")):
        if path:
            archive.add(f"slurm/{name}", path.read_bytes())
    if slurm.pyslurm:
        major, minor = series(slurm.release)
        archive.add("slurm/pyslurm", f"pyslurm=={major}.{minor}.*\n".encode())


def _add_project(archive: _Archive, folder: str) -> None:
    for part in PROJECT_PARTS:
        archive.add_tree(PROJECT_DIR / part, f"{folder}/{part}")


class _Archive:
    """Tar archive in memory whose bytes depend on names, contents and executable bits only."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()
        self._tar = tarfile.open(fileobj=self._buffer, mode="w")  # noqa: SIM115

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.close()

    def content(self) -> bytes:
        """Close the archive and return it."""
        return self._buffer.getvalue()

    def add_tree(self, root: Path, name: str) -> None:
        """Add a file or a folder; what does not exist is left out."""
        if root.is_file():
            self.add(name, root.read_bytes(), executable=os.access(root, os.X_OK))
        for path in sorted(root.rglob("*")) if root.is_dir() else []:
            if path.is_file() and not any(part.endswith(IGNORED) for part in path.parts):
                executable = os.access(path, os.X_OK)
                self.add(
                    f"{name}/{path.relative_to(root)}", path.read_bytes(), executable=executable
                )

    def add(self, name: str, content: bytes, *, executable: bool = False) -> None:
        """Add one file."""
        info = tarfile.TarInfo(name)
        info.size, info.mode = len(content), 0o755 if executable else 0o644
        self._tar.addfile(info, io.BytesIO(content))
