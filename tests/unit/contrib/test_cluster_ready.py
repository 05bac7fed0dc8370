"""How `contrib/cluster/cluster up` learns that all nodes are usable."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.container_cluster.slurm_cluster import CLUSTER_DIR  # puts clusterlib on the path

# isort: split

from clusterlib import lifecycle
from clusterlib.layout import Layout
from clusterlib.progress import Task

assert CLUSTER_DIR.is_dir()


@pytest.fixture
def ctld(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a `sinfo` that prints the file `states`; it stands for the container."""
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(f"#!/bin/sh\ncat {tmp_path}/states\n")
    sinfo.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def attempt(*command: str) -> subprocess.CompletedProcess[str]:
        script = command[-1].replace("/run/cluster-ready", f"{tmp_path}/ready")
        script = script.replace("sleep 0.5", ":")
        return subprocess.run(
            ["sh", "-c", script], env=environment, capture_output=True, text=True, check=False
        )

    monkeypatch.setattr(lifecycle, "attempt", attempt)
    monkeypatch.setattr(lifecycle, "READY_WITHIN", 0.1)
    return tmp_path


def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the output until all three nodes are ready, or too much time has passed."""
    shown: list[str] = []
    progress = Task("nodes")
    monkeypatch.setattr(progress, "detail", shown.append)
    monkeypatch.setattr(lifecycle, "_check_alive", lambda _: None)
    with pytest.raises(lifecycle.ClusterError, match="not all nodes are ready"):
        lifecycle._wait_until_ready("c", Layout(nodes=3), progress)
    return shown


def test_all_nodes_are_usable(ctld: Path) -> None:
    (ctld / "ready").touch()
    (ctld / "states").write_text("idle\nmixed\ndrained\n")
    lifecycle._wait_until_ready("c", Layout(nodes=3), Task("nodes"))


def test_a_node_that_does_not_answer_is_waited_for(
    ctld: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ctld / "ready").touch()
    (ctld / "states").write_text("idle\nidle*\nunknown\n")
    assert looked(monkeypatch)[0] == "1 of 3 ready"


def test_accounts_are_not_made_yet(ctld: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (ctld / "states").write_text("idle\nidle\nidle\n")
    assert looked(monkeypatch)[0] == "0 of 3 ready"
