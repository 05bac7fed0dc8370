"""Scrapes of a running server, well-behaved and hostile."""

import http.client
import socket
from contextlib import contextmanager

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.metrics import metric_definitions
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.metrics_server import MetricsServer
from slurm_elastic.controller.metrics.metrics_source import MetricsSource
from slurm_elastic.controller.metrics.metrics_text import MetricsText
from slurm_elastic.controller.queries.view import View
from slurm_elastic.core.cluster import Node, Snapshot
from tests.support.controller.fake_controller import FakeLog

VIEW = View(snapshot=Snapshot(time=1.0, nodes=(Node(name="g1", gpu_type="a100", gpus=4),), jobs=()))


@contextmanager
def serving(source, log=None):
    server = MetricsServer("127.0.0.1:0", MetricsText(source).render, log or FakeLog())
    server.start()
    try:
        yield server
    finally:
        server.stop()


def scrape(server, path="/metrics", method="GET"):
    connection = http.client.HTTPConnection(*server.address, timeout=10)
    connection.request(method, path, headers={"Accept": "application/openmetrics-text"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def samples(text):
    return {
        (s.name, *sorted(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def test_the_active_controller_exports_its_cluster():
    with serving(lambda: MetricsSource(VIEW, Config(), ActivityCounts(), "json")) as server:
        status, text = scrape(server)
    values = samples(text)
    assert status == 200
    assert values[("selastic_active",)] == 1
    assert values[("selastic_gpus", ("gpu_type", "a100"), ("use", "idle"))] == 4


def test_counters_and_histograms_are_exported_as_openmetrics_has_them():
    counts = ActivityCounts()
    counts.round_done(0.02, cpu_s=0.01)
    counts.round_done(99.0, cpu_s=1.0)
    counts.request("report", {"error": "too many", "code": "rate"})
    with serving(lambda: MetricsSource(None, Config(), counts)) as server:
        values = samples(scrape(server)[1])
    assert values[("selastic_round_seconds_bucket", ("le", "0.01"))] == 0
    assert values[("selastic_round_seconds_bucket", ("le", "0.03"))] == 1
    assert values[("selastic_round_seconds_bucket", ("le", "+Inf"))] == 2
    assert values[("selastic_round_seconds_sum",)] == 99.02
    assert values[("selastic_round_cpu_seconds_total",)] == 1.01
    refused = ("selastic_requests_total", ("operation", "report"), ("result", "rate"))
    assert values[refused] == 1


def test_a_standby_exports_no_figure_of_the_cluster():
    now = [VIEW]
    with serving(lambda: MetricsSource(now[0], Config(), ActivityCounts())) as server:
        scrape(server)
        now[0] = None
        values = samples(scrape(server)[1])
    assert values[("selastic_active",)] == 0
    of_cluster = {d.full_name for d in metric_definitions.OF_CLUSTER}
    assert of_cluster.isdisjoint(name for name, *_ in values)


def test_other_paths_and_methods_are_refused():
    with serving(lambda: MetricsSource(None, Config(), ActivityCounts())) as server:
        assert scrape(server, "/")[0] == 404
        assert scrape(server, method="POST")[0] == 405


def test_silent_callers_do_not_keep_others_waiting():
    with serving(lambda: MetricsSource(None, Config(), ActivityCounts())) as server:
        silent = [socket.create_connection(server.address) for _ in range(100)]
        assert scrape(server)[0] == 200
        for sock in silent:
            sock.close()


def test_a_request_that_is_too_long_is_dropped_and_the_next_one_answered():
    with serving(lambda: MetricsSource(None, Config(), ActivityCounts())) as server:
        with socket.create_connection(server.address) as sock:
            sock.sendall(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * 20_000)
        assert scrape(server)[0] == 200


def test_a_fault_is_logged_once_and_answered():
    log = FakeLog()

    def broken():
        raise KeyError("x")

    with serving(broken, log) as server:
        assert [scrape(server)[0] for _ in range(2)] == [500, 500]


def test_a_taken_port_is_one_clear_line():
    with serving(lambda: MetricsSource(None, Config(), ActivityCounts())) as server:
        host, port = server.address
        second = MetricsServer(f"{host}:{port}", lambda _: ("", b""), FakeLog())
        with pytest.raises(OSError, match=r"\[metrics\] listen = .*: Address already in use"):
            second.start()
