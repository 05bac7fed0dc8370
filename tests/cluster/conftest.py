"""The container cluster (contrib/cluster) as a fixture."""

import os
import subprocess
from collections.abc import Iterator

import pytest
from harness import CLUSTER_DIR, Cluster

CANNOT_HAVE_DOCKER = 3  # exit code of `cluster`


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster, brought up if it is down (see the class `Cluster`); skips without Docker.

    A cluster that is up is taken as it is: after an edit of the project, run
    `contrib/cluster/cluster sync` first.
    """
    name = os.environ.get("SELASTIC_CLUSTER", "selastic")
    command = [str(CLUSTER_DIR / "cluster"), "--name", name]
    if subprocess.run([*command, "status"], capture_output=True, check=False).returncode != 0:
        done = subprocess.run([*command, "up"], capture_output=True, text=True, check=False)
        if done.returncode == CANNOT_HAVE_DOCKER:
            pytest.skip(done.stderr.strip())
        if done.returncode:
            pytest.fail(done.stderr.strip())
    return Cluster(name)


@pytest.fixture(autouse=True)
def _cancel_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """No job outlives the test that submitted it."""
    yield
    if "cluster" in request.fixturenames:
        running: Cluster = request.getfixturevalue("cluster")
        running.cancel()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the cluster is marked so; its time limit leaves out the first image build."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(300, func_only=True))
