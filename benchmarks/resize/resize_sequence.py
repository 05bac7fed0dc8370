"""Hand-written sequence of resizes of one job; runs in ctld as the operator account.

The controller's own parts in one process (manual_controller.py). Prints a JSON object per resize.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from typing import Any

from benchmarks.support.manual_controller import manual_controller
from slurm_elastic.controller.controller import Controller
from slurm_elastic.controller.transitions.requested_change import RequestedChange
from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.plan import Action, Decision
from slurm_elastic.core.reason import Reason, log_form
from slurm_elastic.core.resize_kind import ResizeKind, companion_change

#: On two nodes, with the job's own allocation of one GPU in each.
SEQUENCE = ({"g01": 1, "g02": 1}, {"g01": 2, "g02": 2}, {"g01": 1, "g02": 1}, {"g01": 1})
PATIENCE_S = 240.0
#: Between two resizes, so that each finds a training that runs.
PAUSE_S = 1.0


def wait_for_steps(controller: Controller, job_id: int, *, in_place: bool) -> None:
    """Look until the job has made its first step, and can be changed in place if it is to be."""
    deadline = time.time() + PATIENCE_S
    while time.time() < deadline:
        controller.look()
        report = controller.store.last_report(job_id)
        if report and report.startup_s is not None and (report.in_place or not in_place):
            return
        time.sleep(0.1)
    sys.exit(f"job {job_id} made no step, or cannot be changed in place, in {PATIENCE_S:g} s")


def present(controller: Controller, job_id: int) -> Job:
    """Return the job with its companions, as read just now."""
    controller.look()
    job = controller.job(job_id)
    assert job is not None
    return job


def resize(
    controller: Controller, job_id: int, shares: dict[str, int], kind: ResizeKind
) -> dict[str, Any]:
    """Resize once, and wait until the first step."""
    job = present(controller, job_id)
    target = Allocation.of("a100", shares)
    assert job.allocation is not None
    grows = target.gpus > job.allocation.gpus
    decision = Decision(
        job_id=job_id,
        current=job.allocation,
        target=target,
        action=Action.GROW if grows else Action.SHRINK,
        reason=Reason("text", text="measured"),
    )
    change = RequestedChange(decision, job, 60.0)
    if kind is not ResizeKind.REQUEUE:
        assert job.base_allocation is not None
        parts = [companion.allocation for companion in job.companions]
        members = companion_change(job.base_allocation, parts, target)
        assert members is not None
        leaves = tuple(job.companions[i].job_id for i in members.leave)
        change = change._replace(kind=kind, joins=members.join, leaves=leaves)
    begun = controller.engine.begin([change])
    if not begun:
        return {"from": job.gpus, "to": target.gpus, "problem": "not begun"}
    (transition,) = controller.engine.live.values()
    last_mark = "switched" if kind is ResizeKind.IN_PLACE else "first_step"
    deadline = time.time() + PATIENCE_S
    while time.time() < deadline and (
        controller.engine.live or (last_mark not in transition.entered and not transition.problem)
    ):
        controller.look()
        time.sleep(0.05)
    return {
        "from": job.gpus,
        "to": target.gpus,
        "problem": log_form(transition.problem),
        "state": transition.state.value,
        "entered": transition.entered,
        "pause_s": transition.pause_s,
    }


def main() -> None:
    """Resize, print a row for each, and end the job."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--kind", choices=[k.value for k in ResizeKind], required=True)
    args = parser.parse_args()
    kind = ResizeKind(args.kind)
    with manual_controller() as controller:
        wait_for_steps(controller, args.job, in_place=kind is ResizeKind.IN_PLACE)
        for shares in itertools.islice(itertools.cycle(SEQUENCE), args.count):
            time.sleep(PAUSE_S)
            print(json.dumps(resize(controller, args.job, shares, kind)), flush=True)
        assert present(controller, args.job).state is JobState.RUNNING


if __name__ == "__main__":
    main()
