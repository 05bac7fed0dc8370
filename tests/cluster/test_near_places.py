"""`[placement] mode = "delay"` on a real cluster: who waits for a rack, who moves, and why.

`chatty` stands still six times as long as it computes when its GPUs are in two racks, `quiet`
never does (docs/examples/emulate.py). All are on v100: g03 in one rack, g05 and g06 in the other.
"""

import json
import re
from collections.abc import Iterator

import pytest
from daemon import Daemon, eager, held, reservations, until
from harness import Cluster
from shaping import slow

EXAMPLES = "/opt/src/slurm-elastic/docs/examples"
COMMUNICATION = {"chatty": 8.0, "quiet": 0.0}
RACK = {"g03": "rack1", "g05": "rack2", "g06": "rack2"}

PLACEMENT = """
[placement]
mode = "delay"
wait_node_s = 0
wait_rack_s = 600
"""


def configuration(mode: str) -> str:
    """Pending jobs are the controller's to start, and wait for a rack."""
    text = eager(mode=mode, queue="controller", extra=PLACEMENT)
    return text.replace("min_interval_s = 2", "min_interval_s = 2\nmin_gain = 0.1")


@pytest.fixture
def daemon(cluster: Cluster) -> Iterator[Daemon]:
    daemon = Daemon(cluster, configuration("observe"), crew=())
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


def train(cluster: Cluster, application: str, *options: str, gpus: int = 4) -> int:
    """On v100, spread as the options say."""
    out = f"/shared/home/alice/near-{application}"
    cluster.exec(f"rm -rf {out} {out}.log", user="alice")
    return cluster.sbatch(
        f"export OMP_NUM_THREADS=1\n"
        f"exec esrun python3 {EXAMPLES}/train_library.py --out {out} --samples 4096 --epochs 1000"
        f" --global-batch 32 --rate 80 --communication {COMMUNICATION[application]}"
        " --checkpoint-every 3",
        *(f"--elastic={gpus}-{gpus},types=v100", f"-J{application}", "-t30", "--requeue"),
        *("--open-mode=append", f"--output={out}.log", *options),
    )


def fill(cluster: Cluster, node: str, gpus: int) -> int:
    """Take GPUs of a node away; 0 of none."""
    kind = "v100" if node in RACK else "a100"
    job = cluster.sbatch(
        "exec sleep 900", "-o/dev/null", f"-w{node}", f"--gres=gpu:{kind}:{gpus}", user="bob"
    )
    cluster.wait(job, "RUNNING")
    return job


def free(cluster: Cluster, job: int) -> None:
    """Give them back."""
    cluster.exec(["scancel", str(job)])
    cluster.wait(job, "CANCELLED")


def racks(cluster: Cluster, job: int) -> set[str]:
    """Where it runs; empty while it does not."""
    return {RACK[node] for node in held(cluster, job)}


def step_s(daemon: Daemon, job: int) -> float:
    """Seconds of a step where it runs now; 0 while nothing is reported."""
    text = daemon.ask("show", str(job), "--json", check=False)
    shown = json.loads(text) if text.startswith("{") else {}
    speed = (shown.get("job") or {}).get("steps_per_s")
    return 1 / speed if shown.get("reporting") and speed else 0.0


def measured(daemon: Daemon, job: int) -> bool:
    """Whether it may be moved, and what a step's communication takes is known."""
    return bool(step_s(daemon, job)) and "Proven=yes" in daemon.ask("show", str(job))


def act(daemon: Daemon) -> None:
    """From now on it acts."""
    daemon.stop()
    daemon.configure(configuration("act"))
    daemon.start()


def test_waits_for_a_rack_and_moves_into_one(daemon: Daemon, cluster: Cluster) -> None:
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
        until(lambda job=job: measured(daemon, job), seconds=60, what=f"{job} is not measured")
    spread_s = step_s(daemon, chatty)

    # Two GPUs come free beside chatty's: it comes together. Then g03 has room for all of quiet,
    # which would gain nothing.
    act(daemon)
    free(cluster, rest["g06.2"])
    until(lambda: racks(cluster, chatty) == {"rack2"}, seconds=60, what=daemon.log())
    until(lambda: 0 < step_s(daemon, chatty) < spread_s / 1.5, seconds=60)
    until(lambda: "together" in daemon.ask("explain", str(quiet)))
    said = daemon.ask("explain", str(quiet))
    assert re.search(r"moving together .*gain", said), said
    assert racks(cluster, quiet) == {"rack1", "rack2"}
    assert "come together" in daemon.log() or "together" in daemon.ask("explain", str(chatty))

    # Again, with two GPUs free in each rack: one knows of itself that it suffers there.
    free(cluster, chatty)
    free(cluster, quiet)
    rest |= {
        f"{node}.{i}": fill(cluster, node, 2) for node, i in (("g03", 3), ("g06", 3), ("g06", 4))
    }
    chatty = train(cluster, "chatty", "--gres=gpu:v100:4")
    until(lambda: "waits for a nearer place" in daemon.ask("explain", str(chatty)))
    assert "racks" in daemon.ask("explain", str(chatty))
    quiet = train(cluster, "quiet", "--gres=gpu:v100:4")
    until(lambda: racks(cluster, quiet) == {"rack1", "rack2"}, what=daemon.log())
    assert cluster.state(chatty) == "PENDING"
    free(cluster, rest["g06.3"])
    free(cluster, quiet)
    until(lambda: racks(cluster, chatty) == {"rack2"}, what=daemon.log())
    until(lambda: 0 < step_s(daemon, chatty) < spread_s / 1.5, seconds=60)
    assert "Traceback" not in daemon.log()
    assert "internal error" not in daemon.log()
    cluster.cancel()
    until(lambda: not reservations(cluster), what="reservations are left")


def test_a_slow_uplink_is_left(daemon: Daemon, cluster: Cluster) -> None:
    """Nothing is emulated: what one rack sends to the other goes through a narrow pipe."""
    for node in ("g01", "g02", "g04"):
        fill(cluster, node, 4)
    for node in RACK:
        fill(cluster, node, 3)
    last = fill(cluster, "g06", 1)
    across = [(one, other) for one in RACK for other in RACK if RACK[one] != RACK[other]]
    with slow(cluster, across, kbit_s=1000):
        job = train(cluster, "quiet", "-N2", "--gres=gpu:v100:1", gpus=2)
        cluster.wait(job, "RUNNING")
        until(lambda: measured(daemon, job), seconds=90, what="it is not measured")
        assert racks(cluster, job) == {"rack1", "rack2"}
        spread_s = step_s(daemon, job)
        act(daemon)
        free(cluster, last)
        until(lambda: racks(cluster, job) == {"rack2"}, seconds=60, what=daemon.log())
        until(lambda: 0 < step_s(daemon, job) < spread_s / 1.5, seconds=60)
