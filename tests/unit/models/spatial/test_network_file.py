"""A network on volumes is read as it was written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from benchmarks.spatial.networks import UNet3d, cosmoflow  # noqa: E402
from slurm_elastic.models.spatial.network_file import network_json, read_network  # noqa: E402
from slurm_elastic.training.spatial.network_trace import trace_network  # noqa: E402


@pytest.mark.parametrize(("make", "channels"), [(lambda: cosmoflow(64), 4), (UNet3d, 1)])
def test_a_traced_network_survives_its_file(tmp_path: Path, make, channels: int) -> None:
    with torch.device("meta"):
        network = trace_network(make(), channels, (64,) * 3)
    path = tmp_path / "net.json"
    path.write_text(json.dumps(network_json(network)))
    assert read_network(path) == network


def test_other_files_are_none(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for text in ("", "node1 -- Linear", "[1]", '{"layers": []}'):
        path.write_text(text)
        assert read_network(path) is None
    assert read_network(tmp_path / "missing") is None
