#!/usr/bin/env python3
"""Runs train_gpt.py and reports a speed that depends on the plan: devices that do not exist here.

`PACE` is a JSON object of the seconds per step that are reported, by plan; in a plan with 0 seconds
the program fails, in one with "memory" it runs out of memory. All steps really take `STEP_S`: what
they take on a busy machine says nothing about a plan. For the same reason each start is reported
to take `STARTUP_S`.
"""

import json
import os
import runpy
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from slurm_elastic.training.measure.step_times import StepDurations, StepTimer
from slurm_elastic.training.reporting import Reporter  # before torch, as in the example

STEP_S, STARTUP_S = 0.1, 1.0
PACE = json.loads(os.environ["PACE"])
plan = ""
set_fields = Reporter.set_fields


def noting_the_plan(self: Reporter, **fields: object) -> None:
    """Note the plan of this attempt, which is part of every report."""
    global plan  # noqa: PLW0603
    if "layout" in fields:
        plan = str(fields.get("plan") or fields["layout"])
        if PACE.get(plan) == 0:
            sys.exit(f"out of memory in plan {plan}")
        if PACE.get(plan) == "memory":
            raise MemoryError
    set_fields(self, **fields)


started = Reporter.started


def started_quickly(self: Reporter, **fields: Any) -> None:
    """Report a start of `STARTUP_S`: the next plan is tried after a time that depends on it."""
    started(self, **{**fields, "startup_s": STARTUP_S})


take = StepTimer.take


def as_planned(self: StepTimer) -> StepDurations | None:
    """Return the durations of this attempt's plan in place of the measured ones."""
    measured, step_s = take(self), PACE.get(plan, STEP_S)
    return measured and replace(measured, step_s=step_s, micro_step_s=step_s)


Reporter.set_fields = noting_the_plan
Reporter.started = started_quickly
StepTimer.take = as_planned

from torch.optim.optimizer import register_optimizer_step_post_hook  # noqa: E402

register_optimizer_step_post_hook(lambda *_: time.sleep(STEP_S))
real = Path(os.environ["REAL_EXAMPLES"], "train_gpt.py")
sys.path.insert(0, str(real.parent))
runpy.run_path(str(real), run_name="__main__")
