"""One release of Slurm: the steps that are tried on it, in a small cluster of its own."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.container_cluster.selasticd import (
    Daemon,
    companions,
    eager_config,
    gpus,
    held,
    shown,
    total_gpus,
)
from tests.support.container_cluster.slurm_cluster import (  # puts clusterlib on the path
    CLUSTER_DIR,
    SlurmCluster,
    until,
)

# isort: split

from clusterlib.progress import ClusterError
from clusterlib.slurm_build import DEBIAN_RELEASE, choose
from clusterlib.slurm_build import series as series_of

#: Supported series, as `--slurm` takes them.
SERIES = ("23.11", "24.05", "24.11", "25.05", "25.11", "26.05")
#: Steps of a trial, in order: name → column of the table.
STEPS = {
    "install": "install",
    "observe": "observe",
    "check": "check",
    "grow": "grow",
    "shrink": "shrink",
    "lost_node": "lost node",
    "lost_slurmctld": "lost slurmctld",
    "usage": "usage",
    "in_place": "in place",
    "topologies": "topology of a partition",
    "power_saving": "power saving",
}
#: Steps that only newer releases can take: name → the first of them.
FIRST_RELEASE = {"topologies": (25, 5)}
#: topology.yaml: a default, and blocks for one partition, which share the name of a switch.
TOPOLOGY = """\
- topology: fabric
  cluster_default: true
  tree: {switches: [{switch: leaf, nodes: "g[01-03]"}]}
- topology: pods
  cluster_default: false
  block: {block_sizes: [1], blocks: [{block: leaf, nodes: g01}, {block: other, nodes: g02}]}
"""
#: A training that knows nothing of slurm-elastic, and its batch script.
TRAIN = Path(__file__).parents[1] / "packages" / "train"
FOLDER = "/shared/scratch/train"
SCRIPT = (
    f"exec esrun --checkpoint '{FOLDER}/step_*' --complete '{{}}.done' python3 {FOLDER}/train.py"
)
#: Power saving by programs that do nothing; no node is powered down for being idle.
POWER_SAVING = """\
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=1000000
SuspendTimeout=1
ResumeTimeout=1200
"""
#: Prints where the snapshots of both readers differ.
COMPARISON = Path(__file__).parents[1] / "cluster" / "drivers" / "compare_readers.py"
#: Changes of one job whose times are measured.
CHANGES = 4
#: Longest time between two rounds, seconds: what happens causes one, and rounds that change nothing
#: cost most of the CPU.
INTERVAL_S = 5
#: Pause between two looks, seconds.
LOOK_S = 1
_DONE = re.compile(r"Transition=\d+ .*State=DONE .*slurm:([0-9.]+)")


class ReleaseTrial:
    """The steps on a running cluster of three nodes, two of them with GPUs of type a100.

    `run` stops at the first step that fails, as later ones build on it. Its result is JSON:
    release, reader, seconds of each step that passed (None: this release does not have what it
    tries), failure, seconds of Slurm's part of changes.
    """

    def __init__(self, cluster: SlurmCluster, *, reader: str = "") -> None:
        self.cluster = cluster
        self.reader = reader
        self.extra = f'reader = "{reader}"\n' if reader else ""
        self.daemon = Daemon(cluster, self._config("observe"), reporters=("alice",))
        self.begun = cluster.exec("date +%Y-%m-%dT%H:%M:%S").stdout.strip()
        self.job = 0

    def run(self) -> dict[str, Any]:
        """Try every step and return the result."""
        version = self.cluster.exec(["scontrol", "--version"]).stdout.split()[-1]
        result: dict[str, Any] = {"release": version, "reader": self.reader, "steps": {}}
        step = ""
        try:
            for step in STEPS:
                if series_of(version) < FIRST_RELEASE.get(step, (0, 0)):
                    result["steps"][step] = None
                    continue
                begin = time.monotonic()
                getattr(self, f"_{step}")()
                result["steps"][step] = round(time.monotonic() - begin, 1)
            self.daemon.check_log()
        except AssertionError as error:
            result["failure"] = f"{step}: {error}"
        finally:
            result["slurm_s"] = [float(s) for s in _DONE.findall(self.daemon.log())]
            self.daemon.close()
        return result

    def _config(self, mode: str) -> str:
        return eager_config(mode=mode, interval=INTERVAL_S, extra=self.extra)

    def _install(self) -> None:
        """The plugin is loaded by sbatch, silently, and selasticd answers."""
        done = self.cluster.exec(["sbatch", "--help"], user="alice")
        assert "--elastic=MIN-MAX" in done.stdout, done.stderr or "sbatch has no --elastic"
        assert "plugin" not in done.stderr.lower(), done.stderr
        self.daemon.start()
        self.daemon.selastic("ping")
        self.daemon.selastic("status")

    def _observe(self) -> None:
        """A job starts with its MIN; the plan would grow it, and nothing is changed."""
        words = ("--elastic=1-4,types=a100", "--requeue", "-o/dev/null", "-t60")
        self.job = self.cluster.sbatch("exec sleep 3000", *words)
        self.cluster.wait(self.job, "RUNNING")
        self._until(lambda: self._planned() == 4, "the plan does not grow the job")
        assert (gpus(self.cluster, self.job), self._restarts()) == (1, 0)

    def _planned(self) -> int:
        plan = json.loads(self.daemon.selastic("plan", "--all", "--json"))
        return next((int(c["gpus"]) for c in plan["changes"] if c["job_id"] == self.job), 0)

    def _check(self) -> None:
        """`selastic check` finds no error."""
        done = self.cluster.exec(["selastic", "check", "--json"], user="selastic", check=False)
        errors = [f for f in json.loads(done.stdout)["findings"] if f["severity"] == "error"]
        assert done.returncode == 0, errors or done.stderr

    def _grow(self) -> None:
        """The job grows to its MAX; then it is resized several times by its owner."""
        self.daemon.configure(self._config("act"))
        self.daemon.signal("HUP")
        self._until_gpus(4)
        for change in range(CHANGES):
            size = 2 if change % 2 == 0 else 4
            self.daemon.selastic("update", str(self.job), f"--elastic=1-{size},types=a100")
            self._until_gpus(size)

    def _shrink(self) -> None:
        """A rigid job that needs GPUs of the elastic one gets them.

        Another one takes the other node first, so that one GPU is left: were two left, the elastic
        job could grow to both before its shrink is seen.
        """
        rigid = []
        for size in (4, 3):
            words = ("-N1", f"--gres=gpu:a100:{size}", "-t20", "-o/dev/null")
            rigid.append(self.cluster.sbatch("exec sleep 600", *words, user="bob"))
            self.cluster.wait(rigid[-1], "RUNNING")
        self._until_gpus(1)
        self.cluster.exec(["scancel", *map(str, rigid)])
        self._until_gpus(4)

    def _lost_node(self) -> None:
        """The job's node is killed: it runs on the other one, and the node comes back."""
        (node,) = held(self.cluster, self.job)
        restarts = self._restarts()
        container = f"{self.cluster.name}-{node}"
        subprocess.run(["docker", "kill", container], check=True, capture_output=True)
        try:
            self._until(
                lambda: {node}.isdisjoint(held(self.cluster, self.job) or {node}),
                "the job does not run on the other node",
            )
        finally:
            subprocess.run(["docker", "start", container], check=True, capture_output=True)
        assert self._restarts() > restarts
        state = ["sinfo", "-h", "-n", node, "-o", "%T"]
        self._until(lambda: "down" not in self.cluster.exec(state).stdout, "the node stays down")
        self._until_gpus(4)

    def _lost_slurmctld(self) -> None:
        """Slurmctld is killed and started again: the job runs on, and changes go on."""
        # slurmctld writes its state every 5 s, and forgets what is younger when it is killed.
        self._until(lambda: self._ran_s() > 10, "the job does not run for 10 s")
        before = self._restarts()
        kill = "pkill -9 slurmctld; while pgrep slurmctld >/dev/null; do sleep 0.1; done"
        self.cluster.exec(f"{kill}; cluster-start slurmctld")
        self._until(lambda: gpus(self.cluster, self.job) == 4, "the job does not run on")
        assert self._restarts() == before
        self.daemon.selastic("update", str(self.job), "--elastic=1-2,types=a100")
        self._until_gpus(2)

    def _usage(self) -> None:
        """`selastic usage` agrees with sacct on every run of the job."""
        # A run that ends before the controller's next look is counted only some minutes later.
        self._until(lambda: self._seen_run() == self._restarts(), "the last run is not seen")
        self.cluster.exec(["scancel", str(self.job)])
        self.cluster.wait(self.job, "CANCELLED")
        words = ["selastic", "usage", "--check", "-S", self.begun, "-u", "alice"]

        said = ""

        def agrees() -> bool:
            nonlocal said
            done = self.cluster.exec(words, user="alice", check=False)
            said = done.stdout + done.stderr
            return done.returncode == 0 and int(said.split()[0]) >= CHANGES

        until(agrees, every_s=LOOK_S, what=lambda: f"usage and sacct differ: {said}")

    def _in_place(self) -> None:
        """A training that is not prepared for it grows and shrinks by a companion."""
        make = f"rm -rf {FOLDER}; mkdir {FOLDER}; cat >{FOLDER}/train.py"
        self.cluster.exec(make, user="bob", stdin=TRAIN.read_text("utf-8"))
        # One GPU of each node is left: such a training has no companion on its own node.
        others = self.cluster.sbatch(
            "exec sleep 3000", "-N2", "--gres=gpu:a100:3", "-o/dev/null", "-t60"
        )
        self.cluster.wait(others, "RUNNING")
        words = ("--elastic=1-2,types=a100", "--requeue", "--open-mode=append", "-t60", "-olog")
        self.job = self.cluster.sbatch(SCRIPT, *words, user="bob", directory=FOLDER)
        self._until(
            lambda: total_gpus(self.cluster, self.job) == 2, "the training does not get two GPUs"
        )
        assert companions(self.cluster, self.job), "the training has grown by a requeue"
        restarts = self._restarts()
        self._until(lambda: not self._changing(), "the growth does not end")
        self.daemon.selastic("update", str(self.job), "--elastic=1-1,types=a100", user="bob")
        self._until(lambda: not companions(self.cluster, self.job), "the companion does not leave")
        self._until_gpus(1)
        assert self._restarts() == restarts, "the training was requeued"
        self.cluster.exec(["touch", f"{FOLDER}/end"], user="bob")
        self.cluster.wait(self.job, "COMPLETED")
        self.cluster.exec(["scancel", str(others)])

    def _changing(self) -> bool:
        job = json.loads(self.daemon.selastic("show", str(self.job), "--json"))
        return bool(job["job"]["transition"])

    def _topologies(self) -> None:
        """A node stands in the topology of its partition, else in the cluster's default."""
        for host in ("ctld", "g01", "g02", "g03"):
            self.cluster.exec("cat >/etc/slurm/topology.yaml", stdin=TOPOLOGY, node=host)
            line = "PartitionName=pods Nodes=g[01-02] Topology=pods State=UP"
            add = f"grep -qxF '{line}' slurm.conf || echo '{line}' >>slurm.conf"
            self.cluster.exec(f"cd /etc/slurm; {add}", node=host)  # an earlier trial has it, too
        self.cluster.exec(["scontrol", "reconfigure"])
        self._until(lambda: "Topology=pods" in self._partitions(), "there is no partition pods")
        self.daemon.stop()
        self.daemon.start()
        self._until(
            lambda: self._switch_of_nodes() == {"g01": "pods/leaf", "g02": "other", "g03": "leaf"},
            "the nodes are not in the topologies of their partitions",
        )

    def _power_saving(self) -> None:
        """A node that is powered down is not available; a job that Slurm starts there grows."""
        add = "grep -q ^SuspendProgram slurm.conf || cat >>slurm.conf"
        self.cluster.exec(f"cd /etc/slurm; {add}", stdin=POWER_SAVING)
        self.cluster.exec(["scontrol", "reconfigure"])
        self.cluster.exec("scontrol update NodeName=g03 State=POWER_DOWN_FORCE")
        self._until(lambda: "POWERED_DOWN" in self._state_of("g03"), "g03 is not powered down")
        self._until(lambda: not self._available("g03"), "a node without power counts as available")
        self._compare_readers()
        self.job = self.cluster.sbatch(
            "exec sleep 3000", "--elastic=1-2,types=v100", "--requeue", "-o/dev/null", "-t60"
        )
        self._until(lambda: "POWERING_UP" in self._state_of("g03"), "g03 is not powered up")
        self._compare_readers()
        # A node has power again when its slurmd starts; -b: the host was started, too.
        stop = "pkill slurmd; while pgrep slurmd >/dev/null; do sleep 0.1; done"
        self.cluster.exec(f"{stop}; slurmd -N g03 -b", node="g03")
        self._until_gpus(2)
        self.cluster.exec(["scancel", str(self.job)])

    def _state_of(self, node: str) -> str:
        return self.cluster.exec(["scontrol", "-o", "show", "node", node]).stdout

    def _available(self, node: str) -> bool:
        answer = json.loads(self.daemon.selastic("topology", "--json"))
        return next(bool(n["available"]) for n in answer["nodes"] if n["name"] == node)

    def _compare_readers(self) -> None:
        """Where pyslurm is in use, JSON makes the same snapshot."""
        if "through pyslurm" not in self.daemon.selastic("ping"):
            return
        command = ["/opt/slurm-elastic/bin/python", "-"]
        done = self.cluster.exec(command, user="selastic", stdin=COMPARISON.read_text("utf-8"))
        assert json.loads(done.stdout.splitlines()[-1])["differences"] == []

    def _partitions(self) -> str:
        return self.cluster.exec(["scontrol", "-o", "show", "partition"]).stdout

    def _switch_of_nodes(self) -> dict[str, str]:
        answer = json.loads(self.daemon.selastic("topology", "--json"))
        return {node["name"]: node["switch"] for node in answer["nodes"]}

    def _seen_run(self) -> int:
        """Return the run that the controller has seen running; -1: none."""
        job = json.loads(self.daemon.selastic("show", str(self.job), "--json"))
        return int(job["run"]) if job["job"]["state"] == "RUNNING" else -1

    def _restarts(self) -> int:
        return int(shown(self.cluster, self.job)["restart_cnt"])

    def _ran_s(self) -> float:
        start = shown(self.cluster, self.job)["start_time"]["number"]
        return float(self.cluster.exec("date +%s").stdout) - start

    def _until_gpus(self, count: int) -> None:
        self._until(
            lambda: gpus(self.cluster, self.job) == count, f"the job does not get {count} GPUs"
        )

    def _until(self, happens: Callable[[], object], what: str) -> None:
        def state() -> str:
            rounds = re.compile(r".* Round Seconds=.*\n")
            explained = self.daemon.selastic("explain", str(self.job), check=False)
            shown = "scontrol show job -d; scontrol show node; tail -40 /var/log/slurm/*ctld.log"
            return (
                f"{what}; {explained}; the log ends: {rounds.sub('', self.daemon.log())[-2000:]}"
                f"; Slurm: {self.cluster.exec(shown, check=False).stdout}"
            )

        until(happens, every_s=LOOK_S, what=state)


def missing(series: str) -> str:
    """Return why a release cannot be tried here; "" if it can."""
    try:
        choose(series)
    except ClusterError as error:
        return str(error)
    return ""


def readers_of(series: str, *, pyslurm: bool) -> tuple[str, ...]:
    """Return the readers that this release is tried with: pyslurm where the image has it."""
    has_pyslurm = pyslurm or choose(series).release == DEBIAN_RELEASE
    return ("pyslurm", "json") if has_pyslurm else ("json",)


def try_release(
    series: str, *, name: str, readers: tuple[str, ...] = ("",), pyslurm: bool = False
) -> list[dict[str, Any]]:
    """Start a cluster of this release, run a trial with each reader, and remove the cluster.

    Args:
        series: for example "25.11".
        name: of the cluster.
        readers: values of `[slurm] reader`; "": the configuration does not say.
        pyslurm: build the package index's pyslurm of that release into the image.
    """
    command = [str(CLUSTER_DIR / "cluster"), "--name", name]
    options = ["--slurm", series, "--nodes", "3", *(["--pyslurm"] if pyslurm else [])]
    up = subprocess.run([*command, "up", *options], capture_output=True, text=True, check=False)
    try:
        if up.returncode:
            failure = f"install: {(up.stderr.strip().splitlines() or ['no message'])[-1]}"
            return [{"release": series, "reader": "", "steps": {}, "failure": failure}]
        return [ReleaseTrial(SlurmCluster(name), reader=reader).run() for reader in readers]
    finally:
        subprocess.run([*command, "down", "--images"], capture_output=True, check=False)
