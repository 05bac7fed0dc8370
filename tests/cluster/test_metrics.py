"""`/metrics` of selasticd on a real cluster, while a job grows and gives way."""

from collections.abc import Iterator

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from slurm_elastic.controller.metrics import metric_definitions as metrics
from tests.support.selasticd import PYTHON, Daemon, eager_config, gpus, running, submit_running
from tests.support.slurm_cluster import SlurmCluster, until

pytestmark = pytest.mark.usefixtures("no_trace")

LISTEN = "127.0.0.1:9341"
SCRAPE = f"""
import urllib.request
request = urllib.request.Request(
    "http://{LISTEN}/metrics", headers={{"Accept": "application/openmetrics-text"}}
)
print(urllib.request.urlopen(request, timeout=10).read().decode(), end="")
"""


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(extra=f'[metrics]\nlisten = "{LISTEN}"\n')) as daemon:
        yield daemon


def scraped(cluster: SlurmCluster) -> dict[tuple[str, ...], float]:
    """Return the samples of one scrape, by name and values of the labels in their order."""
    text = cluster.exec([PYTHON, "-c", SCRAPE], node=Daemon.NODE).stdout
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_job_that_grows_moves_the_counters(daemon: Daemon, cluster: SlurmCluster) -> None:
    first = scraped(cluster)
    assert first["selastic_active",] == 1
    assert first["selastic_gpus", "a100", "idle"] == 12
    job = submit_running(cluster, "--gres=gpu:a100:1")
    until(lambda: gpus(cluster, job) == 4)
    grown = ("selastic_transitions_total", "grow", "done")
    until(lambda: scraped(cluster)[grown] == first[grown] + 1)
    until(lambda: scraped(cluster)["selastic_gpus", "a100", "elastic"] == 4)
    last = scraped(cluster)
    assert last["selastic_transition_seconds_count", "slurm"] >= 1
    assert last["selastic_requests_total", "report", "ok"] > 0
    assert last["selastic_round_seconds_count",] > first["selastic_round_seconds_count",]
    assert last["selastic_ledger_bytes",] > 0
    assert last["selastic_holds_total",] == last["selastic_changes_failed_total",] == 0


def test_every_defined_metric_is_exported_by_a_controller_that_acts(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    names = {name for name, *_ in scraped(cluster)}
    for metric in (*metrics.ALWAYS, *metrics.OF_CLUSTER, *metrics.COUNTED):
        end = "_count" if metric.kind == "histogram" else ""
        if metric is not metrics.NOTES:  # absent without warnings
            assert metric.full_name + end in names
