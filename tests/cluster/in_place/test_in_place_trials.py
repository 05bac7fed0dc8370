"""Trainings that fail after a growth in place: they go on without it, and without a requeue."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running, shown
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "failing_when_grown.py"
SCRIPT = "/shared/scratch/failing_when_grown.py"
SIZE = "--samples 1024 --epochs 40 --global-batch 32 --rate 40"
CONFIG = eager_config().replace("[resize]", "[resize]\nmin_gain = 0.01")
#: Ways to fail on four GPUs, with the exit code, and nodes for each: the jobs run side by side.
FAILURES = {"exit": (9, "-Ca100&rack2"), "crash": (139, "-Cv100&rack1")}


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    cluster.exec(f"cat >{SCRIPT}", user="alice", stdin=DRIVER.read_text())
    with running(cluster, CONFIG, reporters=()) as daemon:
        yield daemon


def submit(cluster: SlurmCluster, how: str, place: str, *, keys: str = "") -> tuple[int, str]:
    """Submit a training that fails in this way on four GPUs; return its id and directory."""
    out = f"/shared/home/alice/in-place-trial-{how}"
    cluster.exec(f"rm -rf {out} {out}.log", user="alice")
    job = cluster.sbatch(
        "export OMP_NUM_THREADS=1 SLURM_ELASTIC_CONTROLLER=ctld:7321\n"
        f"exec esrun python3 {SCRIPT} {how} --out {out} {SIZE}",
        *(f"--elastic=1-4,sizes=1:4{keys}", "--gres=gpu:1", "--time=30", place),
        f"--output={out}.log",
    )
    return job, out


def test_they_go_on_without_a_requeue_and_the_shape_is_barred(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    codes, outs = {}, {}
    for how, (code, place) in FAILURES.items():
        job, out = submit(cluster, how, place)
        codes[job], outs[job] = code, out

    def log(job: int) -> str:
        printed = cluster.exec(f"cat {outs[job]}.log 2>&1", check=False).stdout
        rounds = [line for line in daemon.log().splitlines() if "debug: Round" not in line]
        explained = daemon.selastic("explain", str(job), check=False)
        return "\n".join([printed, explained, *rounds])

    def is_barred(job: int, code: int) -> bool:
        answer = daemon.selastic("explain", str(job), "--json", check=False)
        rows = json.loads(answer)["barred"] if answer.startswith("{") else []
        reasons = [row["reason"] for row in rows]
        codes = [(r["code"], r["parameters"]["exit_code"]) for r in reasons]
        barred = [(row["gpus"], *code) for row, code in zip(rows, codes, strict=True)]
        return barred == [(4, "program-failed", code)]

    def has_resumed(job: int) -> bool:
        return re.search(r"resumed from step \d+ with 1 rank.*\nstep", log(job)) is not None

    for job, code in codes.items():
        until(partial(is_barred, job, code), seconds=150, what=partial(log, job))
        explained = daemon.selastic("explain", str(job))
        assert f"`selastic release {job}` allows them again" in explained
    for job, out in outs.items():
        until(partial(has_resumed, job), seconds=120, what=partial(log, job))
        assert shown(cluster, job)["restart_cnt"] == 0
        text = cluster.exec(f"cat {out}.log").stdout
        assert text.count("the program is started again on the GPUs of the job itself") == 1, text
        rows = json.loads(daemon.selastic("history", str(job), "--json"))["changes"]
        changes = [(r["kind"], r["action"], r["outcome"]) for r in rows]
        assert changes == [("in-place", "grow", "failed")]
        companions = cluster.exec("squeue -h -o %k", check=False).stdout
        assert f"selastic:companion:{job}:" not in companions
    daemon.check_log()


def test_companions_that_run_out_of_memory_leave_a_job_that_trains_on(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    job, out = submit(cluster, "memory", FAILURES["exit"][1], keys=",plan=auto")
    daemon.wait_for(rf"JobId={job} OutOfMemory=companion Plan=own GPUs=4", timeout=120)

    def log() -> str:
        return cluster.exec(f"cat {out}.log").stdout

    assert "The ranks of a companion ran out of memory (companion-out-of-memory job=" in log()
    until(
        lambda: re.search(r"the training has 1 ranks from step .*\nstep", log(), re.DOTALL),
        what=log,
    )
    assert shown(cluster, job)["restart_cnt"] == 0
    explained = " ".join(daemon.selastic("explain", str(job)).split())
    cluster.exec(["scancel", str(job)], user="alice")
    cluster.wait(job, "CANCELLED")
    assert "barred" not in explained.lower(), explained
