"""Two controllers, in ctld and on g06: one acts, whatever fault the other has."""

import json
import re
from collections.abc import Callable, Iterator

import pytest

from tests.support.container_cluster.selasticd import (
    METRICS,
    PYTHON,
    REPORTER,
    Daemon,
    eager_config,
    gpus,
    held,
    reservations,
    shown,
    submit_running,
)
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

BOTH = "ctld:7321,g06:7321"
#: Seconds: the wait of one who stands by; and all that a takeover may take on a loaded machine.
TAKEOVER_S, LONG = 6, 90
#: Priority of a job that is being started.
FIRST = 4_000_000_000

CONFIG = (
    eager_config(extra=METRICS)
    .replace('"ctld:7321"', f'"{BOTH}"')
    .replace("poll_s", f"takeover_s = {TAKEOVER_S}\npoll_s")
)


class Second(Daemon):
    """The selasticd on g06."""

    NODE = "g06"


class Pair:
    """Two selasticd, of which one is active."""

    def __init__(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster
        self.all = [
            Daemon(cluster, CONFIG, reporters=()),
            Second(cluster, CONFIG, reporters=()),
        ]
        play = f"{PYTHON} /tmp/reporter.py {BOTH} </dev/null >/tmp/reporter-two 2>&1 & echo $!"
        cluster.exec("cat >/tmp/reporter.py", user="alice", stdin=REPORTER.read_text())
        self._reporter = cluster.exec(play, user="alice").stdout.strip()

    def roles(self) -> dict[str, str]:
        """Return the role by address; "" for one that does not answer."""
        words = ["selastic", "--controller", BOTH, "ping", "--json"]
        done = self.cluster.exec(words, user="alice", check=False)
        return {c["address"]: c.get("role", "") for c in json.loads(done.stdout)["controllers"]}

    def active(self) -> tuple[Daemon, Daemon]:
        """Return the active one and the other; both run, whatever the test before has left."""
        for one in self.all:
            self.cluster.exec(f"kill -CONT {one.pid}", node=one.NODE, check=False)
            if not one.runs():
                one.start()
        wait(lambda: "active" in self.roles().values(), "nobody is active")
        first = self.roles()["ctld:7321"] == "active"
        return (self.all[0], self.all[1]) if first else (self.all[1], self.all[0])

    def selastic(self, *words: str, check: bool = True) -> str:
        done = self.cluster.exec(
            ["selastic", "--controller", BOTH, *words], user="alice", check=check
        )
        return done.stdout + done.stderr

    def close(self) -> None:
        self.cluster.exec(f"kill {self._reporter}", user="alice", check=False)
        for one in self.all:
            self.cluster.exec(f"kill -CONT {one.pid}", node=one.NODE, check=False)
            one.close()
        names = self.cluster.exec(
            "scontrol -o show res | grep -oE 'selastic_active_[0-9]+' || true"
        )
        for name in names.stdout.split():
            self.cluster.exec(["scontrol", "delete", f"ReservationName={name}"], check=False)


@pytest.fixture(scope="module")
def pair(cluster: SlurmCluster) -> Iterator[Pair]:
    pair = Pair(cluster)
    try:
        for one in pair.all:
            one.start()
        yield pair
    finally:
        pair.close()


def wait(happens: Callable[[], bool], what: str) -> None:
    """Call `until` with the time that a takeover may take."""
    until(happens, seconds=LONG, what=what)


def writes(log: str) -> list[str]:
    """Return the calls of scontrol, without renewals of the lease."""
    return [x for x in log.splitlines() if " scontrol words=" in x and "selastic_active_" not in x]


def leases(cluster: SlurmCluster) -> list[str]:
    shown = cluster.exec("scontrol -o show res | grep -o 'selastic_active_[0-9]*' || true")
    return shown.stdout.split()


def paused_in_a_start(cluster: SlurmCluster, active: Daemon) -> int:
    """Pause the active one while it starts a growing job again; return that job."""
    for _ in range(5):
        job = submit_running(cluster)
        active.when(job, "VERIFY", f"kill -STOP {active.pid}")
        if not re.search(f"JobId={job} Transition=.* State=(CLEAR|DONE)", active.log()):
            return job
        active.signal("CONT")
        cluster.exec(["scancel", str(job)])
    pytest.fail("the controller was quicker five times")


def test_only_the_active_one_exports_the_cluster(cluster: SlurmCluster, pair: Pair) -> None:
    active, other = pair.active()
    idle = ("selastic_gpus", "a100", "idle")
    until(lambda: idle in active.metrics())
    assert 0 < active.metrics()["selastic_leader_lease_seconds",] <= TAKEOVER_S
    standing_by = other.metrics()
    assert standing_by["selastic_active",] == standing_by["selastic_leader_lease_seconds",] == 0
    assert idle not in standing_by
    last = active.metrics()["selastic_leader_generation",]
    active.stop()
    wait(lambda: idle in other.metrics(), "the other one does not act")
    assert other.metrics()["selastic_leader_generation",] == last + 1


def test_a_paused_controller_is_replaced_and_does_not_write_again(
    cluster: SlurmCluster, pair: Pair
) -> None:
    active, other = pair.active()
    rigid = cluster.sbatch("exec sleep 600", "-o/dev/null", "--gres=gpu:1", "-Cv100", user="bob")
    job = paused_in_a_start(cluster, active)
    begun = len(active.log())
    assert reservations(cluster)
    other.wait_for("taken over from", timeout=LONG)
    wait(lambda: set(pair.roles().values()) == {"active", ""}, "nobody answers as active")
    wait(lambda: gpus(cluster, job) == 4, "it does not grow")
    wait(lambda: not reservations(cluster), "a reservation is left")
    wait(lambda: shown(cluster, job)["priority"]["number"] < FIRST, "still the first")
    paused = len(active.log())
    assert writes(active.log()[begun:paused]) == []
    active.signal("CONT")
    left = "no longer active: .*; 1 changes are left to the active controller"
    active.wait_for(left, after=begun, timeout=LONG)
    active.wait_for(r"stands by; Active=\S+:7321", after=begun, timeout=LONG)
    wait(lambda: sorted(pair.roles().values()) == ["active", "standby"], "no standby")
    assert len(leases(cluster)) == 1
    assert writes(active.log()[begun:]) == []
    assert cluster.state(rigid) == "RUNNING"
    assert shown(cluster, rigid)["restart_cnt"] == 0


def test_what_people_ordered_outlives_the_controller(cluster: SlurmCluster, pair: Pair) -> None:
    active, other = pair.active()
    job = submit_running(cluster, directive="1-1")
    wait(lambda: f" {job} " in pair.selastic("status"), "it is not shown")
    assert "held" in pair.selastic("hold", str(job))
    record = f"select record from jobs where job_id = {job}"
    look = (
        "import sqlite3; "
        f"print(sqlite3.connect('{other.home}/ledger.sqlite').execute('{record}').fetchone())"
    )
    wait(
        lambda: '"held": true' in cluster.exec([PYTHON, "-c", look], node=other.NODE).stdout,
        "the ledger is not copied",
    )
    before, begun = held(cluster, job), len(other.log())
    active.kill()
    other.wait_for("taken over from", timeout=LONG, after=begun)
    wait(lambda: f" {job} " in pair.selastic("status", check=False), "it is not shown")
    assert re.search(r"HELD\n\s*yes", pair.selastic("status", "-o", "HELD"))
    assert held(cluster, job) == before
    begun = len(active.log())
    active.start()
    active.wait_for("stands by; Active=", after=begun, timeout=LONG)


def test_an_orderly_stop_hands_over(cluster: SlurmCluster, pair: Pair) -> None:
    active, other = pair.active()
    begun = len(other.log())
    other.signal("HUP")
    other.wait_for("configuration read again: Mode=act", after=begun, timeout=LONG)
    active.stop()
    assert "State=given back" in active.log()
    other.wait_for(r"Lease=\d+ State='taken'", after=begun, timeout=LONG)
    assert f"{other.NODE}:7321 is UP (active)" in pair.selastic("ping")
    job = submit_running(cluster)
    wait(lambda: gpus(cluster, job) == 4, "it does not grow")
