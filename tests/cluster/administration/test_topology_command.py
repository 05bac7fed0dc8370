"""`selastic topology` on the real switch tree, with jobs that share links."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

NETWORK = """
[topology]
speeds = { rack = 200, spine = 100.0 }
uplinks = { g03 = 40, g99 = 40 }
domains = { a100 = 2 }
"""
SLEEP = "exec sleep 300"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(mode="observe", extra=NETWORK), reporters=()) as daemon:
        yield daemon


@pytest.fixture
def jobs(cluster: SlurmCluster) -> tuple[int, int, int]:
    """Submit an elastic job on g01 and two rigid ones, each on g04 and a node of another rack."""
    elastic = cluster.sbatch(SLEEP, "--elastic=1-4", "-w", "g01", "-o/dev/null")
    wide = ["-N2", "--ntasks-per-node=1", "-o/dev/null"]
    first = cluster.sbatch(SLEEP, "--gres=gpu:a100:2", "-w", "g01,g04", *wide, user="bob")
    other = cluster.sbatch(SLEEP, "--gres=gpu:a100:1", "-w", "g02,g04", *wide, user="bob")
    for job in (elastic, first, other):
        cluster.wait(job, "RUNNING")
    return elastic, first, other


def _answer(daemon: Daemon) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(daemon.selastic("topology", "--json"))
    return found


def test_the_real_tree_with_who_sits_where_and_who_shares_which_link(
    daemon: Daemon, jobs: tuple[int, int, int]
) -> None:
    elastic, first, other = jobs
    names = {str(j) for j in jobs}
    until(lambda: names <= {j["display_id"] for j in _answer(daemon)["jobs"]})
    answer = _answer(daemon)

    switches = {s["name"]: s for s in answer["switches"]}
    assert {n: s["parent"] for n, s in switches.items()} == {
        "spine": "", "rack1": "spine", "rack2": "spine",
    }  # fmt: skip
    assert switches["rack1"]["users"] == [str(first), str(other)]
    assert switches["rack1"]["gbit_s"] == 100
    nodes = {n["name"]: n for n in answer["nodes"]}
    assert sorted(nodes) == [f"g0{i}" for i in range(1, 7)]
    assert [n["switch"] for n in nodes.values()] == ["rack1"] * 3 + ["rack2"] * 3
    assert nodes["g01"]["domains"] == [[0, 1], [2, 3]]
    assert nodes["g05"]["domains"] == []
    assert (nodes["g03"]["gbit_s"], nodes["g04"]["gbit_s"]) == (40, 200)
    devices = [d for h in nodes["g01"]["holders"] for d in h["devices"]]
    assert len(devices) == len({*devices}) == 3

    rows = {j["job_id"]: j for j in answer["jobs"]}
    assert rows[elastic]["tier"] == "domain"
    assert (rows[first]["tier"], rows[first]["node_count"], rows[first]["rack_count"]) == (
        "spine", 2, 2,
    )  # fmt: skip
    assert rows[first]["shared"] == ["g04", "switch:rack1", "switch:rack2"]
    assert answer["notes"] == [
        "[topology] uplinks: g99 is neither a node nor a switch; correct or remove it"
    ]


def test_people_read_it_and_check_tells_what_is_wrong(
    daemon: Daemon, jobs: tuple[int, int, int]
) -> None:
    elastic, first, other = jobs
    until(lambda: f"{other}: 1" in daemon.selastic("topology"))
    text = daemon.selastic("topology")
    assert "LINKS   inside a rack 200 Gbit/s   between racks 100 Gbit/s\nspine\n" in text
    assert f"  rack1   up 100 Gbit/s   crossed by {first} and {other}\n" in text
    (table,) = [line for line in text.splitlines() if line.split()[:1] == [str(elastic)]]
    assert "rack1:g01" in table
    rigid = daemon.selastic("topology", "-a", "-P", "-h", "-o", "jobid,tier,shares")
    assert f"{first}|spine|g04 with {other} (100 Gbit/s each), rack[1-2] with" in rigid
    assert "uplinks: g99 is neither" in daemon.selastic("check", check=False)


def test_a_picture_where_matplotlib_is_and_a_clear_line_where_not(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    python = "/opt/slurm-elastic/bin/python -c 'import matplotlib'"
    there = cluster.exec(python, check=False).returncode == 0
    said = daemon.selastic("topology", "--plot", "/tmp/network.svg", check=False)
    assert ("spine" in said) is there
    assert ("--plot needs matplotlib: python3 -m pip install" in said) is not there


def test_a_broken_speed_changes_nothing(daemon: Daemon, cluster: SlurmCluster) -> None:
    good = eager_config(mode="observe", extra=NETWORK)
    daemon.configure(good.replace("rack = 200", "rack = -1"))
    try:
        done = cluster.exec(["selastic", "reconfigure"], user="selastic", check=False)
        assert done.returncode == 1
        assert ": speeds of rack = -1 is invalid: expected 1e-06 to 1000000" in done.stderr
        assert _answer(daemon)["speeds"] == {"rack": 200.0, "spine": 100.0}
    finally:
        daemon.configure(good)
    said = cluster.exec(["selastic", "reconfigure"], user="selastic").stdout
    assert "uplinks: g99 is neither a node nor a switch" in said
