"""Trainings whose ranks share weights have the losses of one rank, over changes of the layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from slurm_elastic.job.rank_socket import RESTART_CODE
from tests.support.trainings.training_runs import EPOCHS, SAMPLES, STEPS, FakeLauncher, TrainingRuns

#: Ranks, how many of them the script lets share weights, and the layout that follows.
WALK = [(1, 2, "1x1"), (2, 2, "1x1"), (4, 2, "2x1"), (3, 3, "1x1"), (3, 2, "3x1")]


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adamw", "clip_norm": 0.5, "micro_batch": 3},
        {"optimizer": "sgd", "recompute": True, "overlap": "buckets", "workers": 1},
    ],
)
def test_losses_over_a_walk_across_layouts_are_those_of_one_rank(
    tmp_path: Path, options: dict[str, object]
) -> None:
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, model="transformer", **options)
    walk = TrainingRuns(tmp_path / "walk")
    ends = [STEPS * (i + 1) // len(WALK) for i in range(len(WALK))]
    for (size, tensor, _), end in zip(WALK, ends, strict=True):
        walk.run_until(end, size, model="transformer", tensor=tensor, **options)
    assert "tensor=2: 8 layers are divided among 2 ranks" in walk.log()
    assert "tensor=2: 3 ranks are no multiple of it; each rank is a replica" in walk.log()
    assert walk.layouts() == ["1x1", "2x1", "1x1", "3x1"]
    assert walk.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert walk.samples() == [Counter(range(SAMPLES))] * EPOCHS


def test_a_job_goes_through_plans_with_shared_weights_by_order(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, model="transformer")
    runs = TrainingRuns(tmp_path / "moved")
    plans = ["1x1+tensor=2+recompute+accumulation=1", "1x2+recompute", "1x1+tensor=2"]
    orders = [{"layout": plan.partition("+")[0], "plan": plan} for plan in plans]
    launcher.set_orders(**orders[0])
    reported = []
    for following in [*orders[1:], None]:
        until = max(runs.losses(), default=0) + 2
        launcher.begin_attempt()
        runs.start(
            2,
            model="transformer",
            launcher=launcher,
            directive="1-8,parallel=hybrid",
            step_s=0.1 if following else 0.0,
        )
        runs.wait_for_step(until)
        report = launcher.wait_for("training")
        reported.append((report["plan"], report["layout"], report["accumulation"]))
        if following:
            launcher.set_orders(**following)
            assert runs.join() == [RESTART_CODE] * 2, runs.log()
    assert runs.join() == [0, 0], runs.log()
    assert [plan for plan, *_ in reported] == plans
    assert reported[0][1:] == ("1x1", 1)
    assert runs.losses() == pytest.approx(alone.losses(), rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"clip_norm": 0.5}, {"optimizer": "sgd", "model": "tied", "recompute": True}]
)
def test_stages_whose_ranks_share_weights_have_the_losses_of_one_rank(
    tmp_path: Path, launcher: FakeLauncher, options: dict[str, object]
) -> None:
    options = {"model": "transformer"} | options
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, **options)
    walk = TrainingRuns(tmp_path / "walk")
    plans = [(4, "1x2+tensor=2"), (4, "2x1+tensor=2"), (8, "2x2+tensor=2"), (6, "1x2+tensor=3")]
    plans += [(4, "1x2x2+tensor=2"), (1, "1x1")]
    ends = [STEPS * (i + 1) // len(plans) for i in range(len(plans))]
    for (size, plan), end in zip(plans, ends, strict=True):
        launcher.set_orders(layout=plan.partition("+")[0], plan=plan if "+" in plan else "")
        directive = "1-8,parallel=hybrid"
        walk.run_until(end, size, launcher=launcher, directive=directive, **options)
        assert f"plan {plan}, as ordered" in walk.log() or "+" not in plan
    assert walk.layouts() == [plan.partition("+")[0] for _, plan in plans]
    assert walk.losses() == pytest.approx(alone.losses(), rel=1e-5)
    assert walk.samples() == [Counter(range(SAMPLES))] * EPOCHS


def test_a_plan_of_one_stage_is_followed_without_a_word_in_the_directive(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    runs = TrainingRuns(tmp_path)
    launcher.set_orders(layout="1x1", plan="1x1+tensor=2+accumulation=1")
    runs.start(2, model="transformer", launcher=launcher, directive="2", step_s=0.05)
    report = launcher.wait_for("training")
    assert (report["plan"], report["accumulation"]) == ("1x1+tensor=2+accumulation=1", 1)
    runs.hurry()
    assert runs.join() == [0, 0], runs.log()


def test_the_number_of_chunks_is_chosen_in_the_first_steps(tmp_path: Path) -> None:
    runs = TrainingRuns(tmp_path)
    runs.run(2, model="transformer", tensor=2, overlap="auto", epochs=12)
    assert "tensor-parallel products: " in runs.log()
    assert "of one with 1 chunk" in runs.log()


def test_it_is_chosen_with_stages_too(tmp_path: Path, launcher: FakeLauncher) -> None:
    alone, staged = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "staged")
    alone.run(1, model="transformer", epochs=12)
    launcher.set_orders(layout="1x2", plan="1x2+tensor=2")
    options = {"overlap": "auto", "directive": "1-8,parallel=hybrid", "epochs": 12}
    staged.run(4, launcher=launcher, model="transformer", **options)
    assert "of one with 1 chunk" in staged.log()
    assert staged.losses() == pytest.approx(alone.losses(), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tensor": 0}, "tensor: 0 is invalid"),
        ({"tensor": 2, "tensor_styles": {"blockx": "whole"}}, "tensor_styles: 'blockx' is invalid"),
        ({"tensor": 2, "model": "direct"}, "tensor_styles={'name of the layer': 'whole'}"),
        ({"tensor": 2, "optimizer": "foreach"}, "foreach=True) is invalid with divided layers"),
    ],
)
def test_what_cannot_be_divided_ends_in_one_line(
    tmp_path: Path, options: dict[str, object], line: str
) -> None:
    runs = TrainingRuns(tmp_path)
    runs.start(2, **{"model": "transformer"} | options)
    assert set(runs.join()) == {1}, runs.log()
    assert line in runs.log()
