"""Trainings that fail after a growth in place: they go on without it, and without a requeue."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "failing_when_grown.py"
SCRIPT = "/shared/scratch/failing_when_grown.py"
SIZE = "--samples 1024 --epochs 40 --global-batch 32 --rate 40"
CONFIG = eager_config().replace("[resize]", "[resize]\nmin_gain = 0.01")
#: Node with the GPUs of a test: rack 2's a100.
PLACE = "-Ca100&rack2"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(f"cat >{SCRIPT}", user="alice", stdin=DRIVER.read_text())
    with running(cluster, CONFIG, reporters=()) as daemon:
        yield daemon


def submit(cluster: SlurmCluster, how: str) -> tuple[int, str]:
    """Submit a training that fails in this way on four GPUs; return its id and directory."""
    out = f"/shared/home/alice/in-place-trial-{how}"
    cluster.exec(f"rm -rf {out} {out}.log", user="alice")
    job = cluster.sbatch(
        "export OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
        f"exec esrun python3 {SCRIPT} {how} --out {out} {SIZE}",
        *("--elastic=1-4,sizes=1:4", "--gres=gpu:1", "--time=30", PLACE, f"--output={out}.log"),
    )
    return job, out


@pytest.mark.parametrize(("how", "code"), [("exit", 9), ("crash", 139)])
def test_it_goes_on_without_a_requeue_and_the_shape_is_barred(
    daemon: Daemon, cluster: SlurmCluster, how: str, code: int
) -> None:
    job, out = submit(cluster, how)

    def log() -> str:
        printed = cluster.exec(f"cat {out}.log 2>&1", check=False).stdout
        rounds = [line for line in daemon.log().splitlines() if "debug: Round" not in line]
        explained = daemon.selastic("explain", str(job), check=False)
        return "\n".join([printed, explained, *rounds])

    def barred() -> list[tuple[int, str, int]]:
        answer = daemon.selastic("explain", str(job), "--json", check=False)
        rows = json.loads(answer)["barred"] if answer.startswith("{") else []
        reasons = [row["reason"] for row in rows]
        codes = [(r["code"], r["parameters"]["exit_code"]) for r in reasons]
        return [(row["gpus"], *code) for row, code in zip(rows, codes, strict=True)]

    until(lambda: barred() == [(4, "program-failed", code)], seconds=150, what=log)
    explained = daemon.selastic("explain", str(job))
    assert f"`selastic release {job}` allows them again" in explained
    until(
        lambda: re.search(r"resumed from step \d+ with 1 rank.*\nstep", log()),
        seconds=120,
        what=log,
    )
    assert shown(cluster, job)["restart_cnt"] == 0
    text = cluster.exec(f"cat {out}.log").stdout
    assert text.count("the program is started again on the GPUs of the job itself") == 1, text
    rows = json.loads(daemon.selastic("history", str(job), "--json"))["changes"]
    assert [(r["kind"], r["action"], r["outcome"]) for r in rows] == [
        ("in-place", "grow", "failed")
    ]
    companions = cluster.exec("squeue -h -o %k", check=False).stdout
    assert f"selastic:companion:{job}:" not in companions
    daemon.check_log()
