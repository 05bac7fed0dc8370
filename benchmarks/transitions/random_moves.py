"""Many simultaneous changes of jobs among their nodes; runs in ctld as the operator account.

    random_moves.py --jobs JSON --count N --seed N --notice SECONDS [--kind in-place|requeue]

The controller's parts run in one process (manual_controller.py). Each set of changes distributes
the GPUs that the running jobs hold among them again, so that each GPU that one job leaves is taken
by another; sizes and places are drawn from the seed. A job that had to go back into the queue takes
part again when it runs.

In place, jobs keep their bases. The first set gives each second job two GPUs more, on its own node;
each later one gives these GPUs to as many others, wherever they are, while their holders shrink.

Prints a JSON object for each transition that ended, with `set`, the number of its set.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import time

from benchmarks.support.manual_controller import manual_controller
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.transitions.requested_change import RequestedChange
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.resize_kind import ResizeKind, companion_change

#: A job that Slurm requeued by itself waits for two minutes.
PATIENCE_S = 240.0
#: Within this time after a set of moves all jobs run and have reported, or are in the queue.
SETTLE_S = 12.0
POLL_S = 0.2
#: GPUs that are passed on together in place.
PART = 2


def main() -> None:
    """Move jobs until enough transitions have begun."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=json.loads, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--notice", type=float, required=True)
    parser.add_argument("--kind", type=ResizeKind, default=ResizeKind.REQUEUE)
    args = parser.parse_args()
    with manual_controller() as controller:
        move_jobs(controller, args)


def move_jobs(controller: Controller, args: argparse.Namespace) -> None:
    """Carry out one set of changes after the other; print a row for each that ended."""
    draw, begun, last_id = random.Random(args.seed), 0, 0
    in_place = args.kind is ResizeKind.IN_PLACE
    for number in itertools.count():
        settle_s = PATIENCE_S if number == 0 else SETTLE_S
        jobs = ready(controller, args.jobs, settle_s=settle_s, in_place=in_place)
        if not in_place:
            changes = new_places(controller, jobs, draw, args.notice)
        elif number == 0:
            changes = [grown(job, args.notice) for job in jobs[::2]]
        else:
            changes = passed_on(jobs, draw, args.notice)
        begun += len(controller.engine.begin(changes))
        finish(controller)
        for row in controller.ledger.transitions(last=10 * len(args.jobs)):
            if row["id"] > last_id:
                last_id = row["id"]
                print(json.dumps({**row, "set": number}), flush=True)
        if in_place and number == 0:
            sys.stdin.read()  # until rivals are there
        if begun >= args.count:
            break


def ready(
    controller: Controller, wanted: list[int], *, settle_s: float, in_place: bool
) -> list[Job]:
    """Return the jobs that run and report: all of them, or after a while at least two.

    Args:
        controller: reads them.
        wanted: their ids.
        settle_s: seconds after which some may be missing.
        in_place: only those that can be changed in place.
    """
    begun = time.monotonic()
    while True:
        controller.look()
        all_jobs = [job for j in wanted if (job := controller.job(j)) is not None]
        jobs = [job for job in all_jobs if job.state is JobState.RUNNING]
        reports = [controller.store.last_report(j.job_id) for j in jobs]
        reporting = [
            j
            for r, j in zip(reports, jobs, strict=True)
            if j.allocation is not None and r is not None and r.run == j.run
            if r.in_place or not in_place
        ]
        waited = time.monotonic() - begun
        if len(reporting) == len(wanted) or (len(reporting) > 1 and waited > settle_s):
            return reporting
        if waited > PATIENCE_S:
            sys.exit(f"only {len(reporting)} jobs run and report within {PATIENCE_S:g} s")
        time.sleep(POLL_S)


def new_places(
    controller: Controller, jobs: list[Job], draw: random.Random, notice_s: float
) -> list[RequestedChange]:
    """Return new places for all jobs: as many on each node as now, in newly drawn sizes."""
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
                reason=Reason("text", text="moved"),
            )
            changes.append(RequestedChange(decision, job, notice_s))
    return changes


def grown(job: Job, notice_s: float) -> RequestedChange:
    """Return a job's growth on its own node."""
    assert job.allocation is not None
    ((node, gpus),) = job.allocation.shares
    return in_place_change(job, {node: gpus + PART}, notice_s)


def passed_on(jobs: list[Job], draw: random.Random, notice_s: float) -> list[RequestedChange]:
    """Return changes that give the GPUs of companions to jobs without companions."""
    holders = [job for job in jobs if job.companions]
    free = [job for job in jobs if not job.companions]
    number = min(len(holders), len(free))
    givers, takers = draw.sample(holders, number), draw.sample(free, number)
    changes = []
    for giver, taker in zip(givers, takers, strict=True):
        assert giver.base_allocation is not None
        assert taker.allocation is not None
        changes.append(in_place_change(giver, dict(giver.base_allocation.shares), notice_s))
        ((node, gpus),) = giver.companions[0].allocation.shares
        shares = dict(taker.allocation.shares)
        shares[node] = shares.get(node, 0) + gpus
        changes.append(in_place_change(taker, shares, notice_s))
    return changes


def in_place_change(job: Job, shares: dict[str, int], notice_s: float) -> RequestedChange:
    """Return the change in place that gives a job these GPUs."""
    assert job.allocation is not None
    assert job.base_allocation is not None
    target = Allocation.of(job.allocation.gpu_type, shares)
    parts = [companion.allocation for companion in job.companions]
    members = companion_change(job.base_allocation, parts, target)
    assert members is not None, f"{job.job_id}: {target} cannot be reached in place"
    decision = Decision(
        job_id=job.job_id,
        current=job.allocation,
        target=target,
        action=Action.GROW if target.gpus > job.allocation.gpus else Action.SHRINK,
        reason=Reason("text", text="passed on"),
    )
    return RequestedChange(
        decision,
        job,
        notice_s,
        kind=ResizeKind.IN_PLACE,
        joins=members.join,
        leaves=tuple(job.companions[i].job_id for i in members.leave),
    )


def composed(total: int, parts: int, draw: random.Random) -> list[int]:
    """Return a number as a sum of so many positive ones."""
    cuts = [0, *sorted(draw.sample(range(1, total), parts - 1)), total]
    return [b - a for a, b in itertools.pairwise(cuts)]


def finish(controller: Controller) -> None:
    """Wait until nothing is under way, reservations included."""
    end = time.monotonic() + PATIENCE_S
    while controller.engine.busy:
        controller.look()
        if time.monotonic() > end:
            sys.exit(f"still under way: {list(controller.engine.live.values())}")
        time.sleep(controller.pause() if controller.engine.live else POLL_S)


if __name__ == "__main__":
    main()
