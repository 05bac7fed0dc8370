"""The cluster of a campaign: selasticd and its helpers, and the effects of faults so far."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.chaos.invariants import COMPANION, RESUME_TIMEOUT_S
from tests.chaos.load import HOME, SMALL
from tests.support.container_cluster import light_trainings, power_saving
from tests.support.container_cluster.selasticd import PYTHON, REPORTER, eager_config
from tests.support.container_cluster.slurm_cluster import SlurmCluster

DRIVERS = Path(__file__).parent / "drivers"
#: The ledger's own small file system; filled by `ledger-full`.
STATE = "/dev/shm/chaos"
_FAKE = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"
_CLOCK = "/tmp/chaos-clock"
#: Faults during which selasticd cannot repair anything.
CONTROL = (
    *("selasticd-kill", "slurmctld-kill", "slurmctld-stop", "munged-kill", "ctld-cut"),
    *("ledger-full", "ledger-truncated", "ledger-deleted", "orphan", "id-reuse"),
    *("selasticd-in-place", "selasticd-stop", "selasticd-restart"),
)
#: Faults during which esrun may be unable to start the guard steps that stop ranks.
UNGUARDED = (
    *("slurmctld-kill", "slurmctld-stop", "munged-kill", "node-munged-kill", "slurmd-kill"),
    *("slurmd-lost", "node-kill", "node-cut", "node-cut-lost", "ctld-cut", "orphan", "id-reuse"),
    *("companion-node", "companion-cut", "slurmd-stop", "esrun-stop"),
)
#: Seconds after a fault in which it may be the cause that a job has failed.
FAILING_S = 120.0
#: Jobs submitted within this time before slurmctld is killed may be lost: it saves every 5 s.
UNSAVED_S = 10.0
#: A node is switched on by hand when Slurm has waited for it in vain for so many seconds.
_BY_HAND_S = 20.0
#: What slurmctld's log says when it requeues job {0} by itself.
_REQUEUED_BY_SLURM = (
    r"requeue job JobId={0} due to failure of node"
    r"|Duplicate jobid on nodes .*\n(?:.*\n){{0,3}}.*Requeuing JobId={0}$"
)
_LINE = re.compile(r"JobId=(\S+) Transition=(\d+) State=([A-Z]+)\b|selasticd \S+ Mode=")


class ChaosSite:
    """State of the cluster during a campaign.

    Attributes:
        samples: samples of drivers/observer.py so far.
        active: kinds of the faults under way, repeated if there are several of a kind.
        cancelled: names of jobs that a user of the campaign has cancelled.
        disturbed: name → epoch until which a fault may cause a restart of the job.
        struck: name → epoch of the last such fault.
        lost: names of jobs that slurmctld has lost.
        hit: node → epoch of its last fault.
        crashes: epochs when slurmctld was killed.
        reniced: names of jobs whose nice value a user of the campaign has changed.
        unreachable: nodes that slurmctld gave up while jobs ran on them: it runs those twice.
    """

    def __init__(
        self, cluster: SlurmCluster, queue: str, *, nodes: Sequence[str], sleep: bool = False
    ) -> None:
        self.cluster, self.queue, self.nodes, self.sleep = cluster, queue, nodes, sleep
        self.home = cluster.exec("mktemp -d /tmp/chaosd.XXXXXX", user="selastic").stdout.strip()
        self.log_path = f"{self.home}/log"
        self.samples: list[dict[str, Any]] = []
        self.active: list[str] = []
        self.cancelled: set[str] = set()
        self.disturbed: dict[str, float] = {}
        self.struck: dict[str, float] = {}
        self.holding: dict[str, float] = {}
        self.lost: set[str] = set()
        self.crashes: list[float] = []
        self.reniced: set[str] = set()
        self.unreachable: set[str] = set()
        self.hit: dict[str, float] = {}
        self.wanted = False
        self.pid = 0
        self.locks: dict[str, threading.Lock] = {}
        self._conf = cluster.exec("cat /etc/slurm/slurm.conf").stdout
        self._pids: list[int] = []
        self._begun = 0  # how long the log was when selasticd was last started
        self._guard = threading.RLock()
        self._observer: subprocess.Popen[str] | None = None
        self._cleanup = ExitStack()
        self._down_since: dict[str, float] = {}

    # --- setting up ---

    def prepare(self) -> None:
        """Install drivers and folders; start the proxy and the reporters."""
        run = self.cluster.exec
        for left in (
            "selasticd -v -D",
            "chaos/observer.py",
            "chaos/proxy.py",
            "chaos/reporter.py",
        ):
            run(["pkill", "-9", "-f", left], check=False)  # of a campaign that was interrupted
        run('scancel -u alice; scancel -u bob; until [ -z "$(squeue -h)" ]; do sleep 0.5; done')
        run(f"chmod 755 {self.home}")
        small = f"mountpoint -q /small && ln -sfn /small {SMALL} || install -d -m 1777 {SMALL}"
        run(f"rm -rf {HOME}/*-s*n* /small/* {SMALL} {STATE}; install -d -m 1777 {HOME}; {small}")
        run(f"install -d -o selastic {STATE}; rm -f /dev/shm/fill /small/fill")
        for path in (REPORTER, *DRIVERS.glob("*.py")):
            run(f"cat >{HOME}/{path.name}", stdin=path.read_text())
        if self.sleep:
            power = power_saving.power_saving(self.cluster, resume_timeout_s=RESUME_TIMEOUT_S)
            self._cleanup.enter_context(power)
        light_trainings.install(run, HOME)
        run(f"echo +0 >{_CLOCK}; echo 0 >/tmp/chaos-proxy; chmod 666 {_CLOCK}")
        self.configure(self.toml())
        proxy = f"{PYTHON} {HOME}/proxy.py 7331 127.0.0.1:7321 /tmp/chaos-proxy"
        self._pids = [int(run(f"{proxy} </dev/null >/tmp/chaos-proxy.log 2>&1 & echo $!").stdout)]
        for user in ("alice", "bob"):  # like a unit with Restart=always
            loop = f"while :; do {PYTHON} {HOME}/reporter.py ctld:7331; sleep 1; done"
            begun = run(f"({loop}) </dev/null >/tmp/chaos-{user} 2>&1 & echo $!", user=user)
            self._pids.append(int(begun.stdout))

    def toml(self) -> str:
        """Return selasticd's configuration."""
        sleep = power_saving.SLEEP.format(mode="act") if self.sleep else ""
        # Plans are tried within trainings that last two minutes.
        text = eager_config(queue=self.queue, extra=sleep, plan_trials=1)
        return text.replace("{state}", STATE)

    def configure(self, text: str) -> None:
        """Write selasticd's configuration."""
        self.cluster.exec(f"cat >{self.home}/elastic.toml", user="selastic", stdin=text)

    def observe(self) -> Iterator[dict[str, Any]]:
        """Yield samples until `close` is called."""
        words = ["docker", "exec", "-i", f"{self.cluster.name}-ctld", PYTHON]
        self._observer = subprocess.Popen(
            [*words, f"{HOME}/observer.py", self.home, *(["nodes"] if self.sleep else [])],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._observer.stdout is not None
        for line in self._observer.stdout:
            sample = json.loads(line)
            self.samples.append(sample)
            yield sample
        self._observer.stdout.close()

    def close(self) -> None:
        """Stop what was started, and undo faults."""
        self.kill_daemon()
        words = " ".join(map(str, self._pids))
        run = self.cluster.exec
        run(f"for p in {words}; do pkill -P $p; kill $p; done", check=False)
        run(f"rm -rf /dev/shm/fill /small/fill {STATE}", check=False)
        if self._observer:
            self._observer.terminate()
            self._observer.wait()
        self._cleanup.close()

    def docker(self, *words: str) -> None:
        """Run a Docker command; a failure is an error of the campaign."""
        done = subprocess.run(["docker", *words], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"docker {' '.join(words)}: {done.stderr}"

    def address(self, host: str) -> str:
        """Return a host's address, from the containers' common slurm.conf."""
        if host == "ctld":
            pattern = r"^SlurmctldHost=ctld\((\S+)\)"
        else:
            pattern = rf"^NodeName={host} .*NodeAddr=(\S+)"
        match = re.search(pattern, self._conf, re.MULTILINE)
        assert match, host
        return match[1]

    # --- nodes ---

    def after_boot(self, node: str) -> None:
        """Start what a node needs, when its container has been started."""
        if self.sleep:
            power_saving.start_hardware(self.cluster, node)

    def switch_on(self, sample: dict[str, Any]) -> list[str]:
        """Switch nodes on by hand, as an administrator, for which Slurm waits in vain.

        Those are nodes that did not boot in time, and nodes of which a killed slurmctld has
        forgotten that they were switched off.
        """
        switched_on = []
        for node, words in (sample["nodes"] or {}).items():
            is_down = {"DOWN", "UNKNOWN"} & set(words) and not self.lock(node).locked()
            since = self._down_since.setdefault(node, sample["at"]) if is_down else 0.0
            if not is_down:
                self._down_since.pop(node, None)
            elif sample["at"] - since > _BY_HAND_S:
                power_saving.switch_on_by_hand(self.cluster, node)
                del self._down_since[node]
                switched_on.append(node)
        return switched_on

    # --- selasticd ---

    @property
    def state(self) -> str:
        """Folder of the ledger."""
        return STATE

    def runs(self) -> bool:
        """Return whether selasticd's process exists."""
        return self.cluster.exec(f"kill -0 {self.pid}", check=False).returncode == 0

    def comes_up(self) -> bool:
        """Wait until the process that was just started acts, or has ended; return which."""
        end = time.monotonic() + 60
        while self.runs() and time.monotonic() < end:
            if "Mode=" in self.log()[self._begun :]:
                return True
            time.sleep(0.5)
        return self.runs()

    def start_daemon(self) -> None:
        """Start selasticd with a clock that the campaign controls."""
        fake = (
            f"LD_PRELOAD={_FAKE} FAKETIME_TIMESTAMP_FILE={_CLOCK} FAKETIME_CACHE_DURATION=1"
            " FAKETIME_DONT_FAKE_MONOTONIC=1 DONT_FAKE_MONOTONIC=1 FAKETIME_SKIP_CMDS=scontrol"
        )
        if self.sleep:
            power_saving.remember_idle_day(self.cluster, f"{STATE}/ledger.sqlite")
        self._begun = len(self.log())
        command = f"{fake} selasticd -v -D --config {self.home}/elastic.toml"
        started = self.cluster.exec(
            f"cd /; {command} </dev/null >>{self.log_path} 2>&1 & echo $! | tee {self.home}/pid",
            user="selastic",
        )
        self.pid, self.wanted = int(started.stdout), True

    def kill_daemon(self) -> None:
        """Send SIGKILL to selasticd."""
        self._end_daemon("KILL")

    def stop_daemon(self) -> None:
        """Send SIGTERM to selasticd."""
        self._end_daemon("TERM")

    def _end_daemon(self, signal: str) -> None:
        """Send selasticd a signal that ends it, and wait for its end."""
        self.wanted = False
        wait = f"kill -{signal} {self.pid}; while kill -0 {self.pid}; do sleep 0.05; done"
        if self.pid:
            self.cluster.exec(f"({wait}) 2>/dev/null", check=False)

    def clock(self, seconds: int) -> None:
        """Set the error of selasticd's clock."""
        # libfaketime ends a process that reads an empty file.
        self.cluster.exec(f"echo {seconds:+d} >{_CLOCK}.new && mv {_CLOCK}.new {_CLOCK}")

    def proxy(self, word: str) -> None:
        """Set the proxy's delay in seconds, or `cut`."""
        self.cluster.exec(f"echo {word} >/tmp/chaos-proxy")

    def log(self) -> str:
        """Return selasticd's log so far."""
        return self.cluster.exec(f"cat {self.log_path} 2>/dev/null || true").stdout

    # --- jobs ---

    def jobs(self) -> list[dict[str, Any]]:
        """Return the jobs of the last sample that have not ended, without companions."""
        return [j for j in self._present() if not j["comment"].startswith(COMPANION)]

    def companions(self) -> list[dict[str, Any]]:
        """Return the companions of the last sample that have not ended."""
        return [j for j in self._present() if j["comment"].startswith(COMPANION)]

    def _present(self) -> list[dict[str, Any]]:
        known = next((s["jobs"] for s in reversed(self.samples) if s["jobs"] is not None), [])
        return [j for j in known if not j["ended"]]

    def moving(self) -> list[str]:
        """Return names of jobs in transition, preferred targets of faults."""
        tail = self.cluster.exec(f"tail -c 20000 {self.log_path} 2>/dev/null || true").stdout
        ids = {job for job, _, _ in live_at(tail)}
        return [j["name"] for j in self.jobs() if str(j["id"]) in ids]

    def healthy(self) -> bool:
        """Return whether selasticd can repair leftovers now."""
        return self.wanted and not any(kind in CONTROL for kind in self.active)

    # --- effects of faults ---

    def disturb(self, names: list[str], seconds: float = 300.0) -> None:
        """Note that Slurm may restart these jobs."""
        for name in names:
            self.disturbed[name] = time.time() + seconds
            self.struck[name] = time.time()

    def excused(self, rule: str, name: str) -> bool:
        """Return whether the campaign itself caused a breach."""
        now = time.time()
        if rule == "held":
            return now < self.holding.get(name, 0.0)
        if rule == "restarted":
            return name in self.disturbed or self._was_hit(name) or self._requeued_by_slurm(name)
        if rule == "failed":
            return now < self.struck.get(name, 0.0) + FAILING_S
        if rule == "nice":
            return name in self.reniced
        return rule == "vanished" and name in self.lost

    def _was_hit(self, name: str) -> bool:
        """Return whether a job was started on a node that Slurm did not yet know to be dead."""
        hit = {node for node, at in self.hit.items() if time.time() - at < 120}
        jobs = (j for s in self.samples[-60:] for j in s["jobs"] or () if j["name"] == name)
        return any(not hit.isdisjoint(j["held"]) for j in jobs)

    def _requeued_by_slurm(self, name: str) -> bool:
        """Return whether slurmctld says that it has requeued a job by itself.

        After a standstill it gives up nodes that have not answered meanwhile; and a node that runs
        a job which slurmctld has forgotten refuses the next one of the same number.
        """
        numbers = {
            j["id"] for s in self.samples[-60:] for j in s["jobs"] or () if j["name"] == name
        }
        log = self._slurmctld_log()
        return any(re.search(_REQUEUED_BY_SLURM.format(n), log, re.MULTILINE) for n in numbers)

    def start_forgotten(self, number: int) -> bool:
        """Return whether slurmctld was killed before it saved that this job had started."""
        return f"Registered PENDING JobId={number} " in self._slurmctld_log()

    def _slurmctld_log(self) -> str:
        return self.cluster.exec("cat /var/log/slurm/slurmctld.log").stdout

    @contextmanager
    def fault(self, kind: str) -> Iterator[None]:
        """Note a kind of fault as active during the context."""
        with self._guard:
            self.active.append(kind)
        try:
            yield
        finally:
            with self._guard:
                self.active.remove(kind)

    def lock(self, what: str) -> threading.Lock:
        """Return the lock of a part, so that one fault at a time affects it."""
        with self._guard:
            return self.locks.setdefault(what, threading.Lock())


def live_at(log: str) -> list[tuple[str, int, str]]:
    """Return (job, transition, state) of those that had not ended at the end of this log.

    A fresh ledger numbers from 1 again: transitions of the old one are no longer live.
    """
    last: dict[int, tuple[str, str]] = {}
    before: set[int] = set()  # known when selasticd was last started
    for found in _LINE.finditer(log):
        if found[1] is None:
            before = set(last)
            continue
        job, number, state = found[1], int(found[2]), found[3]
        if number in before and last[number][0] != job:
            for old in before:
                del last[old]
            before = set()
        last[number] = (job, state)
    return [
        (job, number, state)
        for number, (job, state) in last.items()
        if state not in ("DONE", "UNDONE", "ENDED")
    ]
