"""Fixtures of the cluster tests, and the distribution of tests over clusters."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.support.container_cluster.selasticd import Daemon, leaves_no_trace, running
from tests.support.container_cluster.slurm_cluster import (
    CLUSTER_DIR,
    FIRST_WORKER,
    WAIT_FACTOR,
    SlurmCluster,
    cluster_name,
    start_cluster,
    temporary_cluster,
    worker_name,
)

#: Files, or tests, in which the controller acts on step times that it measures. Those of a group
#: run one after the other: at once, their many ranks would falsify each other's times. The last one
#: of each group is the most sensitive: by then the unit tests are over.
MEASURING = (
    (
        "::test_a_slow_network_is_the_networks", "test_hybrid.py", "test_learning_layouts.py",
        "test_near_places.py",
    ),
    ("test_profiler.py", "test_icefrog_rounds.py"),
)  # fmt: skip
#: Files that take a worker a minute or more, the longest first, so that all workers end together.
#: A worker gets its next tests while its last one runs: a long one must not be among the last.
LONG = (
    "test_profiler.py", "test_hybrid.py", "test_learning_layouts.py", "test_near_places.py",
    "test_icefrog_rounds.py", "test_rank_restart.py", "test_sleep.py", "test_plan_choice.py",
    "test_in_place_training.py",
    "test_failing_scripts.py", "test_in_place.py", "test_demo.py", "test_frameworks.py",
    "test_life.py", "test_companion_faults.py", "test_launchers.py",
    "test_trouble.py", "test_engine.py", "test_many.py", "test_sia_rounds.py",
    "test_other_jobs.py", "test_examples.py", "test_chaos.py", "test_standby.py",
    "test_in_place_trials.py", "test_people.py", "test_debian_torch.py", "test_queue.py",
    "test_live_batches.py", "test_training.py", "test_type_profiles.py", "test_shared_gpus.py",
    "test_esrun.py", "test_sizes.py", "test_shared_resources.py",
    "test_policies_live.py", "test_usage.py", "test_elastic_option.py", "test_readers.py",
    "test_rehearsals.py", "test_companions.py", "test_guard.py",
)  # fmt: skip
#: Tests, or files of tests, that share nothing that takes long to set up: they need not run on one
#: worker.
SINGLE_TESTS = (
    "test_companion_faults.py", "test_companions.py", "test_demo.py", "test_engine.py",
    "test_esrun.py", "test_guard.py", "test_policies_live.py", "test_rank_restart.py",
    "test_rehearsals.py", "test_rights.py",
    "::test_a_job_that_fails_everywhere_is_held_not_ended",
    "::test_a_selasticd_that_is_down_meanwhile_brings_it_back_later",
)  # fmt: skip
_FILES = {path.name for path in Path(__file__).parent.rglob("test_*.py")}
for _name in {*LONG, *SINGLE_TESTS, *MEASURING[0], *MEASURING[1]}:
    assert _name.startswith("::") or _name in _FILES, f"{_name} is no longer a file of tests"
TIMEOUT_S = 300.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    """Yield the cluster, started if it is down; skip without Docker.

    A cluster that is up is taken as it is: after an edit of the project, run
    `contrib/cluster/cluster sync` first. With `pytest -n` each worker beyond the first has one
    of its own, which is removed at the end.
    """
    name = cluster_name()
    if worker_name() != FIRST_WORKER:
        with temporary_cluster(name) as own:
            yield own
        return
    command = [str(CLUSTER_DIR / "cluster"), "--name", name, "status"]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        start_cluster(name)
    yield SlurmCluster(name)


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    """Run selasticd, which acts as soon as it can, for the tests of a file."""
    with running(cluster) as daemon:
        yield daemon


@pytest.fixture
def no_trace(daemon: Daemon) -> Iterator[None]:
    """Check that a test leaves a running selasticd, no reservation, and no internal error."""
    with leaves_no_trace(daemon):
        yield


@pytest.fixture(autouse=True)
def _cancel_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Cancel the jobs that a test submitted when it ends."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").cancel()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what uses the cluster, with a time limit that leaves out the image; long files first."""
    order = {name: position for position, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.cluster)
            item.add_marker(pytest.mark.timeout(WAIT_FACTOR * TIMEOUT_S, func_only=True))


class FileScheduling(LoadScopeScheduling):
    """Scheduling of whole files, in order, and of single tests where that costs nothing."""

    def _reschedule(self, node: WorkerController) -> None:
        """Give a worker more tests only when one is left: others may be free before it."""
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        for number, group in enumerate(MEASURING):
            if path.endswith(group) or nodeid.endswith(group):
                return f"measuring {number}"
        return nodeid if path.endswith(SINGLE_TESTS) or nodeid.endswith(SINGLE_TESTS) else path


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    config.option.loadscopereorder = False  # it would put the file with the most tests first
    return FileScheduling(config, log)
