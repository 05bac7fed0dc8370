"""The controller tries execution plans of a job, and keeps the fastest for its GPUs."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running, total_gpus
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until
from tests.support.container_cluster.walked_training import (
    EXAMPLES,
    MODEL,
    difference_from_one_rank,
    losses,
)

DRIVER = Path(__file__).parents[1] / "drivers" / "plan_paced.py"
OUT = "/shared/home/alice/plans"
#: Seconds per step as reported; 0: the program fails; "memory": it runs out of memory.
PACE = {
    "2x1": 1.6, "1x1+tensor=2": 0.6, "4x1": 1.6, "2x1+tensor=2": 0.6, "1x1+tensor=4": 0,
    "2x1+tensor=2+shard=optimizer": 0.3, "1x1": "memory",
}  # fmt: skip


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    # Restarts, of the length that the driver reports, may take as long as training here: all plans
    # are tried within a test.
    with running(cluster, eager_config(plan_trials=1), reporters=()) as daemon:
        yield daemon


def test_the_controller_keeps_the_fastest_plan_of_each_size(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    cluster.exec(f"rm -rf {OUT} {OUT}.log {OUT}-*; mkdir {OUT}-paced", user="alice")
    cluster.exec(f"cat >{OUT}-paced/plan_paced.py", stdin=DRIVER.read_text(), user="alice")
    job = cluster.sbatch(
        f"export OMP_NUM_THREADS=1 REAL_EXAMPLES={EXAMPLES} PACE='{json.dumps(PACE)}'\n"
        f"exec esrun python3 {OUT}-paced/plan_paced.py --out {OUT} {MODEL} --checkpoint-every 10",
        *("--elastic=2,plan=auto", "-Jgpt", "-t30", f"--output={OUT}.log", "-Ca100"),
    )

    def plans() -> dict:
        text = daemon.selastic("explain", str(job), "--json", check=False)
        answer = json.loads(text) if text.startswith("{") else {}  # the job is not known yet
        return answer.get("plans") or {"ordered": "", "measured": []}

    def measured(answer: dict, gpus: int) -> dict[str, float]:
        rows = answer["measured"]
        return {r["plan"]: r["samples_per_s"] for r in rows if r["gpus"] == gpus}

    def settled(gpus: int, best: str) -> bool:
        answer = plans()
        return {"", best} <= measured(answer, gpus).keys() and answer["ordered"] == best

    def log() -> str:
        return cluster.exec(f"cat {OUT}.log").stdout

    # The log, which costs little to read, tells when the order is given.
    daemon.wait_for(rf"JobId={job} Plan=1x1\+tensor=2 GPUs=2", timeout=150)
    until(lambda: settled(2, "1x1+tensor=2"), seconds=150, what=log, every_s=3)
    speeds = measured(plans(), 2)
    assert speeds["1x1+tensor=2"] > 1.2 * speeds[""]
    assert "1x1+tensor=2 is ordered; samples measured here" in " ".join(
        daemon.selastic("explain", str(job)).split()
    )

    daemon.selastic("update", str(job), "--elastic=4,plan=auto")
    until(lambda: total_gpus(cluster, job) == 4, seconds=60, what="it does not grow")
    failure = "out of memory in plan 1x1+tensor=4"
    until(lambda: failure in log(), seconds=200, what=log)
    best = "2x1+tensor=2+shard=optimizer"
    until(lambda: settled(4, best), what=log, every_s=3)
    before = len(losses(cluster, OUT))
    until(lambda: len(losses(cluster, OUT)) > before + 3, what=log)
    cluster.exec(["scancel", str(job)], user="alice")
    cluster.wait(job, "CANCELLED")

    orders = [line.partition("plan ")[2] for line in log().splitlines() if "as ordered" in line]
    # With more GPUs it begins with the kind of plan that was fastest on fewer, and compares that
    # with its own choice before it tries others.
    assert [order.partition(",")[0] for order in orders] == [
        "1x1+tensor=2", "2x1+tensor=2", "2x1+tensor=2", best, "1x1+tensor=4", best,
    ]  # fmt: skip
    walked = losses(cluster, OUT)
    assert walked[0]["layout"] == "2x1", "the job begins with its own choice"
    worst = difference_from_one_rank(cluster, OUT)
    print(f"{len(walked)} steps over {len(orders)} orders, losses within {worst:.1e}")
    assert worst < 1e-5


def test_a_first_start_that_lacks_memory_goes_on_in_a_plan_that_needs_less(
    cluster: SlurmCluster, daemon: Daemon
) -> None:
    out = f"{OUT}-small"
    cluster.exec(f"rm -rf {out} {out}.log {out}-*; mkdir {out}-paced", user="alice")
    cluster.exec(f"cat >{out}-paced/plan_paced.py", stdin=DRIVER.read_text(), user="alice")
    job = cluster.sbatch(
        f"export OMP_NUM_THREADS=1 REAL_EXAMPLES={EXAMPLES} PACE='{json.dumps(PACE)}'\n"
        f"exec esrun python3 {out}-paced/plan_paced.py --out {out} {MODEL}",
        *("--elastic=1,plan=auto", "-Jsmall", "-t30", f"--output={out}.log", "-Ca100"),
    )

    def log() -> str:
        return cluster.exec(f"cat {out}.log").stdout

    daemon.wait_for(rf"JobId={job} OutOfMemory=yes Plan=1x1\+\S+ GPUs=1", timeout=120)
    until(lambda: len(losses(cluster, out)) > 3, seconds=120, what=log)
    explained = " ".join(daemon.selastic("explain", str(job)).split())
    assert "out of memory here: own choice" in explained, explained
    cluster.exec(["scancel", str(job)], user="alice")
    cluster.wait(job, "CANCELLED")
    assert "ran out of memory: asking the controller for another plan" in log()
    assert difference_from_one_rank(cluster, out) < 1e-5
