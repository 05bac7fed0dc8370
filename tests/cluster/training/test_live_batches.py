"""Batches of a running training change with `batch=MIN-MAX`, under goodput and elastic_batch.

All GPUs but four a100 are taken. The training synchronises for 25 ms a step on two GPUs or more
(docs/examples/emulate.py), so that larger batches are faster there.
"""

import json
from collections import Counter, defaultdict

import pytest

from tests.support.container_cluster.selasticd import eager_config, running, total_gpus
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
SAMPLES, LEAST, MOST = 4096, 32, 256


@pytest.mark.parametrize(
    ("policy", "extra"), [("goodput", ""), ("elastic_batch", "[elastic_batch]\ninterval_s = 10\n")]
)
def test_a_running_job_gets_more_gpus_and_a_larger_batch(
    cluster: SlurmCluster, policy: str, extra: str
) -> None:
    out = f"/shared/home/alice/batch-{policy}"
    cluster.exec(f"rm -rf {out} {out}.log", user="alice")
    others = ("-N5", "-wg02,g03,g04,g05,g06", "--ntasks-per-node=1", "--gres=gpu:4")
    cluster.wait(cluster.sbatch("exec sleep 600", "-o/dev/null", *others, user="bob"), "RUNNING")
    with running(cluster, eager_config(policy=policy, extra=extra), reporters=()) as daemon:
        job = cluster.sbatch(
            "export OMP_NUM_THREADS=1\n"
            f"exec esrun python3 {EXAMPLES}/train_library.py --out {out} --samples {SAMPLES}"
            f" --epochs 1000 --global-batch {LEAST} --rate 160 --communication 5"
            " --checkpoint-every 3",
            *(f"--elastic=1-4,types=a100,batch={LEAST}-{MOST}", "--gres=gpu:a100:1", "-t30"),
            *("--requeue", "--open-mode=append", f"--output={out}.log", f"-J{policy}"),
        )

        def log() -> str:
            text = cluster.exec(f"tail -c 3000 {out}.log", check=False).stdout
            explained = daemon.selastic("explain", str(job), check=False)
            return f"{explained}\n{sizes(cluster, out)[-5:]}\n{text}\n{daemon.log()[-3000:]}"

        until(lambda: total_gpus(cluster, job) > 1, seconds=90, what=log)
        until(lambda: max(sizes(cluster, out), default=0) >= 2 * LEAST, seconds=90, what=log)
        steps = indices(cluster, out)  # before a rank is killed between a step and its line
        cluster.cancel()
        daemon.check_log()

    assert sorted(steps) == list(range(min(steps), min(steps) + len(steps))), "a step was lost"
    trained: dict[int, Counter[int]] = defaultdict(Counter)
    for epoch, samples in steps.values():
        trained[epoch].update(samples)
    for epoch, times in trained.items():
        assert max(times.values()) == 1, f"a sample came twice in epoch {epoch}"
        assert epoch == max(trained) or len(times) == SAMPLES, f"samples missed in epoch {epoch}"


def indices(cluster: SlurmCluster, out: str) -> dict[int, tuple[int, list[int]]]:
    """Return epoch and samples of each step; of a repeated one what was trained last."""
    text = cluster.exec(f"grep -H . {out}/samples-rank*.jsonl 2>/dev/null || true").stdout
    rows: dict[int, dict[int, dict]] = defaultdict(dict)
    for line in text.splitlines():
        path, _, row = line.partition(":")
        if row.endswith("}"):
            step = json.loads(row)
            rank = int(path.removesuffix(".jsonl").rpartition("-rank")[2])
            rows[step["step"]][rank] = step
    # The last lines of ranks may come later than that of rank 0.
    whole: dict[int, dict[int, dict]] = {}
    for number, ranks in rows.items():
        last = {k: ranks[k] for k in range(ranks.get(0, {"world": 0})["world"]) if k in ranks}
        if last and len(last) == last[0]["world"]:
            whole[number] = last
    return {
        step: (ranks[0]["epoch"], [i for k in sorted(ranks) for i in ranks[k]["indices"]])
        for step, ranks in whole.items()
    }


def sizes(cluster: SlurmCluster, out: str) -> list[int]:
    """Return the batch of each step."""
    return [len(samples) for _, (_, samples) in sorted(indices(cluster, out).items())]
