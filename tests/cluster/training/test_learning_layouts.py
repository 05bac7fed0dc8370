"""Jobs that are not plainly data parallel grow from MIN to what pays, and give way.

All nodes but one are taken, so that a job can have four GPUs. Debian's torch has no FSDP2 on CPUs:
replicas divide the state of the optimizer in its place, by `overlap="sliced"` or, in a loop of the
script's own whose reports are those of one with `fully_shard`, by ZeroRedundancyOptimizer.
"""

import json
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.container_cluster.selasticd import Daemon, eager_config, running, total_gpus
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

DRIVER = Path(__file__).parents[1] / "drivers" / "slow_layers.py"
STAGE = "/shared/home/alice/layouts"


@pytest.fixture(scope="module")
def daemon(cluster: SlurmCluster, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with running(cluster, eager_config(policy=request.param), reporters=()) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("daemon", "kind", "directive", "least", "layouts"),
    [
        ("goodput", "stages", "2-4,unit=2,parallel=hybrid", 2, ["1x2", "2x2", "1x2"]),
        # The partitioner's choice on so slow links; replicas ("2x1") if it were not asked.
        ("sia", "stages", "1-2,parallel=hybrid", 1, ["1x1", "1x2", "1x1"]),
        ("sia", "loop", "1-2", 1, ["1x1", "2x1", "1x1"]),
    ],
    indirect=["daemon"],
)
def test_a_job_grows_from_min_and_gives_way(
    daemon: Daemon, cluster: SlurmCluster, kind: str, directive: str, least: int, layouts: list[str]
) -> None:
    out = f"{STAGE}/{kind}"
    job, log = start(daemon, cluster, kind, directive)
    assert total_gpus(cluster, job) == least
    until(lambda: total_gpus(cluster, job) == 2 * least, seconds=90, what=log, every_s=1)
    until(lambda: layout(cluster, out) == layouts[1], seconds=60, what=log)
    assert "nothing measured" not in daemon.selastic("explain", str(job))

    rigid = cluster.sbatch("exec sleep 600", f"--gres=gpu:{4 - least}", "-o/dev/null", user="bob")
    cluster.wait(rigid, "RUNNING")
    until(lambda: total_gpus(cluster, job) == least, seconds=60, what=log, every_s=1)
    until(lambda: layout(cluster, out) == layouts[2], seconds=60, what=log)
    cluster.cancel()

    assert layouts_without_a_lost_step(cluster, out) == layouts
    daemon.check_log()


@pytest.mark.parametrize("daemon", ["goodput"], indirect=True)
def test_a_job_stops_at_the_size_that_pays(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Two GPUs are free, then four, with which the exchange of gradients is slow."""
    out = f"{STAGE}/slices"
    options = ("-o/dev/null", "-wg01", "--gres=gpu:2")
    rigid = cluster.sbatch("exec sleep 600", *options, user="bob")
    job, log = start(daemon, cluster, "slices", "1-4")
    assert total_gpus(cluster, job) == 1
    until(lambda: layout(cluster, out) == "2x1", seconds=90, what=log, every_s=1)
    cluster.exec(["scancel", str(rigid)])
    until(lambda: layout(cluster, out) == "4x1", seconds=90, what=log, every_s=1)
    until(lambda: layout(cluster, out) == "2x1", seconds=60, what=log, every_s=1)
    why = "more GPUs would not make it faster"
    until(lambda: why in daemon.selastic("explain", str(job)), seconds=60, what=log, every_s=1)
    assert "none of the 2 a100 that are idle would help" in daemon.selastic("explain", str(job))
    assert total_gpus(cluster, job) == 2

    rigid = cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:3", user="bob")
    cluster.wait(rigid, "RUNNING")
    until(lambda: layout(cluster, out) == "1x1", seconds=60, what=log)
    cluster.cancel()

    layouts = layouts_without_a_lost_step(cluster, out)
    assert layouts == ["1x1", "2x1", "4x1", "2x1", "1x1"]
    daemon.check_log()


def start(
    daemon: Daemon, cluster: SlurmCluster, kind: str, directive: str
) -> tuple[int, Callable[[], str]]:
    """Start a training when all other nodes are taken; return its id, and what returns the logs."""
    out = f"{STAGE}/{kind}"
    cluster.exec(f"rm -rf {out} {out}.log; mkdir -p {STAGE}", user="alice")
    cluster.exec(f"cat >{STAGE}/slow_layers.py", stdin=DRIVER.read_text(), user="alice")
    others = ("-N5", "-wg02,g03,g04,g05,g06", "--ntasks-per-node=1", "--gres=gpu:4")
    cluster.wait(cluster.sbatch("exec sleep 600", "-o/dev/null", *others, user="bob"), "RUNNING")
    job = cluster.sbatch(
        "export OMP_NUM_THREADS=1 SLURM_ELASTIC_BANDWIDTH=1e5,1e5\n"
        f"exec esrun python3 {STAGE}/slow_layers.py {out} {kind}",
        *(f"--elastic={directive}", f"-J{kind}", "-t30", "--open-mode=append"),
        f"--output={out}.log",
    )

    def log() -> str:
        text = cluster.exec(f"cat {out}.log", check=False).stdout
        return f"{kind}:\n{text[-3000:]}\n{daemon.log()[-4000:]}"

    cluster.wait(job, "RUNNING")
    return job, log


def layouts_without_a_lost_step(cluster: SlurmCluster, out: str) -> list[str]:
    """Return the layouts of a job, in order; fail if a step is missing or computed twice."""
    lines = steps(cluster, out)
    numbers = [line["step"] for line in lines]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "a step was lost"
    return [b for a, b in pairwise(["", *(line["layout"] for line in lines)]) if a != b]


def steps(cluster: SlurmCluster, out: str) -> list[dict]:
    """Return the records of a job's steps."""
    text = cluster.exec(f"cat {out}/steps.jsonl 2>/dev/null || true").stdout
    return [json.loads(line) for line in text.splitlines()]


def layout(cluster: SlurmCluster, out: str) -> str:
    """Return the layout of the newest step; "" before the first."""
    lines = steps(cluster, out)
    return lines[-1]["layout"] if lines else ""
