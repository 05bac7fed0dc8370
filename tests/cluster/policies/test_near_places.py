"""Jobs that wait for a rack or move into one, with `[placement] mode = "delay"` and policy `dally`.

`chatty` stands still six times as long as it computes when its GPUs are in two racks, `quiet`
never does (docs/examples/emulate.py). All are on v100: g03 in one rack, g05 and g06 in the other.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.container_cluster.selasticd import (
    Daemon,
    eager_config,
    held,
    reservations,
    running,
)
from tests.support.container_cluster.slow_links import slow
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
#: Samples per second of a v100, and times the emulated communication.
APPLICATIONS = {"chatty": (80, 8.0), "quiet": (10, 0.0), "plain": (160, 0.0)}
RACK = {"g03": "rack1", "g05": "rack2", "g06": "rack2"}

PLACEMENT = """
[placement]
mode = "delay"
timers = "fixed"
wait_node_s = 0
wait_rack_s = 600
tolerance = 0.2
"""


def configuration(mode: str, policy: str = "fair") -> str:
    """Return a configuration in which selasticd starts jobs, delays for racks, and moves rarely."""
    text = eager_config(mode=mode, policy=policy, queue="controller", extra=PLACEMENT)
    # Beside other tests a step over a slow link, and its checkpoint, may take longer than 10 s.
    text = text.replace("notice_s = 10", "notice_s = 60")
    return text.replace("min_interval_s = 2", "min_interval_s = 2\nmin_gain = 0.5")


@pytest.fixture
def daemon(cluster: SlurmCluster) -> Iterator[Daemon]:
    with running(cluster, configuration("observe"), reporters=()) as daemon:
        yield daemon


def train(cluster: SlurmCluster, application: str, *options: str, gpus: int = 4) -> int:
    """Submit a training on v100, spread as the options say."""
    out = f"/shared/home/alice/near-{application}"
    rate, communication = APPLICATIONS[application]
    cluster.exec(f"rm -rf {out} {out}.log", user="alice")
    return cluster.sbatch(
        f"export OMP_NUM_THREADS=1\n"
        f"exec esrun python3 {EXAMPLES}/train_library.py --out {out} --samples 4096 --epochs 1000"
        f" --global-batch 32 --rate {rate} --communication {communication} --checkpoint-every 3",
        *(f"--elastic={gpus}-{gpus},types=v100", f"-J{application}", "-t30", "--requeue"),
        *("--open-mode=append", f"--output={out}.log", *options),
    )


def fill(cluster: SlurmCluster, node: str, gpus: int) -> int:
    """Take GPUs of a node away; 0 of none."""
    kind = "v100" if node in RACK else "a100"
    job = cluster.sbatch(
        "exec sleep 900", "-o/dev/null", f"-w{node}", f"--gres=gpu:{kind}:{gpus}", user="bob"
    )
    cluster.wait(job, "RUNNING")
    return job


def free(cluster: SlurmCluster, job: int) -> None:
    """Give them back."""
    cluster.exec(["scancel", str(job)])
    cluster.wait(job, "CANCELLED")


def racks(cluster: SlurmCluster, job: int) -> set[str]:
    """Return the racks in which a job runs; empty while it does not."""
    return {RACK[node] for node in held(cluster, job)}


def shown(daemon: Daemon, job: int) -> dict[str, Any]:
    """Return the answer of `selastic show`; {} while the job is unknown."""
    text = daemon.selastic("show", str(job), "--json", check=False)
    return json.loads(text) if text.startswith("{") else {}


def step_s(daemon: Daemon, job: int) -> float:
    """Return the seconds of a step in the present place; 0 while nothing is reported."""
    found = shown(daemon, job)
    speed = (found.get("job") or {}).get("steps_per_s")
    return 1 / speed if found.get("reporting") and speed else 0.0


def measured(daemon: Daemon, job: int) -> bool:
    """Return whether the job may be moved and has reported often enough for its stalls to count."""
    found = shown(daemon, job)
    return bool(found.get("proven")) and any(m["reports"] >= 3 for m in found["measurements"])


def act(daemon: Daemon, policy: str = "fair") -> None:
    """Let selasticd act from now on."""
    daemon.stop()
    daemon.configure(configuration("act", policy))
    daemon.start()


def sides(daemon: Daemon, cluster: SlurmCluster, wish: str, near: int) -> int:
    """Let chatty wait for a rack and quiet start over two; free GPUs; return chatty's id."""
    chatty = train(cluster, "chatty", "--gres=gpu:v100:4")
    until(lambda: wish in daemon.selastic("explain", str(chatty), check=False), what=wish)
    assert re.search(r"over 2 racks", daemon.selastic("explain", str(chatty)))
    quiet = train(cluster, "quiet", "--gres=gpu:v100:4")
    until(lambda: racks(cluster, quiet) == {"rack1", "rack2"}, what=daemon.log)
    assert cluster.state(chatty) == "PENDING"
    free(cluster, near)
    free(cluster, quiet)
    until(lambda: racks(cluster, chatty) == {"rack2"}, what=daemon.log)
    return chatty


@pytest.mark.alone  # ranks wait longer for each other beside other tests
def test_waits_for_a_rack_and_moves_into_one(daemon: Daemon, cluster: SlurmCluster) -> None:
    # Two GPUs are free on g03 and two on g05: chatty gets those, then quiet two on g03 and on g06.
    rest = {node: fill(cluster, node, 4) for node in ("g01", "g02", "g04")}
    rest |= {f"{node}.{i}": fill(cluster, node, 2) for node in ("g03", "g05", "g06") for i in "12"}
    free(cluster, rest["g03.1"])
    free(cluster, rest["g05.1"])
    chatty = train(cluster, "chatty", "-N2", "--gres=gpu:v100:2")
    cluster.wait(chatty, "RUNNING")
    free(cluster, rest["g03.2"])
    free(cluster, rest["g06.1"])
    quiet = train(cluster, "quiet", "-N2", "--gres=gpu:v100:2")
    cluster.wait(quiet, "RUNNING")
    assert racks(cluster, chatty) == racks(cluster, quiet) == {"rack1", "rack2"}
    for job in (chatty, quiet):
        until(lambda job=job: measured(daemon, job), seconds=120, what=f"{job} is not measured")
    spread_s = step_s(daemon, chatty)

    # Two GPUs come free beside chatty's: it comes together. Then g03 has room for all of quiet,
    # which would gain nothing.
    act(daemon)
    free(cluster, rest["g06.2"])
    until(lambda: racks(cluster, chatty) == {"rack2"}, seconds=60, what=daemon.log)
    until(lambda: 0 < step_s(daemon, chatty) < spread_s / 1.5, seconds=90)
    print(f"chatty: {spread_s:.2f} s a step over two racks, {step_s(daemon, chatty):.2f} s in one")
    until(lambda: "stays spread over 2 racks" in daemon.selastic("explain", str(quiet)))
    assert racks(cluster, quiet) == {"rack1", "rack2"}
    assert "Reason=consolidates unit=rack spread=1 " in daemon.log()

    # Again, with two GPUs free in each rack: their names say what they are.
    free(cluster, chatty)
    free(cluster, quiet)
    for node in ("g03", "g06"):
        fill(cluster, node, 2)
    near = fill(cluster, "g06", 2)
    chatty = sides(daemon, cluster, "waits for a nearer place", near)
    until(lambda: 0 < step_s(daemon, chatty) < spread_s / 1.5, seconds=90)

    # The same under the policy `dally`, which wants one node.
    free(cluster, chatty)
    fill(cluster, "g06", 2)
    act(daemon, "dally")
    sides(daemon, cluster, "waits for one rack", rest["g05.2"])
    daemon.check_log()
    cluster.cancel()
    until(lambda: not reservations(cluster), what="reservations are left")


def test_a_slow_uplink_is_left(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Nothing is emulated: what one rack sends to the other goes through a narrow pipe."""
    for node in ("g01", "g02", "g04"):
        fill(cluster, node, 4)
    for node in RACK:
        fill(cluster, node, 3)
    last = fill(cluster, "g06", 1)
    across = [(one, other) for one in RACK for other in RACK if RACK[one] != RACK[other]]
    with slow(cluster, across, kbit_s=1000):
        job = train(cluster, "plain", "-N2", "--gres=gpu:v100:1", gpus=2)
        cluster.wait(job, "RUNNING")
        until(lambda: measured(daemon, job), seconds=120, what="it is not measured")
        assert racks(cluster, job) == {"rack1", "rack2"}
        spread_s = step_s(daemon, job)
        act(daemon)
        free(cluster, last)
        until(lambda: racks(cluster, job) == {"rack2"}, seconds=60, what=daemon.log)
        until(lambda: 0 < step_s(daemon, job) < spread_s / 1.5, seconds=90)
        print(f"slow uplink: {spread_s:.2f} s a step over it, {step_s(daemon, job):.2f} s without")


def test_a_round_is_held_when_a_wait_ends(daemon: Daemon, cluster: SlurmCluster) -> None:
    """Not only every ten minutes; two GPUs are free in each rack."""
    for node in ("g01", "g02", "g04", "g06"):
        fill(cluster, node, 4)
    for node in ("g03", "g05"):
        fill(cluster, node, 2)
    text = configuration("act").replace("interval_s = 2", "interval_s = 600", 1)
    text = text.replace("wait_rack_s = 600", "wait_rack_s = 15").replace("tolerance = 0.2", "")
    daemon.stop()
    daemon.configure(text)
    daemon.start()
    options = ("--elastic=4-4,types=v100", "--gres=gpu:v100:4", "-t10", "--requeue")
    job = cluster.sbatch("exec sleep 600", "-o/dev/null", *options)
    said = "waits for a nearer place"
    until(lambda: said in daemon.selastic("explain", str(job), check=False), what=daemon.log)
    until(lambda: racks(cluster, job) == {"rack1", "rack2"}, seconds=60, what=daemon.log)
