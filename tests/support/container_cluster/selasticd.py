"""A selasticd of the test's own in ctld, and a stand-in for the esrun of sleeping jobs."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.support.container_cluster.slurm_cluster import WAIT_FACTOR, SlurmCluster, until

REPORTER = Path(__file__).parents[2] / "cluster" / "drivers" / "reporter.py"
PYTHON = "/opt/slurm-elastic/bin/python"
ADDRESS = "ctld:7321"
#: Section of a configuration, and what asks for the metrics on the same host.
METRICS = '[metrics]\nlisten = "127.0.0.1:9341"\n'
SCRAPE = """
import urllib.request
request = urllib.request.Request(
    "http://127.0.0.1:9341/metrics", headers={"Accept": "application/openmetrics-text"}
)
print(urllib.request.urlopen(request, timeout=15).read().decode(), end="")
"""

#: Configuration without waiting times.
EAGER = """
[controller]
mode = "{mode}"
policy = "{policy}"
queue = "{queue}"
interval_s = {interval}
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
plan_trials = {plan_trials}
keep_s = {keep}
[speedup]
types = {{ a100 = 2.0, v100 = 1.0 }}
[slurm]
lease_s = 60
"""


class Daemon:
    """A running selasticd, its log, and reporters for sleeping jobs.

    Args:
        cluster: cluster on which it runs.
        text: contents of elastic.toml; "{state}" is replaced by a fresh directory.
        reporters: users whose sleeping jobs are reported, and save on a notice.
    """

    #: Node on which it runs.
    NODE = "ctld"

    def __init__(
        self,
        cluster: SlurmCluster,
        text: str = "",
        *,
        reporters: tuple[str, ...] = ("alice", "bob"),
    ) -> None:
        self.cluster = cluster
        make = "d=$(mktemp -d /tmp/selasticd.XXXXXX) && chmod 755 $d && echo $d"
        self.home = cluster.exec(make, user="selastic", node=self.NODE).stdout.strip()
        self.log_path = f"{self.home}/log"
        self.configure(text or eager_config())
        write = "mkdir -p /tmp/drivers && cat >/tmp/drivers/reporter.py"
        cluster.exec(write, stdin=REPORTER.read_text())
        self._reporters = [self._start_reporter(user) for user in reporters]
        self.pid = 0

    def configure(self, text: str) -> None:
        """Write the configuration."""
        text = text.replace("{state}", self.home)
        self.cluster.exec(
            f"cat >{self.home}/elastic.toml", user="selastic", node=self.NODE, stdin=text
        )

    def _start_reporter(self, user: str) -> tuple[str, str]:
        out = f"/tmp/reporter-{user}"
        command = f"{PYTHON} /tmp/drivers/reporter.py {ADDRESS} </dev/null >{out} 2>&1 & echo $!"
        return user, self.cluster.exec(command, user=user).stdout.strip()

    def start(self, *, ready: bool = True) -> None:
        """Start selasticd; with `ready`, wait until it has begun to act."""
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
        """Return whether the process exists."""
        return self.cluster.exec(f"kill -0 {self.pid}", node=self.NODE, check=False).returncode == 0

    def signal(self, name: str) -> None:
        """Send the process a signal."""
        self.cluster.exec(f"kill -{name} {self.pid}", node=self.NODE)

    def stop(self) -> None:
        """Send SIGTERM, and wait for the end."""
        self.cluster.exec(
            f"kill {self.pid}; while kill -0 {self.pid}; do sleep 0.05; done",
            node=self.NODE,
            check=False,
        )

    @property
    def kill_command(self) -> str:
        """Shell command that sends SIGKILL and waits for the end."""
        return f"kill -9 {self.pid}; while kill -0 {self.pid} 2>/dev/null; do sleep 0.05; done"

    def kill(self) -> None:
        """Send SIGKILL, and wait for the end."""
        self.cluster.exec(self.kill_command, node=self.NODE, check=False)

    def close(self) -> None:
        """Stop jobs, selasticd and reporters; remove our reservations."""
        self.cluster.cancel()
        self.stop()
        for user, pid in self._reporters:
            self.cluster.exec(f"kill {pid}", user=user, check=False)
        for name in reservations(self.cluster):
            self.cluster.exec(["scontrol", "delete", f"ReservationName={name}"], check=False)

    def log(self) -> str:
        """Return the log so far."""
        return self.cluster.exec(f"cat {self.log_path} 2>/dev/null || true", node=self.NODE).stdout

    def check_log(self, *, after: int = 0) -> None:
        """Fail if the log, after so many characters, has an internal error."""
        log = self.log()[after:]
        assert "Traceback" not in log, log
        assert "internal error" not in log, log

    def wait_for(self, pattern: str, *, after: int = 0, timeout: float = 60) -> re.Match[str]:
        """Wait for a match in the log, after so many characters, and return it."""
        log = ""
        match = None

        def there() -> re.Match[str] | None:
            nonlocal log, match
            log = self.log()
            match = re.compile(pattern).search(log, after)
            return match

        until(there, seconds=timeout, what=lambda: f"no {pattern!r} in\n{log[after:]}")
        assert match
        return match

    def when(
        self,
        job: int | str,
        state: str,
        command: str,
        *,
        action: str = "",
        user: str = "root",
        first: str = ":",
    ) -> None:
        """Run `first`, then a command as soon as the job's next transition enters a state.

        With `action`, e.g. "grow", other transitions are left out.
        """
        # One process reads the log continuously: a state lasts a third of a second.
        lines = f"tail -c +$((begun + 1)) -s 0.01 -f {self.log_path}"
        mark = f"JobId={job} Transition=.* State={state} Action={action}"
        quiet = "</dev/null 2>/dev/null"  # tail ends shortly after the script
        wait = f"grep -q -m1 '{mark}' < <(timeout {WAIT_FACTOR * 100:.0f} {lines} {quiet})"
        script = f"begun=$(stat -c %s {self.log_path}); {first}; {wait} || exit; {command}"
        done = self.cluster.exec(script, user=user, node=self.NODE, timeout=150, check=False)
        assert done.returncode == 0, f"job {job} was not in {state}: {done}\n{self.log()}"

    def selastic(self, *words: str, user: str = "alice", check: bool = True) -> str:
        """Run `selastic` and return its output."""
        done = self.cluster.exec(["selastic", *words], user=user, check=check)
        return done.stdout + done.stderr

    def metrics(self) -> dict[tuple[str, ...], float]:
        """Return the samples of one scrape, by name and values of the labels in their order.

        The configuration has `METRICS`.
        """
        text = self.cluster.exec([PYTHON, "-c", SCRAPE], node=self.NODE).stdout
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@contextmanager
def running(
    cluster: SlurmCluster, text: str = "", *, reporters: tuple[str, ...] = ("alice", "bob")
) -> Iterator[Daemon]:
    """Run a `Daemon` until the end of the context."""
    daemon = Daemon(cluster, text, reporters=reporters)
    try:
        daemon.start()
        yield daemon
    finally:
        daemon.close()


@contextmanager
def leaves_no_trace(daemon: Daemon) -> Iterator[None]:
    """Check at the end: selasticd runs, no reservation is left, no internal error was logged."""
    begun = len(daemon.log())
    yield
    daemon.cluster.cancel()
    assert daemon.runs()
    until(lambda: not reservations(daemon.cluster), what="reservations are left")
    daemon.check_log(after=begun)


def eager_config(
    *,
    mode: str = "act",
    policy: str = "fair",
    queue: str = "slurm",
    keep: float = 120,
    plan_trials: float = 0.05,
    interval: float = 2,
    extra: str = "",
) -> str:
    """Return a configuration without waiting times."""
    text = EAGER.format(
        mode=mode,
        policy=policy,
        queue=queue,
        keep=keep,
        plan_trials=plan_trials,
        interval=interval,
        state="{state}",
    )
    return text + extra


def submit_running(cluster: SlurmCluster, *options: str, directive: str = "1-4") -> int:
    """Submit a sleeping job of alice's on rack 2's a100; return its id once it runs."""
    job = cluster.sbatch(
        "exec sleep 600", f"--elastic={directive}", "-o/dev/null", "-Ca100&rack2", *options
    )
    cluster.wait(job, "RUNNING")
    return job


def shown(cluster: SlurmCluster, job: int | str) -> dict[str, Any]:
    """Return one job as slurmctld shows it."""
    text = cluster.exec(["scontrol", "show", "job", str(job), "-d", "--json"]).stdout
    task = int(str(job).partition("_")[2] or -1)  # Slurm shows the whole array
    jobs = json.loads(text)["jobs"]
    return next((j for j in jobs if task in (-1, j["array_task_id"]["number"])), jobs[0])


def held(cluster: SlurmCluster, job: int | str) -> dict[str, int]:
    """Return the GPUs of a running job by node; {} if it does not run, or they are not known."""
    record = shown(cluster, job)
    if record["job_state"] != ["RUNNING"]:
        return {}
    nodes = [record["nodes"]]
    if "[" in record["nodes"] or "," in record["nodes"]:
        nodes = cluster.exec(["scontrol", "show", "hostnames", *nodes]).stdout.split()
    counts = [int(g.split("(")[0].split(":")[-1]) for g in record["gres_detail"]]
    return dict(zip(nodes, counts, strict=True)) if len(nodes) == len(counts) else {}


def gpus(cluster: SlurmCluster, job: int | str) -> int:
    """Return the number of GPUs of a running job."""
    return sum(held(cluster, job).values())


def companions(cluster: SlurmCluster, job: int, states: str = "PD,R,CG") -> list[int]:
    """Return the companions of a job in these states of Slurm."""
    text = cluster.exec(f"squeue -h -o '%A %k' -t {states}").stdout
    found = re.findall(rf"^(\d+) selastic:companion:{job}:", text, re.MULTILINE)
    return [int(companion) for companion in found]


def total_gpus(cluster: SlurmCluster, job: int) -> int:
    """Return the number of GPUs of a running job and its companions."""
    return sum(gpus(cluster, one) for one in (job, *companions(cluster, job)))


def reservations(cluster: SlurmCluster) -> list[str]:
    """Return the names of our reservations."""
    text = cluster.exec("scontrol -o show res | grep -oE 'selastic_[0-9]+' || true").stdout
    return sorted(set(text.split()))


def run_concurrently(*functions: Callable[[], object]) -> None:
    """Call all functions at once, each in a thread; raise the first error."""
    errors: list[BaseException] = []

    def run(function: Callable[[], object]) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    threads = [threading.Thread(target=run, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
