"""Losses of docs/examples/train_gpt.py on the cluster, compared with those of one rank."""

import json

from tests.support.container_cluster.slurm_cluster import SlurmCluster

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
#: Learns so slowly that rounding, which differs from layout to layout, is not blown up by it.
MODEL = "--samples 256 --epochs 400 --global-batch 12 --micro-batch 3 --blocks 2 --tied --rate 3e-4"


def losses(cluster: SlurmCluster, out: str) -> list[dict]:
    """Return the steps that a training has written to `out`, in the order of their ends."""
    text = cluster.exec(f"cat {out}/losses.jsonl 2>/dev/null || true").stdout
    return [json.loads(line) for line in text.splitlines()]


def difference_from_one_rank(cluster: SlurmCluster, out: str) -> float:
    """Check that no step was lost or repeated; return the largest relative difference of a loss.

    Args:
        cluster: the cluster on which one rank trains as many steps.
        out: output of the training.
    """
    walked = losses(cluster, out)
    steps = [line["step"] for line in walked]
    assert steps == list(range(1, len(steps) + 1)), "a step was lost or computed twice"
    cluster.exec(
        f"export OMP_NUM_THREADS=1 EMULATED_DEVICES=/absent\n"
        f"python3 {EXAMPLES}/train_gpt.py --out {out}-alone {MODEL} >/dev/null 2>&1 & pid=$!\n"
        f"until [ $(wc -l <{out}-alone/losses.jsonl || echo 0) -ge {len(steps)} ]; do\n"
        f"  kill -0 $pid || exit 1; sleep 0.2\ndone 2>/dev/null; kill -9 $pid",
        user="alice",
        timeout=300,
    )
    alone = {line["step"]: line["loss"] for line in losses(cluster, f"{out}-alone")}
    return max(abs(line["loss"] / alone[line["step"]] - 1) for line in walked)
