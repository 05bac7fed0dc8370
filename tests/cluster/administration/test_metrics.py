"""`/metrics` of selasticd on a real cluster, while a job grows."""

from collections.abc import Iterator

import pytest

from slurm_elastic.controller.metrics import metric_definitions as metrics
from tests.support.container_cluster.selasticd import (
    METRICS,
    Daemon,
    eager_config,
    gpus,
    running,
    submit_running,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(extra=METRICS)) as daemon:
        yield daemon


def test_a_job_that_grows_moves_the_counters(daemon: Daemon, cluster: SlurmCluster) -> None:
    until(lambda: daemon.metrics().get(("selastic_gpus", "a100", "idle")) == 12)
    first = daemon.metrics()
    assert first["selastic_active",] == 1
    job = submit_running(cluster, "--gres=gpu:a100:1")
    until(lambda: gpus(cluster, job) == 4)
    grown = ("selastic_transitions_total", "grow", "requeue", "done")
    until(lambda: daemon.metrics()[grown] == first[grown] + 1)
    until(lambda: daemon.metrics()["selastic_gpus", "a100", "elastic"] == 4)
    last = daemon.metrics()
    assert last["selastic_transition_seconds_count", "slurm"] >= 1
    assert last["selastic_requests_total", "report", "ok"] > 0
    assert last["selastic_round_seconds_count",] > first["selastic_round_seconds_count",]
    assert last["selastic_ledger_bytes",] > 0
    assert last["selastic_holds_total",] == last["selastic_changes_failed_total",] == 0


def test_every_defined_metric_is_exported_by_a_controller_that_acts(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    wanted = {
        metric.full_name + ("_count" if metric.kind == "histogram" else "")
        for metric in (*metrics.ALWAYS, *metrics.OF_CLUSTER, *metrics.COUNTED)
        if metric is not metrics.NOTES  # absent without warnings
    }
    until(lambda: wanted <= {name for name, *_ in daemon.metrics()})
