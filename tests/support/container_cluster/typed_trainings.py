"""Trainings of two applications on the two GPU types of the test cluster.

`typed` trains twice as fast on an a100, `even` equally fast on both (docs/examples/emulate.py).
"""

import json
from typing import Any

from tests.support.container_cluster.selasticd import Daemon, held
from tests.support.container_cluster.slurm_cluster import SlurmCluster

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
TYPES = {"g01": "a100", "g03": "v100"}
#: What takes all GPUs but two a100 (g01) and three v100 (g03).
FILLERS = (
    ("-N4", "-wg02,g04,g05,g06", "--ntasks-per-node=1", "--gres=gpu:4"),
    ("-wg01", "--gres=gpu:a100:2"),
    ("-wg03", "--gres=gpu:v100:1"),
)


def fill_up(cluster: SlurmCluster) -> None:
    """Leave two a100 and three v100 free."""
    jobs = [
        cluster.sbatch("exec sleep 600", "-o/dev/null", *options, user="bob") for options in FILLERS
    ]
    for job in jobs:
        cluster.wait(job, "RUNNING")


def train(cluster: SlurmCluster, application: str, kind: str, *options: str) -> int:
    """Submit a training on one GPU of this type, with up to two of any."""
    other = {"a100": "v100", "v100": "a100"}[kind]
    out = f"/shared/home/alice/sia-{application}-{kind}"
    cluster.exec(f"rm -rf {out} {out}.log", user="alice")
    return cluster.sbatch(
        f"export OMP_NUM_THREADS=1\n"
        f"exec esrun python3 {EXAMPLES}/train_library.py --out {out} --app {application}"
        f" --samples 4096 --epochs 1000 --global-batch 32 --rate 40 --checkpoint-every 3",
        *(f"--elastic=1-2,types={kind}:{other}", f"--gres=gpu:{kind}:1", f"-J{application}"),
        *("-t30", "--requeue", "--open-mode=append", f"--output={out}.log", *options),
    )


def explained(daemon: Daemon, job: int) -> dict[str, Any]:
    """Return the answer of `selastic explain`; {} while the job is unknown."""
    text = daemon.selastic("explain", str(job), "--json", check=False)
    return json.loads(text) if text.startswith("{") else {}


def ratio(daemon: Daemon, job: int) -> float:
    """Return the speed on an a100 over that on a v100 by the job's model; 0 while there is none."""
    model = explained(daemon, job).get("model") or {"types": []}
    speed = {t["gpu_type"]: t["goodput"] for t in model["types"]}
    return speed["a100"] / speed["v100"] if len(speed) == 2 else 0.0


def measured(daemon: Daemon, job: int) -> bool:
    """Return whether the job has reported, and may be moved."""
    found = explained(daemon, job)
    return bool(found and found["proven"] and found["model"] and found["model"]["observed"])


def kind(cluster: SlurmCluster, job: int) -> str:
    """Return the GPU type on which a job runs, "" while it does not."""
    return "".join({TYPES[node] for node in held(cluster, job)})
