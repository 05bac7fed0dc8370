"""Exchange of gradients during the backward pass, between two nodes of a Slurm cluster.

    python -m benchmarks.overlap.on_nodes [--steps 150] [--rounds 1] [--json]

A container cluster of its own, whose two nodes have a core of this machine each. A training of
twelve linear layers of 512, 512 samples on each rank (`benchmarks/support/wide_training.py`), runs

    alone   with one rank on one node
    flat    with a rank on each node, `overlap="none"`
    auto    the same, with the default, `overlap="auto"`

The links between the nodes are limited to a rate with which the exchange takes as long as the
backward pass, two thirds of a step alone. Jobs in the order flat, auto, auto, flat (A-B-B-A), as
often as `--rounds` says. Printed: the median step of each kind after the trial of schedules, the
exposed share of the exchange, (step - alone) / exchange, and what the controller reports of the
last job with "auto".
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

from rich.console import Console

from benchmarks import ROOT
from benchmarks.overlap.exposed_share import BACKWARD, exposed
from benchmarks.support.two_core_cluster import NODES, two_cores
from tests.support.container_cluster.selasticd import Daemon, eager_config, running
from tests.support.container_cluster.slow_links import slow
from tests.support.container_cluster.slurm_cluster import SlurmCluster

NAME = "overlap-nodes"
HOME = "/shared/home/alice/overlap"
PROGRAM = ROOT / "benchmarks" / "support" / "wide_training.py"
LAYERS, WIDTH = 12, 512
GRADIENT_BYTES = 4 * LAYERS * WIDTH * (WIDTH + 1)
#: Samples of a rank in a step.
BATCH = 512
#: Steps before those that count: a trial of schedules waits for 14, and takes two turns of four
#: steps for each of at most five schedules.
TRIED = 56


class Trainings:
    """Trainings of one kind after the other, on a cluster that is up."""

    def __init__(self, cluster: SlurmCluster, daemon: Daemon, steps: int) -> None:
        self.cluster, self.daemon, self.steps = cluster, daemon, steps
        self._submitted = 0
        #: What the controller reported of the last job with "auto".
        self.reported: dict[str, Any] = {}

    def step_s(self, kind: str) -> float:
        """Run a training to its end; return the median of its counted steps, seconds."""
        self._submitted += 1
        out = f"{HOME}/{self._submitted}"
        ranks = 1 if kind == "alone" else len(NODES)
        overlap = "" if kind == "auto" else "--overlap none"
        words = (
            f"python3 {HOME}/training.py {out} {overlap} --steps {TRIED + self.steps}"
            f" --parameters {LAYERS * WIDTH**2} --layers {LAYERS} --batch {BATCH * ranks}"
        )
        job = self.cluster.sbatch(
            f"export OMP_NUM_THREADS=1\nmkdir {out}\nexec esrun {words}",
            *(f"--elastic={ranks}-{ranks}", f"-N{ranks}", f"-w{','.join(NODES[:ranks])}"),
            *("--gpus-per-node=1", "--ntasks-per-node=1", "-t20", f"--output={out}.log"),
        )
        while (state := self.cluster.state(job)) in ("PENDING", "CONFIGURING", "RUNNING"):
            if kind == "auto":
                self.reported = self._exchange(job) or self.reported
            time.sleep(2)
        if state not in ("COMPLETING", "COMPLETED"):
            raise SystemExit(f"{kind}: {state}\n" + self.cluster.exec(f"cat {out}.log").stdout)
        text = self.cluster.exec(f"cat {out}/steps.jsonl").stdout
        rows = [json.loads(line) for line in text.splitlines()][TRIED:]
        return float(statistics.median(row["end"] - row["begin"] for row in rows))

    def _exchange(self, job: int) -> dict[str, Any] | None:
        """Return the controller's measurement of a job's exchange; None: nothing yet."""
        text = self.daemon.selastic("explain", str(job), "--json", check=False)
        answer = json.loads(text) if text.startswith("{") else {}
        exchange: dict[str, Any] | None = answer.get("exchange")
        return exchange


def run(steps: int, rounds: int) -> dict[str, Any]:
    """Run all trainings; return the report."""
    console = Console(stderr=True)
    with (
        two_cores(NAME, HOME, PROGRAM, gpus=1) as cluster,
        running(cluster, eager_config(), reporters=()) as daemon,
    ):
        trainings = Trainings(cluster, daemon, steps)
        times: dict[str, list[float]] = {"alone": [trainings.step_s("alone")]}
        exchange_s = BACKWARD * times["alone"][0]
        kbit_s = math.ceil(8 * GRADIENT_BYTES / exchange_s / 1e3)
        with slow(cluster, (NODES, NODES[::-1]), kbit_s=kbit_s):
            for kind in ("flat", "auto", "auto", "flat") * rounds:
                times.setdefault(kind, []).append(trainings.step_s(kind))
                console.print(f"{kind}: {times[kind][-1] * 1e3:.0f} ms", highlight=False)
        daemon.check_log()
    step_s = {kind: statistics.median(steps) for kind, steps in times.items()}
    return {
        "mbit_s": kbit_s / 1e3,
        "step_s": step_s,
        "exposed": {k: exposed(step_s | {"exchange": exchange_s}, k) for k in ("flat", "auto")},
        "ratio": step_s["auto"] / step_s["flat"],
        "reported": trainings.reported,
    }


def show(report: dict[str, Any]) -> None:
    """Print the figures."""
    for kind, step_s in report["step_s"].items():
        share = report["exposed"].get(kind)
        print(
            f"{kind:<6} {step_s * 1e3:6.0f} ms"
            + ("" if share is None else f", exposed {share:.0%}")
        )
    ratio = report["ratio"]
    print(f"links of {report['mbit_s']:.0f} Mbit/s; a step of auto by one of flat {ratio:.2f}")
    reported = report["reported"]
    if reported.get("exposed") is not None:
        print(f"reported: {reported['schedule']}, exposed {reported['exposed']:.0%}")


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap.on_nodes")
    parser.add_argument("--steps", type=int, default=150, help="that count (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="of A-B-B-A (%(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    report = run(args.steps, args.rounds)
    print(json.dumps(report)) if args.json else show(report)


if __name__ == "__main__":
    main()
