"""Policy sia on a real cluster: each application ends on the GPU type that suits it.

`typed` trains twice as fast on an a100, `even` equally fast on both (docs/examples/emulate.py). Two
a100 (g01) and three v100 (g03) are free; everything else is taken.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import (
    ADDRESS,
    PYTHON,
    Daemon,
    eager_config,
    held,
    reservations,
    running,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
TYPES = {"g01": "a100", "g03": "v100"}
FILLERS = (
    ("-N4", "-wg02,g04,g05,g06", "--ntasks-per-node=1", "--gres=gpu:4"),
    ("-wg01", "--gres=gpu:a100:2"),
    ("-wg03", "--gres=gpu:v100:1"),
)

#: A report with a number that is none, from the job's own user.
NAN = """
import sys
from slurm_elastic.rpc import frames
report = {"job_id": int(sys.argv[2]), "run": 0, "phase": "training", "gpus": 1,
          "step_time_s": 0.4, "steps_measured": 9, "global_batch": 32, "micro_batch": 32,
          sys.argv[3]: float("nan")}
try:
    frames.call(sys.argv[1], {"v": 1, "op": "report", "report": report}, timeout_s=5)
except frames.RequestRejectedError as error:
    print(error)
"""


def configuration(mode: str) -> str:
    """Return a configuration with policy sia."""
    return eager_config(mode=mode, policy="sia")


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, configuration("observe"), reporters=()) as daemon:
        yield daemon


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


def test_each_application_ends_on_the_type_that_suits_it(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    fillers = [
        cluster.sbatch("exec sleep 600", "-o/dev/null", *options, user="bob") for options in FILLERS
    ]
    for job in fillers:
        cluster.wait(job, "RUNNING")

    # While the controller only observes, a job of each application runs on each type.
    jobs = {(app, k): train(cluster, app, k) for app in ("typed", "even") for k in ("v100", "a100")}
    for job in jobs.values():
        until(lambda job=job: measured(daemon, job), seconds=90, what=f"{job} is not measured")
    assert {key: kind(cluster, job) for key, job in jobs.items()} == {key: key[1] for key in jobs}

    # Those on the type that suits them go; a new controller moves the others, from its ledger.
    typed, even = jobs["typed", "v100"], jobs["even", "a100"]
    gone = [jobs["typed", "a100"], jobs["even", "v100"]]
    cluster.exec(["scancel", *map(str, gone)])
    for job in gone:
        cluster.wait(job, "CANCELLED")
    daemon.stop()
    daemon.start()
    for job in (typed, even):  # it does not move a job from which it has not heard
        until(lambda job=job: measured(daemon, job), what=f"{job} has not reported again")
    daemon.configure(configuration("act"))
    daemon.selastic("reconfigure", user="root")
    until(
        lambda: (kind(cluster, typed), kind(cluster, even)) == ("a100", "v100"),
        seconds=60,
        what=daemon.log,
    )

    # Why, in words and in numbers.
    for job, name in ((typed, "typed"), (even, "even")):
        until(lambda job=job: "would give" in daemon.selastic("explain", str(job)), what=name)
        text = daemon.selastic("explain", str(job))
        for kinds in ("a100", "v100"):
            assert re.search(rf"Learned: .*\d {kinds}: \S+ samples/s ±\d+% \(", text), text
        shown = daemon.selastic("show", str(job))
        assert f"Application={name} Class=strong-scaling Batch=32" in shown
    assert ratio(daemon, typed) > 1.5
    assert ratio(daemon, even) < 1.5  # the configuration says 2

    # A report that cannot be is refused by its name and changes nothing.
    for name in ("step_time_s", "grad_var", "micro_step_s"):
        said = cluster.exec([PYTHON, "-c", NAN, ADDRESS, str(typed), name], user="alice").stdout
        assert f"field {name}: nan is outside" in said
    assert ratio(daemon, typed) > 1.5

    # The knowledge outlives the controller, and the jobs: the next one of its name begins with it.
    daemon.kill()
    daemon.start()
    until(lambda: ratio(daemon, typed) > 1.5)
    until(lambda: 0 < ratio(daemon, even) < 1.5)
    late = train(cluster, "even", "v100", "--begin=now+1hour")
    until(lambda: 0 < ratio(daemon, late) < 1.5)
    assert "nothing measured yet" in daemon.selastic("explain", str(late))
    until(
        lambda: (kind(cluster, typed), kind(cluster, even)) == ("a100", "v100"),
        what=daemon.log,
    )
    daemon.check_log()
    cluster.cancel()
    until(lambda: not reservations(cluster), what="reservations are left")
