"""selasticd in ctld, with a configuration of the test's own, and jobs that play along."""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.slurm_cluster import PATIENCE, SlurmCluster, until

CREW = Path(__file__).parents[1] / "cluster" / "drivers" / "crew.py"
PYTHON = "/opt/slurm-elastic/bin/python"
ADDRESS = "ctld:7321"

#: Acts as soon as it can.
EAGER = """
[controller]
mode = "{mode}"
queue = "{queue}"
interval_s = 2
poll_s = 0.5
state_dir = "{state}"
[api]
controller = "ctld:7321"
[resize]
min_interval_s = 2
per_hour = 3600
payback_s = 600
restart_s = 1
notice_s = 10
keep_s = {keep}
[speedup]
types = {{ a100 = 2.0, v100 = 1.0 }}
[slurm]
lease_s = 60
"""


class Daemon:
    """selasticd, its log, and a crew that reports for sleeping jobs.

    Args:
        cluster: where.
        text: of elastic.toml; "{state}" is replaced by a fresh directory.
        crew: users whose sleeping jobs save when asked.
    """

    #: Where it runs.
    NODE = "ctld"

    def __init__(
        self, cluster: SlurmCluster, text: str = "", *, crew: tuple[str, ...] = ("alice", "bob")
    ) -> None:
        self.cluster = cluster
        make = "d=$(mktemp -d /tmp/selasticd.XXXXXX) && chmod 755 $d && echo $d"
        self.home = cluster.exec(make, user="selastic", node=self.NODE).stdout.strip()
        self.log_path = f"{self.home}/log"
        self.configure(text or eager())
        write = "mkdir -p /tmp/drivers && cat >/tmp/drivers/crew.py"
        cluster.exec(write, stdin=CREW.read_text())
        self._crew = [self._play(user) for user in crew]
        self.pid = 0

    def configure(self, text: str) -> None:
        """Write the configuration."""
        text = text.replace("{state}", self.home)
        self.cluster.exec(
            f"cat >{self.home}/elastic.toml", user="selastic", node=self.NODE, stdin=text
        )

    def _play(self, user: str) -> tuple[str, str]:
        out = f"/tmp/crew-{user}"
        command = f"{PYTHON} /tmp/drivers/crew.py {ADDRESS} </dev/null >{out} 2>&1 & echo $!"
        return user, self.cluster.exec(command, user=user).stdout.strip()

    def start(self, *, ready: bool = True) -> None:
        """Start it; with `ready`, return once it answers."""
        begun = len(self.log())
        command = f"selasticd -v -D --config {self.home}/elastic.toml"
        started = self.cluster.exec(
            f"cd /; {command} </dev/null >>{self.log_path} 2>&1 & echo $!",
            user="selastic",
            node=self.NODE,
        )
        self.pid = int(started.stdout)
        if ready:
            self.wait_for(r"selasticd \S+ Mode=", after=begun)

    def runs(self) -> bool:
        """Whether the process is there."""
        return self.cluster.exec(f"kill -0 {self.pid}", node=self.NODE, check=False).returncode == 0

    def signal(self, name: str) -> None:
        """Send the process a signal."""
        self.cluster.exec(f"kill -{name} {self.pid}", node=self.NODE)

    def stop(self) -> None:
        """SIGTERM, and wait for the end."""
        self.cluster.exec(
            f"kill {self.pid}; while kill -0 {self.pid}; do sleep 0.05; done",
            node=self.NODE,
            check=False,
        )

    def kill(self) -> None:
        """SIGKILL."""
        self.cluster.exec(
            f"kill -9 {self.pid}; while kill -0 {self.pid}; do sleep 0.05; done",
            node=self.NODE,
            check=False,
        )

    def close(self) -> None:
        """Stop everything, jobs first; nothing of ours stays in Slurm."""
        self.cluster.cancel()
        self.stop()
        for user, pid in self._crew:
            self.cluster.exec(f"kill {pid}", user=user, check=False)
        for name in reservations(self.cluster):
            self.cluster.exec(["scontrol", "delete", f"ReservationName={name}"], check=False)

    def log(self) -> str:
        """What it has said so far."""
        return self.cluster.exec(f"cat {self.log_path} 2>/dev/null || true", node=self.NODE).stdout

    def check_log(self, *, after: int = 0) -> None:
        """Fail if the log, after so many characters, tells of a fault of selasticd's own."""
        log = self.log()[after:]
        assert "Traceback" not in log, log
        assert "internal error" not in log, log

    def wait_for(self, pattern: str, *, after: int = 0, timeout: float = 60) -> re.Match[str]:
        """The first place in the log, after so many characters, that matches."""
        end = time.monotonic() + PATIENCE * timeout
        while not (match := re.compile(pattern).search(log := self.log(), after)):
            assert time.monotonic() < end, f"no {pattern!r} in time in\n{log[after:]}"
            time.sleep(0.2)
        return match

    def when(
        self, job: int | str, state: str, command: str, *, user: str = "root", first: str = ":"
    ) -> None:
        """Run `first`, and a command the moment a job's next transition enters a state."""
        # A reader of the log that starts no process for each look: states last a third of a second.
        lines = f"tail -c +$((begun + 1)) -s 0.01 -f {self.log_path}"
        mark = f"JobId={job} Transition=.* State={state} "
        quiet = "</dev/null 2>/dev/null"  # it outlives the script by a moment
        wait = f"grep -q -m1 '{mark}' < <(timeout {PATIENCE * 100:.0f} {lines} {quiet})"
        script = f"begun=$(stat -c %s {self.log_path}); {first}; {wait}; seen=$?"
        script += f"; {command}; exit $seen"
        done = self.cluster.exec(script, user=user, node=self.NODE, timeout=150, check=False)
        assert done.returncode == 0, f"job {job} was not in {state}: {done}\n{self.log()}"

    def ask(self, *words: str, user: str = "alice", check: bool = True) -> str:
        """What `selastic` prints."""
        done = self.cluster.exec(["selastic", *words], user=user, check=check)
        return done.stdout + done.stderr


@contextmanager
def running(
    cluster: SlurmCluster, text: str = "", *, crew: tuple[str, ...] = ("alice", "bob")
) -> Iterator[Daemon]:
    """Run a `Daemon` until the end of the context."""
    daemon = Daemon(cluster, text, crew=crew)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@contextmanager
def sound(daemon: Daemon) -> Iterator[None]:
    """Check that a test leaves a running selasticd, no reservation, and no internal error."""
    begun = len(daemon.log())
    yield
    daemon.cluster.cancel()
    assert daemon.runs()
    until(lambda: not reservations(daemon.cluster), what="reservations are left")
    daemon.check_log(after=begun)


def eager(*, mode: str = "act", queue: str = "slurm", keep: float = 120, extra: str = "") -> str:
    """A configuration that acts as soon as it can."""
    return EAGER.format(mode=mode, queue=queue, keep=keep, state="{state}") + extra


def shown(cluster: SlurmCluster, job: int | str) -> dict[str, Any]:
    """One job as slurmctld shows it."""
    text = cluster.exec(["scontrol", "show", "job", str(job), "-d", "--json"]).stdout
    task = int(str(job).partition("_")[2] or -1)  # Slurm shows the whole array
    jobs = json.loads(text)["jobs"]
    return next((j for j in jobs if task in (-1, j["array_task_id"]["number"])), jobs[0])


def held(cluster: SlurmCluster, job: int | str) -> dict[str, int]:
    """GPUs by node that a running job has."""
    found = shown(cluster, job)
    if found["job_state"] != ["RUNNING"]:
        return {}
    nodes = [found["nodes"]]
    if "[" in found["nodes"] or "," in found["nodes"]:
        nodes = cluster.exec(["scontrol", "show", "hostnames", *nodes]).stdout.split()
    counts = [int(g.split("(")[0].split(":")[-1]) for g in found["gres_detail"]]
    return dict(zip(nodes, counts, strict=True))


def gpus(cluster: SlurmCluster, job: int | str) -> int:
    """GPUs that a running job has."""
    return sum(held(cluster, job).values())


def reservations(cluster: SlurmCluster) -> list[str]:
    """Names of ours."""
    text = cluster.exec("scontrol -o show res | grep -oE 'selastic_[0-9]+' || true").stdout
    return sorted(set(text.split()))


def together(*acts: Callable[[], object]) -> None:
    """Do all of them at once."""
    troubles: list[BaseException] = []

    def guarded(act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as trouble:  # noqa: BLE001 - shown by the test
            troubles.append(trouble)

    threads = [threading.Thread(target=guarded, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if troubles:
        raise troubles[0]
