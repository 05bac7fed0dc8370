"""Policy icefrog on a real cluster: GPUs that a frozen job no longer needs go to another job.

Two pairs of equal jobs side by side, one on v100, one on a100, which are equally fast here. In each
A holds 4 GPUs on two nodes, and B 2 on one. In the first A freezes up to twelve of its fifteen
layers, after which 4 GPUs gain it next to nothing over 2; the second, with nothing frozen, shows
what happens without.
"""

import json
import math
import re
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from tests.support.container_cluster.selasticd import (
    Daemon,
    eager_config,
    reservations,
    running,
    total_gpus,
)
from tests.support.container_cluster.slurm_cluster import (
    WAIT_FACTOR,
    SlurmCluster,
    cluster_name,
    temporary_cluster,
    until,
)

#: Its ranks need most of a core: beside other clusters the times would be theirs.
pytestmark = pytest.mark.alone

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
HOME = "/shared/home/alice/icefrog"
#: Both types alike; only a job of several nodes has to communicate for long.
DEVICES = """
[speed]
v100 = 1.0
a100 = 1.0
[communication]
node = 0.003
rack = 0.05
spine = 0.05
"""
MIN, MAX = 1, 4
MAX_PENALTY = 0.02
#: Both jobs of a pair would need about as long if nobody froze.
EPOCHS = {"A": 22, "B": 18}
GPUS = {"A": 4, "B": 2}
GPUS_PER_NODE = 2  # half of what other tests have: half the ranks for the same decisions


def configuration(mode: str) -> str:
    """Return a configuration with policy icefrog, in which jobs of a name share observations."""
    return eager_config(mode=mode, policy="icefrog", extra="[sia]\nshare = true\n")


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with temporary_cluster(
        f"{cluster_name()}-icefrog", f"--gpus-per-node={GPUS_PER_NODE}"
    ) as cluster:
        yield cluster


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, configuration("observe"), reporters=()) as daemon:
        yield daemon


def train(
    cluster: SlurmCluster,
    name: str,
    kind: str,
    gpus: int,
    epochs: int,
    more: str = "",
    *options: str,
) -> int:
    """Submit a training; all are of one application, named by the job."""
    out = f"{HOME}/{name}-{kind}"
    nodes = max(1, gpus // GPUS_PER_NODE)
    return cluster.sbatch(
        f"export OMP_NUM_THREADS=1 EMULATED_DEVICES={HOME}/devices.toml\n"
        f"exec esrun python3 {EXAMPLES}/train_library.py --out {out} --settled 12 --app even"
        f" --samples 512 --epochs {epochs} --global-batch 32 --rate 50",
        *(f"--elastic={MIN}-{MAX},types={kind}{more}", f"-N{nodes}", "-Jsettled", "-t30"),
        *(f"--gres=gpu:{kind}:{gpus // nodes}", "--requeue", "--open-mode=append"),
        *(f"--output={out}.log", *options),
    )


def measured(daemon: Daemon, job: int) -> bool:
    """Return whether the job's step times have been reported."""
    text = daemon.selastic("explain", str(job), "--json", check=False)
    model = json.loads(text).get("model") if text.startswith("{") else None
    return bool(model and model["observed"])


def ended(cluster: SlurmCluster, job: int) -> float:
    """Return the end of a job (epoch s), from accounting."""
    command = ["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "State,End"]
    found: list[str] = []

    def known() -> bool:
        found[:] = cluster.exec(command).stdout.strip().split("|")
        return found[0] == "COMPLETED" and found[1] != "Unknown"

    until(known, what=lambda: f"{job}: accounting says {found}")
    return datetime.fromisoformat(found[1]).timestamp()


def losses(cluster: SlurmCluster, name: str, kind: str) -> list[float]:
    """Return the loss of every step, in order."""
    lines = cluster.exec(f"cat {HOME}/{name}-{kind}/losses.jsonl").stdout.splitlines()
    steps = {line["step"]: line["loss"] for line in map(json.loads, lines)}
    assert sorted(steps) == list(range(min(steps), min(steps) + 16 * EPOCHS[name]))
    return [steps[step] for step in sorted(steps)]


def descent(run: list[float]) -> float:
    """Return the first epoch's mean loss less the last one's."""
    return sum(run[:16]) / 16 - sum(run[-16:]) / 16


def test_what_a_frozen_job_frees_goes_to_its_neighbour(
    daemon: Daemon, cluster: SlurmCluster
) -> None:
    cluster.exec(
        f"rm -rf {HOME}; mkdir {HOME}; cat >{HOME}/devices.toml", user="alice", stdin=DEVICES
    )

    # Short runs of the same name show what GPUs are worth to it. The pairs wait for their end.
    early = [train(cluster, f"early{n}", k, n, 1000) for k in ("v100", "a100") for n in (1, 2, 4)]
    freeze = f",freeze=auto,max-penalty={MAX_PENALTY:.0%}"
    after = f"--dependency=afterany:{':'.join(map(str, early))}"
    jobs = {
        (name, kind): train(
            cluster,
            name,
            kind,
            GPUS[name],
            EPOCHS[name],
            freeze if (name, kind) == ("A", "v100") else "",
            after,
        )
        for name in ("A", "B")
        for kind in ("v100", "a100")
    }
    for job in early:
        until(lambda job=job: measured(daemon, job), seconds=90, what=f"{job} is not measured")
    daemon.stop()
    cluster.exec(["scancel", *map(str, early)])
    daemon.configure(configuration("act"))
    daemon.start()
    for (name, _), job in jobs.items():
        cluster.wait(job, "RUNNING")
        assert total_gpus(cluster, job) == GPUS[name]
    frozen, other = jobs["A", "v100"], jobs["B", "v100"]

    # Watched until all have ended.
    seen: dict[tuple[str, str], list[int]] = {key: [] for key in jobs}
    said: list[str] = []
    end = time.monotonic() + 200 * WAIT_FACTOR
    while any(cluster.state(job) != "COMPLETED" for job in jobs.values()):
        assert time.monotonic() < end, daemon.log()
        for key, job in jobs.items():
            count = total_gpus(cluster, job)
            if count and count != (seen[key] or [0])[-1]:
                seen[key].append(count)
        said += [
            line
            for line in daemon.selastic("explain", str(frozen), check=False).splitlines()
            if "frozen" in line and line not in said
        ]
        time.sleep(3)
    print(seen, *said, sep="\n")
    # Once B has ended it may grow again.
    assert min(seen["A", "v100"]) < 4
    # It grows in place: at its end the companion may be seen to go first.
    assert seen["B", "v100"] in ([2, 4], [2, 4, 2])
    # B of the second pair may grow when its A has ended, not before.
    assert seen["A", "a100"] == [4]
    assert all(MIN <= n <= MAX for counts in seen.values() for n in counts)
    # From measured times and penalties: the last of the twelve may save less than they cost.
    frozen_layers = [int(n) for n in re.findall(r"layers 1-(\d+) of 15 frozen", "\n".join(said))]
    assert 10 <= max(frozen_layers, default=0) <= 12
    log = daemon.log()
    # One that begins at its end, when the companion has gone first, is not carried out.
    assert re.findall(rf"JobId={other} .*State=DONE Action=(\w+)", log) == ["grow"], log
    assert re.search(rf"JobId={frozen} .*Reason=layers-frozen .* jobs={other}\b", log), log

    ends = {key: ended(cluster, job) for key, job in jobs.items()}
    first = min(ends.values())
    print({key: value - first for key, value in ends.items()})
    # How long a change of A, or of B, takes depends on the load: the average of the pair counts.
    assert sum(ends[n, "v100"] for n in "AB") < sum(ends[n, "a100"] for n in "AB"), ends

    # Of the control's descent at most `max-penalty` is missing.
    run = {key: losses(cluster, *key) for key in jobs}
    assert all(math.isfinite(loss) for one in run.values() for loss in one)
    down = {key: descent(one) for key, one in run.items()}
    print(down)
    assert down["A", "v100"] > (1 - MAX_PENALTY) * down["A", "a100"]
    daemon.check_log()
    until(lambda: not reservations(cluster), what="reservations are left")
