"""Trainings of five kinds under policy goodput on the container cluster.

    python -m benchmarks.policies.mixed_cluster [--minutes 10] [--policy goodput]
        [--in-place never|auto] [--cluster selastic] [--json] [--out FILE]

On two a100 and one v100 node (all emulated; the other nodes are full) run a data-parallel training,
a pipeline, one with a sharded optimizer, a rigid one and one that freezes layers. Four times a
rigid job of another user comes and takes GPUs of one node for a while.
Debian's torch 2.6 has no FSDP2 on CPUs: "sharded" is ZeRO (`ZeroRedundancyOptimizer`) in a loop of
the script's own, which saves and restores on any number of ranks.

Per job it prints the losses' largest relative difference from an undisturbed run on one rank, the
difference of the last one, steps that were lost, and changes. Per change: promised goodput, by the
policy's reason for it (`goodput-change`), and delivered, steps per second in the new size over
those in the old one, as the batches stay. Where another job's need decided, nothing was promised.
And what `selastic explain` said of each job at the end. `--out` keeps all of it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import ROOT
from benchmarks.policies.promised_goodput import compared, losses, median_error, segments
from tests.support.container_cluster.selasticd import Daemon, running
from tests.support.container_cluster.slurm_cluster import SlurmCluster

HOME = "/shared/home/alice/mixed"
PROGRAM = Path(__file__).with_name("mixed_training.py")
#: By name: kind of training, directive, GPUs at the start.
JOBS = {
    "data": ("data", "1-4,types=a100:v100", 1),
    "pipeline": ("data", "2-4,unit=2,parallel=hybrid,types=a100:v100", 2),
    "sharded": ("sharded", "1-4,types=a100:v100", 1),
    "rigid": ("data", "2-2,types=a100:v100", 2),
    "frozen": ("frozen", "1-4,freeze=auto,max-penalty=5%,types=a100:v100", 1),
}
#: Steps of a training by minute: about what three of them make on two a100 each.
STEPS_A_MINUTE = 240
#: When a rigid job comes, on how many GPUs of which type, and how long it stays: parts of the time.
VISITS = (
    (0.2, "a100", 2, 0.1),
    (0.4, "v100", 2, 0.1),
    (0.6, "a100", 1, 0.1),
    (0.8, "v100", 2, 0.1),
)
CONFIG = """
[controller]
mode = "act"
policy = "{policy}"
interval_s = 5
poll_s = 1
state_dir = "{state}"
[api]
controller = "ctld:7321"
[resize]
in_place = "{in_place}"
min_interval_s = 20
per_hour = 3600
payback_s = 300
restart_s = 10
notice_s = 60
keep_s = 60
[speedup]
types = {{ a100 = 2.0, v100 = 1.0 }}
[slurm]
lease_s = 60
"""
LOOK_S = 5.0


class MixedCluster:
    """One run on a cluster that is up.

    Args:
        cluster: of the six nodes.
        daemon: selasticd under the policy.
        minutes: for how long.
    """

    def __init__(self, cluster: SlurmCluster, daemon: Daemon, minutes: float) -> None:
        self.cluster, self.daemon, self.minutes = cluster, daemon, minutes
        self.jobs: dict[str, int] = {}
        self.explained: dict[str, list[str]] = {}
        self._steps = int(STEPS_A_MINUTE * minutes)

    def run(self) -> dict[str, Any]:
        """Run all jobs; return the report."""
        self.cluster.exec(f"rm -rf {HOME}; mkdir -p {HOME}", user="alice")
        text = PROGRAM.read_text()
        self.cluster.exec(f"cat >{HOME}/training.py", user="alice", stdin=text)
        fillers = ("-N3", "-wg02,g05,g06", "--ntasks-per-node=1", "--gres=gpu:4")
        seconds = int(60 * self.minutes)
        sleep = f"exec sleep {seconds + 600}"
        full = self.cluster.sbatch(sleep, "-o/dev/null", *fillers, user="bob")
        self.cluster.wait(full, "RUNNING")
        self.jobs = {name: self._submit(name) for name in JOBS}
        for job in self.jobs.values():
            self.cluster.wait(job, "RUNNING")
        began = time.monotonic()
        visits = list(VISITS)
        middle = True
        while (elapsed := time.monotonic() - began) < seconds:
            if visits and elapsed > visits[0][0] * seconds:
                _, gpu_type, gpus, part = visits.pop(0)
                self.cluster.sbatch(
                    f"exec sleep {part * seconds:.0f}",
                    *(f"--gres=gpu:{gpu_type}:{gpus}", "-N1", "-o/dev/null", "-Jvisit"),
                    user="bob",
                )
            if middle and elapsed > seconds / 2:
                self._explain()
                middle = False
            time.sleep(LOOK_S)
        self._explain()
        history = json.loads(self.daemon.selastic("history", "--json"))["changes"]
        self.cluster.cancel()
        return {"jobs": list(self._rows(history)), "log": self.daemon.log().splitlines()}

    def _submit(self, name: str) -> int:
        kind, directive, gpus = JOBS[name]
        out = f"{HOME}/{name}"
        return self.cluster.sbatch(
            "export OMP_NUM_THREADS=1\n"
            f"exec esrun python3 {HOME}/training.py {out} {kind} --steps {self._steps}",
            *(f"--elastic={directive}", f"--gres=gpu:a100:{gpus}", f"-J{name}", "-t60"),
            *("--requeue", "--open-mode=append", f"--output={out}.log"),
        )

    def _explain(self) -> None:
        for name, job in self.jobs.items():
            text = self.daemon.selastic("explain", str(job), check=False)
            self.explained.setdefault(name, []).append(text)

    def _rows(self, history: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the report of each job."""
        for name, job in self.jobs.items():
            steps = self._lines(f"{HOME}/{name}")
            if not steps:
                log = self.cluster.exec(f"tail -40 {HOME}/{name}.log", check=False).stdout
                sys.exit(f"benchmarks: job {name} made no step:\n{log}")
            reference = self._undisturbed(JOBS[name][0], steps[-1]["step"])
            changes = [row for row in history if row["job_id"] == job]
            yield {
                "name": name,
                "directive": JOBS[name][1],
                "layouts": [part.ranks for part in segments(steps)],
                **losses(steps, reference),
                "changes": compared(changes, steps),
                "not_carried_out": [
                    f"{row['from']} to {row['to']}: {row['outcome']}"
                    for row in changes
                    if row["outcome"] not in ("done", "trial")
                ],
                "explained": self.explained[name],
            }

    def _undisturbed(self, kind: str, steps: int) -> list[dict[str, Any]]:
        """Return the steps of a training on one rank that nothing changes, freezes or slows."""
        out = f"{HOME}/undisturbed-{kind}"
        train = f"python3 {HOME}/training.py {out} {kind} --steps {self._steps} --thawed"
        # The whole training has so many steps: freezing and schedules depend on it.
        self.cluster.exec(
            f"rm -rf {out}; export OMP_NUM_THREADS=1 EMULATED_DEVICES=/absent\n"
            f"{train} >{out}.log 2>&1 & pid=$!\n"
            f"until [ $(cat {out}/steps.jsonl 2>/dev/null | wc -l) -ge {steps} ]; do\n"
            f"  kill -0 $pid || {{ cat {out}.log; exit 1; }}; sleep 0.3\ndone; kill -9 $pid",
            user="alice",
            timeout=300,
        )
        return self._lines(out)

    def _lines(self, out: str) -> list[dict[str, Any]]:
        text = self.cluster.exec(f"cat {out}/steps.jsonl 2>/dev/null || true").stdout
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def run(cluster: SlurmCluster, *, minutes: float, policy: str, in_place: str) -> dict[str, Any]:
    """Run the jobs on a cluster that is up, under a selasticd of their own; return the report."""
    text = CONFIG.format(policy=policy, in_place=in_place, state="{state}")
    with running(cluster, text, reporters=()) as daemon:
        report = MixedCluster(cluster, daemon, minutes).run()
        daemon.check_log()
    return {"minutes": minutes, "policy": policy, "in_place": in_place, **report}


def show(report: Mapping[str, Any]) -> None:
    """Print the tables, and what `explain` said."""
    jobs = Table(box=None)
    for name in ("job", "ranks", "steps", "repeated", "missing", "loss", "largest", "last"):
        jobs.add_column(name)
    jobs.add_column("missed descent")
    jobs.add_column("frozen")
    for row in report["jobs"]:
        jobs.add_row(
            row["name"],
            "-".join(map(str, row["layouts"])),
            *(str(row[name]) for name in ("steps", "repeated", "missing")),
            f"{row['loss']:.5g}",
            f"{row['largest']:.1e}",
            f"{row['last']:.1e}",
            f"{row['missed_descent']:.2%}",
            str(row["frozen"]),
        )
    changes = Table(box=None)
    for name in ("job", "from", "to", "kind", "promised", "delivered", "stands still", "reason"):
        changes.add_column(name)
    for row in report["jobs"]:
        for change in row["changes"]:
            numbers = (change[name] for name in ("promised", "delivered", "still_s"))
            cells = ["-" if number is None else f"{number:.2f}" for number in numbers]
            ends = (change[name] for name in ("from", "to", "kind"))
            changes.add_row(row["name"], *ends, *cells, change["reason"])
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(jobs, changes, sep="\n\n")
    median = median_error(report["jobs"])
    console.print(f"\nmedian error: {'-' if median is None else f'{median:.1%}'}")
    for row in report["jobs"]:
        for line in row["not_carried_out"]:
            console.print(f"{row['name']}: {line}")
    for row in report["jobs"]:
        console.print(f"\n{row['explained'][-1]}", highlight=False)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.policies.mixed_cluster")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--policy", default="goodput")
    parser.add_argument("--in-place", choices=("never", "auto"), default="never")
    parser.add_argument("--cluster", default="selastic")
    parser.add_argument("--out", type=Path, help="keep the report in this file, as JSON")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    up = [str(ROOT / "contrib/cluster/cluster"), "--name", args.cluster, "up"]
    subprocess.run(up, check=True, stdout=subprocess.DEVNULL)
    cluster = SlurmCluster(args.cluster)
    report = run(cluster, minutes=args.minutes, policy=args.policy, in_place=args.in_place)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report)) if args.json else show(report)


if __name__ == "__main__":
    main()
