"""Hand-written sequence of resizes of one job; runs in ctld as the operator account.

The controller's own parts in one process (manual_controller.py). Prints a JSON object per
resize and per plain requeue.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from benchmarks.drivers.manual_controller import manual_controller
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.transitions.transition_engine import RequestedChange
from slurm_elastic.core.cluster import Allocation, JobState
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason, log_form
from slurm_elastic.slurm.scontrol import Scontrol

#: Two nodes of one rack, and moves to another node and to the other rack.
SEQUENCE = (
    {"g01": 1, "g02": 1},
    {"g01": 2, "g02": 2},
    {"g01": 1, "g02": 1},
    {"g01": 1},
    {"g02": 1},
    {"g04": 1},
    {"g01": 1},
)
PATIENCE_S = 240.0


def wait_for_steps(controller: Controller, job_id: int, run: int) -> float:
    """Look until the attempt has made its first step; when that was (epoch s)."""
    deadline = time.time() + PATIENCE_S
    while time.time() < deadline:
        controller.look()
        report = controller.store.last_report(job_id)
        if report and report.run >= run and report.startup_s is not None:
            return time.time()
        time.sleep(0.1)
    sys.exit(f"job {job_id} made no step within {PATIENCE_S:g} s")


def resize(controller: Controller, job_id: int, shares: dict[str, int]) -> dict[str, Any]:
    """Resize once, and wait until the first step."""
    job = controller.reader.jobs()[job_id]
    target = Allocation.of("a100", shares)
    decision = Decision(
        job_id=job_id,
        current=job.allocation,
        target=target,
        action=Action.MOVE,
        reason=Reason("text", text="measured"),
    )
    controller.engine.begin([RequestedChange(decision, job, 60.0)])
    (transition,) = controller.engine.live.values()
    deadline = time.time() + PATIENCE_S
    while "first_step" not in transition.entered and time.time() < deadline:
        controller.look()
        time.sleep(0.05 if controller.engine.live else 0.1)
    row = {"from": job.gpus, "to": target.gpus, "problem": log_form(transition.problem)}
    return {"kind": "resize", **row, **transition.seconds()}


def requeue(controller: Controller, job_id: int) -> dict[str, Any]:
    """Requeue once, and wait until the first step."""
    job = controller.reader.jobs()[job_id]
    began = time.time()
    Scontrol().requeue(job)
    wait_for_steps(controller, job_id, job.run + 1)
    return {"kind": "requeue", "total": time.time() - began}


def main() -> None:
    """Resize in blocks, with the requeues spread among them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--requeues", type=int, required=True)
    args = parser.parse_args()
    with manual_controller() as controller:
        measure(controller, args)


def measure(controller: Controller, args: argparse.Namespace) -> None:
    """Print a row for each resize and requeue of the job."""
    wait_for_steps(controller, args.job, 0)
    sizes = itertools.cycle(SEQUENCE)
    block = max(1, args.count // (args.requeues + 1))
    requeues = args.requeues
    for number in range(1, args.count + 1):
        time.sleep(1.0)
        print(json.dumps(resize(controller, args.job, next(sizes))), flush=True)
        if number % block == 0 and requeues:
            requeues -= 1
            print(json.dumps(requeue(controller, args.job)), flush=True)
    for _ in range(requeues):
        print(json.dumps(requeue(controller, args.job)), flush=True)
    assert controller.reader.jobs()[args.job].state is JobState.RUNNING


if __name__ == "__main__":
    main()
