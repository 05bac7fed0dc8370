"""Metrics of a selasticd that does not act yet, and addresses that it refuses."""

import socket
import urllib.request

import pytest

from slurm_elastic.config.schema import ConfigError, parse
from slurm_elastic.controller.daemon import Daemon
from slurm_elastic.controller.metrics.metrics_service import serving
from slurm_elastic.controller.state.ledger import Ledger
from tests.support.controller.fake_controller import FakeLog


def daemon(tmp_path, port):
    path = tmp_path / "elastic.toml"
    path.write_text(f'[metrics]\nlisten = "127.0.0.1:{port}"\n')
    return Daemon(path, FakeLog())


def served(daemon):
    ledger = Ledger(":memory:")
    listen = daemon._config.metrics.listen
    return serving(listen, lambda: daemon._metrics(ledger), daemon._log)


def test_a_starting_selasticd_says_that_it_does_not_act(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with served(daemon(tmp_path, port)):
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read()
    assert b"selastic_active 0.0\n" in text
    assert b"selastic_gpus" not in text


def test_a_taken_port_ends_the_start(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(OSError, match=r"\[metrics\] listen"),
        served(daemon(tmp_path, taken.getsockname()[1])),
    ):
        pass


@pytest.mark.parametrize("listen", [":9341", "9341", "localhost", "localhost:99999"])
def test_an_address_names_host_and_port(listen):
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:9341"):
        parse(f'[metrics]\nlisten = "{listen}"')


def test_without_the_key_nothing_is_served():
    assert parse("").metrics.listen == ""
