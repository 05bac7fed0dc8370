"""The running container cluster, as tests use it."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

CLUSTER_DIR = Path(__file__).resolve().parents[3] / "contrib" / "cluster"
sys.path.insert(0, str(CLUSTER_DIR))

from clusterlib.lifecycle import exec_command, home_of  # noqa: E402

from tests.support.container_cluster.node_sessions import NodeSessions  # noqa: E402
from tests.support.needs import lack  # noqa: E402

#: By how much waits may be longer than on a calm machine: several clusters share it. They bound
#: a test that hangs; no test asserts a time.
WAIT_FACTOR = 3.0
#: pytest-xdist's name of the first worker, and of a process without workers.
FIRST_WORKER = "gw0"
CANNOT_HAVE_DOCKER = 3  # exit code of `cluster`


def worker_name() -> str:
    """Return pytest-xdist's name of this process."""
    return os.environ.get("PYTEST_XDIST_WORKER", FIRST_WORKER)


def cluster_name() -> str:
    """Return the name of this process's cluster: with `pytest -n` each worker has its own."""
    name = os.environ.get("SELASTIC_CLUSTER", "selastic")
    return name if worker_name() == FIRST_WORKER else f"{name}-{worker_name()}"


def until(
    happens: Callable[[], object],
    *,
    seconds: float = 60.0,
    every_s: float = 0.3,
    what: str | Callable[[], object] = "",
) -> None:
    """Wait for something to become true.

    Args:
        happens: looked at again and again.
        seconds: at most, on a calm machine.
        every_s: pause between two looks at least; longer where a look costs much and what it waits
            for stays.
        what: did not happen; or what tells it then, e.g. a log.
    """
    began = time.monotonic()
    while True:
        looked = time.monotonic()
        if happens():
            return
        now = time.monotonic()
        if now > began + WAIT_FACTOR * seconds:
            text = what() if callable(what) else what
            raise AssertionError(f"not within {WAIT_FACTOR * seconds:.0f} s: {text}")
        # A look that starts programs must not keep a core busy: the clusters share two. What has
        # not happened for long is looked for less often.
        time.sleep(max(every_s, 3 * (now - looked), min(1.0, 0.02 * (now - began))))


class SlurmCluster:
    """The running cluster: six nodes g01..g06 with four fake GPUs each, users alice and bob.

    `exec` runs a command, `sbatch` submits a job, `state` and `wait` look at it, `free_gpus`
    counts. Jobs submitted through `sbatch` are cancelled when their test ends. The cluster is the
    one that `contrib/cluster/cluster` manages, SELASTIC_CLUSTER names another one; it stays up.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.jobs: list[int] = []
        self._sessions: dict[str, NodeSessions] = {}
        self._lock = threading.Lock()

    def exec(
        self,
        command: str | list[str],
        *,
        user: str = "root",
        node: str = "ctld",
        stdin: str = "",
        check: bool = True,
        timeout: float = 120,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` (a string: by bash) on a node; with `check`, a failure fails the test."""
        words = ["bash", "-c", command] if isinstance(command, str) else command
        with self._lock:
            if node not in self._sessions:
                self._sessions[node] = NodeSessions(exec_command(self.name, node, "root"))
        done = self._sessions[node].run(
            words,
            user=user,
            home=home_of(user),
            stdin=stdin,
            timeout_s=WAIT_FACTOR * timeout,
        )
        if check:
            assert done.returncode == 0, f"{command}: rc {done.returncode}: {done.stderr}"
        return done

    def sbatch(self, script: str, *options: str, user: str = "alice", directory: str = "") -> int:
        """Submit `script` (without its #! line) and return the job's id.

        Args:
            script: its text.
            options: of sbatch.
            user: by whom.
            directory: from which; "": the user's home directory.
        """
        text = f"#!/bin/bash\n{script}\n"
        within = ["env", f"--chdir={directory}"] if directory else []
        done = self.exec([*within, "sbatch", "--parsable", *options], user=user, stdin=text)
        self.jobs.append(int(done.stdout.split(";")[0]))
        return self.jobs[-1]

    def state(self, job: int) -> str:
        """Return the job's state as squeue writes it: PENDING, RUNNING, COMPLETED …

        slurmctld forgets a job five minutes after its end; then accounting tells it.
        """
        known = self.exec(["squeue", "-h", "-t", "all", "-j", str(job), "-o", "%T"], check=False)
        if "Invalid job id" not in known.stderr:
            assert known.returncode == 0, known.stderr
            return known.stdout.strip()
        rows = self.exec(["sacct", "-X", "-n", "-P", "-j", str(job), "-o", "State"]).stdout
        return (rows.split() or [""])[0]

    def wait(self, job: int, *states: str, timeout: float = 60) -> str:
        """Wait until the job is in one of `states`; return which."""
        state = ""

        def there() -> bool:
            nonlocal state
            state = self.state(job)
            return state in states

        try:
            until(there, seconds=timeout)
        except AssertionError as error:
            raise AssertionError(f"job {job} is {state}, not {states}: {error}") from None
        return state

    def wait_until_idle(self, node: str) -> None:
        """Wait until Slurm uses a node again that was gone, and nothing runs there.

        After the node of a job was lost, sinfo of 24.11.5 has shown it as `mix` for minutes, with
        nothing allocated on it.
        """

        def is_idle() -> bool:
            shown = self.exec(["scontrol", "show", "node", node]).stdout.split()
            return "State=IDLE" in shown and "CPUAlloc=0" in shown

        def logs() -> str:
            shown = f"sinfo -h -n {node} -o %t; scontrol show node {node}; squeue"
            of_slurmd = f"tail -n 20 /var/log/slurm/slurmd-{node}.log"
            return (
                self.exec(f"{shown}; tail -n 30 /var/log/slurm/slurmctld.log").stdout
                + self.exec(of_slurmd, node=node, check=False).stdout
            )

        until(is_idle, what=logs)

    def free_gpus(self) -> int:
        """Return the number of GPUs that no job holds, on all nodes."""
        report = self.exec("sinfo -h -N -O Gres:40,GresUsed:60").stdout
        counts = [
            [int(word.split("(")[0].rsplit(":", 1)[1]) for word in line.split()]
            for line in report.splitlines()
        ]
        return sum(total - used for total, used in counts)

    def cancel(self) -> None:
        """Cancel the jobs submitted so far and wait until they hold nothing."""
        if self.jobs:
            ids = ",".join(map(str, self.jobs))
            self.exec(f"scancel {ids.replace(',', ' ')}", check=False)
            gone = f"! squeue -h -j {ids} | grep -q ."
            self.exec(f"for _ in $(seq 300); do {gone} && break; sleep 0.2; done")
            self.jobs.clear()


@contextmanager
def temporary_cluster(name: str, *options: str) -> Iterator[SlurmCluster]:
    """Start a cluster with these options of `cluster up`, and remove it at the end.

    Skips without Docker; fails if it does not start.
    """
    start_cluster(name, *options)
    try:
        yield SlurmCluster(name)
    finally:
        command = [str(CLUSTER_DIR / "cluster"), "--name", name, "down"]
        subprocess.run(command, capture_output=True, check=True)


def start_cluster(name: str, *options: str) -> None:
    """Start a cluster; skip without Docker."""
    command = [str(CLUSTER_DIR / "cluster"), "--name", name, "up", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == CANNOT_HAVE_DOCKER:
        lack("docker")
    assert done.returncode == 0, done.stderr.strip()
