"""Ranks that run out of memory go on in the plan that the controller's decisions name."""

from __future__ import annotations

import resource
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.controller.state.trials.plan_trials import PlanTrials
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.execution.possible_plans import PlanCandidates
from slurm_elastic.core.report import Report
from slurm_elastic.job.steps.memory_errors import is_lack_of_memory
from tests.support.trainings.training_runs import EPOCHS, STEPS, FakeLauncher, TrainingRuns

#: Large pages: most of a step's time is spent on getting its memory.
ENVIRONMENT = {"THP_MEM_ALLOC_ENABLE": "1"}
#: 6 samples take 340 MB, 12 take 680 MB; the backward pass and threads of the exchange 150 MB.
ROOM = 580 << 20


@dataclass
class SmallDevice:
    """Memory beyond that of the imports, as a fault of `TrainingRuns.start`."""

    room: int

    def prepare(self, rank: int) -> None:
        """Limit the memory of this rank."""
        del rank
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        (data,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
        limit = 1024 * int(data) + self.room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    def begin(self, step: int) -> None:
        """Do nothing in a step."""


class Decisions:
    """The controller's choice of plans, without a controller."""

    def __init__(self) -> None:
        self.trials = PlanTrials()
        self.now = 0.0

    def hear(self, sent: list[dict[str, Any]], gpus: int, **fields: Any) -> Report:
        """Record what rank 0 has reported."""
        held = Allocation.of("a100", {"n1": gpus})
        report = Report(job_id=7, run=0, phase="starting")
        for body in sent:
            named = {"job_id": 7, "run": 0, "gpus": gpus} | body
            report = Report.from_wire({k: v for k, v in named.items() if v is not None})
            self.trials.record(report, held if report.step_time_s else None)
        return Report.from_wire(report.to_wire() | fields)

    def candidates(self, gpus: int) -> PlanCandidates:
        """Return the plans for so many GPUs of one node."""
        directive = Directive.parse("1-2,plan=auto")
        return PlanCandidates(directive, self.trials.supported, (gpus,))


def test_a_size_for_which_memory_lacks_is_trained_in_another_plan_with_the_same_losses(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    model = {"model": "voluminous", "epochs": 2, "environment": ENVIRONMENT}
    options = model | {"faults": [SmallDevice(ROOM)], "overlap": "none"}
    alone, job = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "job")
    alone.run(1, **model)
    decisions = Decisions()

    job.start(2, launcher=launcher, signal_at=8, signal=signal.SIGTERM, **options)
    assert set(job.join()) == {143}, job.log()
    decisions.hear(launcher.reports, 2)
    assert decisions.trials.memory.sample is not None

    launcher.begin_attempt()
    job.start(1, launcher=launcher, **options)
    assert job.join() == [1], job.log()
    assert any(map(is_lack_of_memory, job.log().encode().splitlines())), job.log()
    failed = {"phase": "ended", "exit_code": 1, "failed_start": 1, "out_of_memory": True}
    report = decisions.hear(launcher.reports, 1, **failed)
    held = Allocation.of("a100", {"n1": 1})
    assert decisions.trials.lack_memory(report, decisions.candidates(1), held, now=1.0)
    plan = decisions.trials.ordered
    assert plan == "1x1+accumulation=1"

    launcher.set_orders(layout="1x1", plan=plan)
    launcher.begin_attempt()
    job.start(1, launcher=launcher, **options)
    assert job.join() == [0], job.log()
    assert {r.get("plan") or plan for r in launcher.reports} == {plan}
    assert job.losses() == pytest.approx(alone.losses(), rel=1e-6)
    assert len(job.losses()) == 2 * STEPS // EPOCHS
