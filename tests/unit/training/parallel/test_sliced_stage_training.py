"""Replicas of pipeline stages divide the state of the optimizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.core.execution.execution_plan import ExecutionPlan
from slurm_elastic.core.layout import LayoutText
from tests.support.trainings.training_runs import (
    EPOCHS,
    SAMPLES,
    STEPS,
    FakeLauncher,
    TrainingRuns,
)
from tests.unit.training.parallel.test_mesh_training import newest, same_state

SLICED = {"overlap": "sliced"}
DIRECTIVE = "1-8,parallel=hybrid"
#: With two stages on each rank, with replicas of one stage only, and without stages.
LAYOUTS = ["2x2", "2x2x2", "1x1", "2-1", "1x2", "3x1", "1-2"]
PLANS = [
    "2x2+shard=optimizer", "4x1+shard=optimizer", "2x2+recompute", "2x1+tensor=2+shard=optimizer",
    "2x2+shard=optimizer+recompute+accumulation=1", "1x2+tensor=2+shard=optimizer",
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"model": "tied", "clip_norm": 0.5},
        {"model": "plain", "optimizer": "sgd", "clip_norm": 0.5, "schedule": "gpipe"},
    ],
)
def test_losses_over_a_walk_across_layouts_are_those_of_one_rank(
    tmp_path: Path, launcher: FakeLauncher, options: dict[str, Any]
) -> None:
    alone, walk = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "walk")
    alone.run(1, **options)
    for number, layout in enumerate(LAYOUTS, start=1):
        end = STEPS * number // len(LAYOUTS)
        launcher.set_orders(layout=layout)
        settings = {**options, **SLICED, "directive": DIRECTIVE}
        walk.run_until(end, LayoutText.parse(layout).world, launcher=launcher, **settings)
    assert walk.layouts() == LAYOUTS
    assert walk.losses() == pytest.approx(alone.losses(), rel=1e-6)
    assert walk.samples() == [Counter(range(SAMPLES))] * EPOCHS
    same_state(walk, alone)


def test_a_job_goes_through_plans_by_order(tmp_path: Path, launcher: FakeLauncher) -> None:
    alone, moved = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "moved")
    alone.run(1, model="transformer")
    for number, plan in enumerate(PLANS, start=1):
        end = STEPS * number // len(PLANS)
        launcher.set_orders(layout=plan.partition("+")[0], plan=plan)
        launcher.begin_attempt()
        size = ExecutionPlan.parse(plan).world
        moved.run_until(end, size, launcher=launcher, directive=DIRECTIVE, model="transformer")
        assert {report.get("plan", plan) for report in launcher.reports} == {plan}
    assert moved.losses() == pytest.approx(alone.losses(), rel=1e-6)


def test_each_replica_keeps_the_state_of_the_parameters_that_it_owns(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    launcher.set_orders(layout="2x2", plan="2x2+shard=optimizer")
    runs.run(4, launcher=launcher, directive=DIRECTIVE, model="tied", every_s=0.0, epochs=1)
    index = newest(runs).index
    state = {name: index[name][0] for name in index if name.startswith("optim.exp_avg.")}
    tied = state.pop("optim.exp_avg.embed.weight")
    assert tied == "__0_0.distcp"  # all ranks of both stages update it; the first writes it
    first, last = ({f"__{rank}_0.distcp" for rank in ranks} for ranks in ((0, 1), (2, 3)))
    assert state["optim.exp_avg.mid1.weight"] in first
    assert state["optim.exp_avg.norm.weight"] in last
    assert set(state.values()) == first | last
