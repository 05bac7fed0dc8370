"""Machines on which the packages are tried."""

import pytest

from tests.support.container_cluster.package_machine import BUILT, QUIET, PackageMachine
from tests.support.needs import require


@pytest.fixture
def machine(request):
    """A machine with Debian's Slurm, on which the built packages lie in /packages."""
    require("docker")
    if not (BUILT / request.param).is_dir():
        pytest.skip(f"dist/packages/{request.param} is not there: make packages")
    machine = PackageMachine(request.param)
    try:
        machine.run(f"{QUIET} update")
        yield machine
    finally:
        machine.close()
