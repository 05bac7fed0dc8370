"""A job changes its layout, by stages and replicas, as the controller orders."""

import json
from collections.abc import Iterator
from itertools import pairwise
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

PACED = Path(__file__).parents[1] / "drivers" / "paced.py"
#: Of each step, so that the number of steps, over which rounding adds up, does not follow the load.
STEP_S = 0.5
#: (GPUs, plan): unlike sizes and like ones, interleaved, shared weights, divided state, and back.
WALK = [
    (4, "2x2+shard=optimizer"), (3, "1x3"), (3, "3x1"), (2, "1x2x2"),
    (2, "1x1+tensor=2+recompute"), (4, "2x1+tensor=2"), (4, "4x1+shard=optimizer"),
    (4, "2x1+tensor=2+shard=full"), (1, "1x1"),
]  # fmt: skip
OUT = "/shared/home/alice/hybrid"


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, eager_config(), reporters=()) as daemon:
        yield daemon


def test_the_controller_walks_a_job_over_layouts(cluster: SlurmCluster, daemon: Daemon) -> None:
    cluster.exec(f"rm -rf {OUT} {OUT}.log {OUT}-*; mkdir {OUT}-paced", user="alice")
    cluster.exec(f"cat >{OUT}-paced/train_gpt.py", stdin=PACED.read_text(), user="alice")
    job = cluster.sbatch(
        f"export OMP_NUM_THREADS=1 REAL_EXAMPLES={EXAMPLES} STEP_S={STEP_S}\n"
        f"exec esrun python3 {OUT}-paced/train_gpt.py --out {OUT} {MODEL} --checkpoint-every 2",
        *("--elastic=1,parallel=hybrid", "-Jgpt", "-t30", f"--output={OUT}.log"),
    )
    for count, layout in [(1, "1x1"), *WALK]:
        if count > 1 or layout != "1x1" or losses(cluster, OUT):
            change = (f"--elastic={count},parallel=hybrid", "--layout", layout)
            daemon.selastic("update", str(job), *change)

        def arrived(layout: str = layout.partition("+")[0]) -> bool:
            return [line["layout"] for line in losses(cluster, OUT)[-3:]] == [layout] * 3

        log = f"not at {layout}: see {OUT}.log"
        until(arrived, seconds=90, what=log)
        assert total_gpus(cluster, job) == count

    def shown() -> bool:
        running = json.loads(daemon.selastic("show", str(job), "--json"))["running"]
        return bool(running) and running["layout"] == "1x1"

    until(shown, what="show does not tell the layout")
    cluster.exec(["scancel", str(job)], user="alice")
    cluster.wait(job, "CANCELLED")

    walked = losses(cluster, OUT)
    layouts = [line["layout"] for line in walked]
    expected = ["1x1", *(plan.partition("+")[0] for _, plan in WALK)]
    assert [b for a, b in pairwise(["", *layouts]) if a != b] == expected
    log = cluster.exec(f"cat {OUT}.log").stdout
    for plan in (plan for _, plan in WALK if "+" in plan):
        assert f"plan {plan}, as ordered" in log
    assert "tensor=2: 4 layers are divided among 2 ranks" in log
    # Debian's torch divides no parameters: the other four plans with options take effect.
    assert log.count("every replica holds the whole model") == 1
    worst = difference_from_one_rank(cluster, OUT)
    print(f"{len(walked)} steps over {len(WALK) + 1} layouts, losses within {worst:.1e}")
    assert worst < 1e-6
