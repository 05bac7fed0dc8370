"""The container cluster (contrib/cluster) as a fixture."""

import subprocess
from collections.abc import Iterator

import pytest

from tests.support.cluster import CLUSTER_DIR, FIRST_WORKER, Cluster, cluster_name, worker_name
from tests.support.needs import lack

CANNOT_HAVE_DOCKER = 3  # exit code of `cluster`


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """The cluster, brought up if it is down (see the class `Cluster`); skips without Docker.

    A cluster that is up is taken as it is: after an edit of the project, run
    `contrib/cluster/cluster sync` first. With `pytest -n` each worker beyond the first has one
    of its own, which is removed at the end.
    """
    name = cluster_name()
    command = [str(CLUSTER_DIR / "cluster"), "--name", name]
    if subprocess.run([*command, "status"], capture_output=True, check=False).returncode != 0:
        done = subprocess.run([*command, "up"], capture_output=True, text=True, check=False)
        if done.returncode == CANNOT_HAVE_DOCKER:
            lack("docker")
        if done.returncode:
            pytest.fail(done.stderr.strip())
    yield Cluster(name)
    if worker_name() != FIRST_WORKER:
        subprocess.run([*command, "down"], capture_output=True, check=True)


@pytest.fixture(autouse=True)
def _cancel_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """No job outlives the test that submitted it."""
    yield
    if "cluster" in request.fixturenames:
        running: Cluster = request.getfixturevalue("cluster")
        running.cancel()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What uses the cluster is marked so; its time limit leaves out the first image build.

    The longest file comes first, so that no worker is left alone with it at the end.
    """
    items.sort(key=lambda item: item.path.name != "test_demo.py")
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(300, func_only=True))
