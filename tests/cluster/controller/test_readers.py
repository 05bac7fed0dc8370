"""Both readers of slurmctld, pyslurm and JSON, make the same snapshot of a cluster."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import PYTHON, Daemon, eager_config, gpus, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "compare_readers.py"
PLACE = "/shared/scratch/compare_readers.py"
#: Goes on until it is killed, after some seconds in which Slurm shows it as completing.
SLOW = "trap 'sleep 8; exit 0' TERM\nsleep 600 & wait\n"
RESERVATION = "ReservationName=others Users=bob Nodes=g06 StartTime=now+2hours Duration=10"


@pytest.fixture
def site(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    if cluster.exec([PYTHON, "-c", "import pyslurm"], check=False).returncode:
        pytest.skip("the cluster has no pyslurm for its Slurm: see `cluster up --pyslurm`")
    cluster.exec(f"cat >{PLACE}", stdin=DRIVER.read_text())
    yield cluster
    cluster.exec("scontrol delete ReservationName=others", check=False)
    cluster.exec("scontrol update NodeName=g04 State=resume", check=False)
    cluster.exec("scancel -u alice; rm -f /tmp/readers.sh")
    cluster.cancel()
    cluster.exec(f"rm -f {PLACE}")


def differences(cluster: SlurmCluster) -> dict[str, Any]:
    """Return the output of the driver."""
    printed: dict[str, Any] = json.loads(
        cluster.exec([PYTHON, PLACE], user="selastic").stdout.strip().splitlines()[-1]
    )
    return printed


def test_both_readers_see_the_same(site: SlurmCluster) -> None:
    submit = site.sbatch
    running = submit(SLOW, "--gres=gpu:2", '--comment=a "b" \\ c')
    site.wait(running, "RUNNING")
    submit(SLOW, "--array=0-5%2", "--gres=gpu:1")
    submit(SLOW, "-N2", "--gres=gpu:v100:2", "--mem-per-cpu=10", "-t", "30")
    submit(SLOW, "-n3", "--gpus-per-task=1", "--mem-per-gpu=50")
    submit(SLOW, "--hold", "--gpus=4", "-N2")
    submit(SLOW, "--begin=now+1hour", "-x", "g01", "--nice=7", "-C", "a100", "--gres=gpu:1")
    submit(SLOW, "-w", "g02", f"--dependency=afterany:{running}", "--gres=gpu:1")
    submit(SLOW, "--elastic=1-4", "--gres=gpu:1")
    failed = submit("exit 3")
    killed = submit("kill -9 $$")
    stopped = submit(SLOW, "--gres=gpu:1")
    ending = submit(SLOW, "--gres=gpu:1")
    site.exec(
        "printf '#!/bin/bash\\nsleep 600\\n' | sbatch -o /dev/null --gres=gpu:1"
        " -J $'no\\xff\\xfetext' --comment=$'\\xe9'",
        user="alice",
    )
    site.exec(
        "printf '#!/bin/bash\\nsleep 600\\n' >/tmp/readers.sh;"
        " sbatch -o /dev/null --gres=gpu:1 : --gres=gpu:1 /tmp/readers.sh",
        user="alice",
    )
    site.exec(f"scontrol create reservation {RESERVATION} 'Comment=of others, a=b'")
    site.exec("scontrol update NodeName=g04 State=drain Reason='by hand'")
    site.wait(failed, "FAILED")
    site.wait(killed, "FAILED")
    site.wait(stopped, "RUNNING")
    site.wait(ending, "RUNNING")
    site.exec(f"scontrol suspend {stopped}")
    site.exec(f"scancel {ending}")
    printed = differences(site)
    assert printed["differences"] == []
    assert printed["jobs"] >= 14
    # The end of a suspended job moves on each second, perhaps between the two readers.
    until(
        lambda: differences(site)["some"] == [[], []],
        what="jobs that are read by themselves differ",
    )


@pytest.fixture
def json_daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(extra='reader = "json"\n')) as daemon:
        yield daemon


def test_jobs_grow_and_give_way_without_pyslurm(json_daemon: Daemon, cluster: SlurmCluster) -> None:
    assert 'reads slurmctld through json ([slurm] reader = "json")' in json_daemon.selastic("ping")
    sleep = "exec sleep 600"
    first = cluster.sbatch(sleep, "--gres=gpu:a100:4", "-w", "g04", "-o/dev/null", user="bob")
    cluster.wait(first, "RUNNING")
    options = ("--elastic=1-8,types=a100", "--gres=gpu:a100:1", "-o/dev/null")
    job = cluster.sbatch(sleep, *options)
    until(lambda: gpus(cluster, job) == 8)
    second = cluster.sbatch(sleep, "--gres=gpu:a100:4", "-o/dev/null", user="bob")
    cluster.wait(second, "RUNNING", timeout=20)
    until(lambda: gpus(cluster, job) == 4)
