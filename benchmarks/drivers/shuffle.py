"""Runs in ctld as the operator account: moves jobs about on their own nodes, many at once.

    shuffle.py --jobs JSON --count N --seed N --notice SECONDS

The controller's own parts in one process (by_hand.py). In each transaction the GPUs that the
running jobs hold are dealt out among them anew, so that every GPU that one leaves is another's;
sizes and places are drawn from the seed. A job that had to go back into the queue joins in again
when it runs. Prints a JSON object for each transition that ended.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time

from benchmarks.drivers.by_hand import by_hand
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.transitions.transition_engine import RequestedChange
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason

#: A job that Slurm requeued by itself waits for two minutes.
PATIENCE_S = 240.0
#: After a transaction all jobs run and have reported within this time, or wait in the queue.
SETTLE_S = 12.0
LOOK_S = 0.2


def main() -> None:
    """Deal until enough has been begun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=json.loads, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--notice", type=float, required=True)
    args = parser.parse_args()
    with by_hand() as controller:
        deal(controller, args)


def deal(controller: Controller, args: argparse.Namespace) -> None:
    """Transaction after transaction; print a row for each transition that ended."""
    draw, begun, told = random.Random(args.seed), 0, 0
    while begun < args.count:
        changes = dealt(controller, ready(controller, args.jobs), draw, args.notice)
        begun += len(controller.engine.begin(changes))
        finish(controller)
        for row in controller.ledger.transitions(last=10 * len(args.jobs)):
            if row["id"] > told:
                told = row["id"]
                print(json.dumps(row), flush=True)


def ready(controller: Controller, wanted: list[int]) -> list[Job]:
    """Those that run and report: all of them, or after a while at least two."""
    begun = time.monotonic()
    while True:
        controller.look()
        found = controller.reader.jobs()
        jobs = [found[j] for j in wanted if j in found and found[j].state is JobState.RUNNING]
        reports = [controller.book.last_report(j.job_id) for j in jobs]
        heard = [
            j
            for r, j in zip(reports, jobs, strict=True)
            if j.allocation is not None and r is not None and r.run == j.run
        ]
        waited = time.monotonic() - begun
        if len(heard) == len(wanted) or (len(heard) > 1 and waited > SETTLE_S):
            return heard
        if waited > PATIENCE_S:
            sys.exit(f"only {len(heard)} jobs run and report within {PATIENCE_S:g} s")
        time.sleep(LOOK_S)


def dealt(
    controller: Controller, jobs: list[Job], draw: random.Random, notice_s: float
) -> list[RequestedChange]:
    """New places for all of them: as many on each node as now, in sizes drawn anew."""
    nodes = controller.reader.snapshot().node
    held: dict[str, list[int]] = {}
    for job in jobs:
        for name, gpus in job.allocation.shares if job.allocation else ():
            held.setdefault(name, []).append(gpus)
    slots = [
        (name, gpus)
        for name, parts in sorted(held.items())
        for gpus in composed(sum(parts), len(parts), draw)
    ]
    changes = []
    for job, (name, gpus) in zip(draw.sample(jobs, len(jobs)), slots, strict=True):
        target = Allocation.of(nodes[name].gpu_type, {name: gpus})
        if target != job.allocation:
            decision = Decision(
                job_id=job.job_id,
                current=job.allocation,
                target=target,
                action=Action.MOVE,
                reason=Reason("text", text="dealt"),
            )
            changes.append(RequestedChange(decision, job, notice_s))
    return changes


def composed(whole: int, parts: int, draw: random.Random) -> list[int]:
    """A number as a sum of so many positive ones."""
    cuts = [0, *sorted(draw.sample(range(1, whole), parts - 1)), whole]
    return [b - a for a, b in itertools.pairwise(cuts)]


def finish(controller: Controller) -> None:
    """Look until nothing is under way, reservations included."""
    end = time.monotonic() + PATIENCE_S
    while controller.engine.busy:
        controller.look()
        if time.monotonic() > end:
            sys.exit(f"still under way: {list(controller.engine.live.values())}")
        time.sleep(controller.pause() if controller.engine.live else LOOK_S)


if __name__ == "__main__":
    main()
