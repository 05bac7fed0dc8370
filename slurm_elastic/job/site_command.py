"""Commands of the site, which go before those of an environment that has only the library.

`pip install slurm-elastic` puts `esrun` and `selastic` into the researcher's conda or virtual
environment, too, and once that is activated they come first on the path. The site's esrun has the
release of its controller, and the site's selastic has all that selastic needs: so such an
environment passes a command on to the one that comes later on the path, if there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder

#: Packages of the extra `controller`, as they are imported.
CONTROLLER_PACKAGES = (
    "highspy", "structlog", "click", "networkx", "numpy", "rich", "rich_click", "scipy",
    "msgspec", "prometheus_client",
)  # fmt: skip


def missing_packages() -> list[str]:
    """Return the packages of the extra `controller` that this installation lacks, sorted."""
    return sorted(name for name in CONTROLLER_PACKAGES if PathFinder.find_spec(name) is None)


def run_site_command(name: str, env: Mapping[str, str] = os.environ) -> None:
    """Replace this process by the command of the site, if this environment is not the site's.

    Returns if this environment is not activated, if it has the extra `controller`, or if no other
    command of that name comes later on the path.
    """
    active = env.get("VIRTUAL_ENV"), env.get("CONDA_PREFIX")
    prefixes = {os.path.realpath(folder) for folder in active if folder}
    if os.path.realpath(sys.prefix) in prefixes and missing_packages():
        run_later_command(name, env)


def run_later_command(name: str, env: Mapping[str, str] = os.environ) -> None:
    """Replace this process by the command that comes after this environment's on the path.

    Returns if there is none. Only folders after this environment's own are searched, so that two
    environments cannot pass a command to and fro.
    """
    command = later_command(name, env)
    if command is not None:
        try:
            os.execv(command, [command, *sys.argv[1:]])  # noqa: S606
        except OSError as error:
            sys.stderr.write(f"{name}: {command}: {error.strerror}\n")


def later_command(name: str, env: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the command after this environment's; None if there is none."""
    own = os.path.realpath(os.path.join(sys.prefix, "bin"))  # noqa: PTH118 - fast start
    folders = [folder for folder in env.get("PATH", "").split(os.pathsep) if folder]
    real = [os.path.realpath(folder) for folder in folders]
    if own not in real:
        return None
    for folder in folders[real.index(own) + 1 :]:
        command = os.path.join(folder, name)  # noqa: PTH118
        if os.access(command, os.X_OK) and not _is_inside(command, own):
            return command
    return None


def _is_inside(command: str, folder: str) -> bool:
    real = os.path.realpath(command)
    return os.path.isdir(command) or os.path.dirname(real) == folder  # noqa: PTH112, PTH120
