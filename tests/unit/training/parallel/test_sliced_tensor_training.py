"""Replicas whose ranks share weights divide the state of the optimizer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from slurm_elastic.training.parallel import fsdp
from tests.support.trainings.training_runs import (
    EPOCHS,
    SAMPLES,
    STEPS,
    FakeLauncher,
    TrainingRuns,
)
from tests.unit.training.parallel.test_mesh_training import newest, same_state

SLICED: dict[str, Any] = {"tensor": 2, "overlap": "sliced"}
#: Ranks, what they divide as the script says, and the layout that follows.
WALK: list[tuple[int, dict[str, Any], str]] = [
    (4, SLICED, "2x1"), (1, SLICED, "1x1"), (6, SLICED, "3x1"), (4, {"tensor": 2}, "2x1"),
    (4, SLICED, "2x1"), (3, {"overlap": "sliced"}, "3x1"), (2, SLICED, "1x1"),
]  # fmt: skip
PLANS = [
    "2x1+tensor=2+shard=optimizer", "4x1+shard=optimizer", "2x1+tensor=2",
    "2x1+tensor=2+shard=optimizer+recompute+accumulation=1", "1x2+tensor=2",
    "2x1+tensor=2+shard=optimizer",
]  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"model": "transformer", "clip_norm": 0.5, "micro_batch": 3, "recompute": True},
        {"model": "tied", "optimizer": "sgd", "clip_norm": 0.5, "workers": 1},
        {"model": "plain", "clip_norm": 0.5, "micro_batch": 3},
    ],
)
def test_losses_over_a_walk_across_layouts_are_those_of_one_rank(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    alone, walk = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "walk")
    alone.run(1, **options)
    ends = [STEPS * (i + 1) // len(WALK) for i in range(len(WALK))]
    for (size, division, _), end in zip(WALK, ends, strict=True):
        walk.run_until(end, size, **options, **division)
    layouts = [layout for _, _, layout in WALK]
    assert walk.layouts() == [b for a, b in zip(["", *layouts], layouts, strict=False) if a != b]
    assert walk.losses() == pytest.approx(alone.losses(), rel=1e-6)
    assert walk.samples() == [Counter(range(SAMPLES))] * EPOCHS
    if options["model"] != "transformer":  # AdamW enlarges gradients that are 0 but for rounding
        same_state(walk, alone)


def test_a_job_goes_through_plans_by_order(tmp_path: Path, launcher: FakeLauncher) -> None:
    alone, moved = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "moved")
    alone.run(1, model="transformer")
    ends = [STEPS * (i + 1) // len(PLANS) for i in range(len(PLANS))]
    for plan, end in zip(PLANS, ends, strict=True):
        launcher.set_orders(layout=plan.partition("+")[0], plan=plan)
        launcher.begin_attempt()
        directive = "4,parallel=hybrid"
        moved.run_until(end, 4, launcher=launcher, directive=directive, model="transformer")
        assert {report.get("plan", plan) for report in launcher.reports} == {plan}
    assert moved.losses() == pytest.approx(alone.losses(), rel=1e-6)


def test_a_rank_keeps_the_state_of_the_parts_that_it_owns(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    runs.run(4, launcher=launcher, model="transformer", every_s=0.0, epochs=1, **SLICED)
    assert launcher.wait_for("training")["plan"] == "2x1+tensor=2+shard=optimizer"
    index = newest(runs).index

    def writers(name: str) -> set[str]:
        pieces = index[name]  # of a tensor in one piece, that piece
        return {file for file, *_ in (pieces if isinstance(pieces[0], list) else [pieces])}

    # Both ranks of one replica own the two parts of a layer.
    pair = writers("optim.exp_avg.wide.weight")
    assert pair in ({"__0_0.distcp", "__1_0.distcp"}, {"__2_0.distcp", "__3_0.distcp"})
    owning = {file for name in index if name.startswith("optim.exp_avg.") for file in writers(name)}
    assert len(owning) >= 3, "one rank alone would have written the state of undivided layers"


@pytest.mark.skipif(bool(fsdp.unsupported()), reason=fsdp.unsupported())
def test_checkpoints_pass_to_a_mesh_and_back(tmp_path: Path) -> None:
    alone, walk = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "walk")
    alone.run(1, model="transformer")
    mesh = {"tensor": 2, "shard": True}
    for division, end in ((SLICED, 6), (mesh, 12), (SLICED, STEPS)):
        walk.run_until(end, 4, model="transformer", **division)
    assert walk.losses() == pytest.approx(alone.losses(), rel=1e-6)
