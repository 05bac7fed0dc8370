"""Two kinds of trainings on shared cores: pairs by what was learned, against pairs by packing.

    python -m benchmarks.colocation.shared_cores [--seconds 60] [--rounds 1] [--json]

A container cluster of its own has two nodes with two a100 (emulated) and one core each. Two
trainings keep a core busy, two mostly wait for data (shared_core_training.py). Alone, all make as
many steps a second.

1. The controller learns: one training of each kind alone on a node, then both of a kind on one.
2. Four trainings are submitted at a time, and the controller chooses their nodes: `learned` with
   `[neighbours] mode = "act"`, `packed` with "observe", which fills one node before the next.
   In the order learned, packed, packed, learned (A-B-B-A), as often as `--rounds` says.

Printed: steps per second of all four in each phase, who shared a node with whom, and the ratio of
both means. Noise: the largest difference of two phases of a kind, relative to their mean. The paper
(Zacarias et al., JPDC 2021) reports 7 % on average for the best mix of jobs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.support.two_core_cluster import NODES, two_cores
from tests.support.container_cluster.selasticd import Daemon, held, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster, until

NAME = "shared-cores"
HOME = "/shared/home/alice/shared-cores"
PROGRAM = Path(__file__).with_name("shared_core_training.py")
KINDS = ("computing", "loading")
#: Measurements of a pair that decisions need (`shared_speeds.ENOUGH`).
PAIRS = 2
#: Seconds in which the time alone is measured: a measurement takes 30 s of step times.
ALONE_S = 100.0
#: Longest wait for the measurements of pairs.
PATIENCE_S = 400.0
#: Seconds of a phase that are left out: Python starts, and steps have not settled.
SETTLING_S = 10.0
CONFIG = """
[controller]
mode = "act"
policy = "fair"
queue = "controller"
interval_s = 2
poll_s = 0.5
state_dir = "{state}"
[api]
controller = "ctld:7321"
[neighbours]
mode = "MODE"
"""


class SharedCores:
    """Phases on a cluster that is up.

    Args:
        cluster: of two nodes.
        daemon: selasticd.
        seconds: measured part of each phase.
    """

    def __init__(self, cluster: SlurmCluster, daemon: Daemon, seconds: float) -> None:
        self.cluster, self.daemon, self.seconds = cluster, daemon, seconds
        self._jobs: dict[int, str] = {}  # file of steps, by job
        self._submitted = 0

    def learn(self) -> dict[str, float]:
        """Let the controller measure each kind alone, and two of a kind on one node.

        Returns:
            Speed beside one of its kind, relative to that alone, as the controller has it.
        """
        first = [self._submit(kind, f"-w{node}") for kind, node in zip(KINDS, NODES, strict=True)]
        for job in first:
            self.cluster.wait(job, "RUNNING")
        time.sleep(ALONE_S)
        second = [self._submit(kind, f"-w{node}") for kind, node in zip(KINDS, NODES, strict=True)]
        until(
            lambda: all(self._neighbour(job)["measured"] >= PAIRS for job in (*first, *second)),
            seconds=PATIENCE_S,
            what=self.daemon.log,
        )
        speeds = {k: self._neighbour(job)["speed"] for k, job in zip(KINDS, first, strict=True)}
        self._end()
        return speeds

    def phase(self, mode: str) -> dict[str, Any]:
        """Run two trainings of each kind on nodes that the controller chooses.

        Args:
            mode: of `[neighbours]`.
        """
        self.daemon.configure(CONFIG.replace("MODE", mode))
        self.daemon.selastic("reconfigure", user="root")
        jobs = {self._submit(kind): kind for kind in KINDS for _ in range(2)}
        for job in jobs:
            self.cluster.wait(job, "RUNNING")
        for name in self._jobs.values():
            until(partial(self._steps, name), what=f"no step in {name}")
        time.sleep(SETTLING_S)
        begin = time.time()
        time.sleep(self.seconds)
        end = time.time()
        counts = {
            kind: sum(
                sum(begin <= at < end for at in self._steps(self._jobs[job]))
                for job, its_kind in jobs.items()
                if its_kind == kind
            )
            for kind in KINDS
        }
        places: dict[str, list[str]] = {}
        for job, kind in jobs.items():
            for node in held(self.cluster, job):
                places.setdefault(node, []).append(kind)
        self._end()
        return {
            "choice": "learned" if mode == "act" else "packed",
            "pairs": sorted("+".join(sorted(kinds)) for kinds in places.values()),
            "steps_per_s": {kind: count / (end - begin) for kind, count in counts.items()},
            "total": sum(counts.values()) / (end - begin),
        }

    def _submit(self, kind: str, *options: str) -> int:
        self._submitted += 1
        out = f"{HOME}/{self._submitted}"
        job = self.cluster.sbatch(
            f"export OMP_NUM_THREADS=1\nexec esrun python3 {HOME}/training.py {out} {kind}",
            *("--elastic=1-1,types=a100", "--gres=gpu:a100:1", f"-J{kind}", "-t60", "--requeue"),
            *(f"--output={out}.log", *options),
        )
        self._jobs[job] = out
        return job

    def _steps(self, out: str) -> list[float]:
        """Return the times at which a training has finished a step."""
        text = self.cluster.exec(f"cat {out} 2>/dev/null || true").stdout
        return [float(line) for line in text.split("\n")[:-1]]

    def _neighbour(self, job: int) -> dict[str, Any]:
        """Return the controller's measurement of a job beside its neighbour."""
        text = self.daemon.selastic("explain", str(job), "--json", check=False)
        rows = json.loads(text)["neighbours"] if text.startswith("{") else []
        return rows[0] if rows else {"measured": 0, "speed": 1.0}

    def _end(self) -> None:
        self.cluster.cancel()
        self._jobs.clear()


def run(seconds: float, rounds: int) -> dict[str, Any]:
    """Learn, and run all phases; return the report."""
    console = Console(stderr=True)
    with (
        two_cores(NAME, HOME, PROGRAM, gpus=2) as cluster,
        running(cluster, CONFIG.replace("MODE", "act"), reporters=()) as d,
    ):
        cores = SharedCores(cluster, d, seconds)
        console.print("learning")
        report: dict[str, Any] = {"seconds": seconds, "beside_own_kind": cores.learn()}
        report["phases"] = []
        for mode in ("act", "observe", "observe", "act") * rounds:
            report["phases"].append(cores.phase(mode))
            console.print(report["phases"][-1])
        d.check_log()
    means = {}
    noise = []
    for choice in ("learned", "packed"):
        totals = [p["total"] for p in report["phases"] if p["choice"] == choice]
        means[choice] = statistics.fmean(totals)
        noise.append((max(totals) - min(totals)) / means[choice])
    return report | {"ratio": means["learned"] / means["packed"], "noise": max(noise)}


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    table = Table(box=None)
    for name in ("nodes chosen", "pairs", *KINDS, "steps/s of all four"):
        table.add_column(name)
    for phase in report["phases"]:
        table.add_row(
            phase["choice"],
            ", ".join(phase["pairs"]),
            *(f"{phase['steps_per_s'][kind]:.2f}" for kind in KINDS),
            f"{phase['total']:.2f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    beside = ", ".join(f"{k} {speed:.2f}" for k, speed in report["beside_own_kind"].items())
    console.print(f"\nspeed beside its own kind, as learned: {beside}", highlight=False)
    console.print(f"learned / packed: {report['ratio']:.3f}, noise {report['noise']:.1%}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.colocation.shared_cores")
    parser.add_argument("--seconds", type=float, default=60.0, help="of a phase (%(default)g)")
    parser.add_argument("--rounds", type=int, default=1, help="of A-B-B-A (%(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = run(args.seconds, args.rounds)
    print(json.dumps(report)) if args.json else show(report)


if __name__ == "__main__":
    main()
