"""Replicas whose ranks share weights divide the parameters: a mesh of two dimensions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training import training_builder
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CompleteCheckpoint,
)
from slurm_elastic.training.parallel import fsdp
from tests.support.trainings.training_runs import (
    EPOCHS,
    SAMPLES,
    STEPS,
    FakeLauncher,
    TrainingRuns,
    lines,
)

pytestmark = pytest.mark.skipif(bool(fsdp.unsupported()), reason=fsdp.unsupported())
MESH: dict[str, Any] = {"tensor": 2, "shard": True}
#: Ranks, what they divide as the script says, and the layout that follows.
WALK: list[tuple[int, dict[str, Any], str]] = [
    (4, MESH, "2x1"), (1, MESH, "1x1"), (6, MESH, "3x1"), (4, {"tensor": 2}, "2x1"),
    (4, MESH, "2x1"), (4, {"shard": True}, "4x1"), (6, MESH, "3x1"), (2, {}, "2x1"),
    (6, MESH | {"tensor": 3}, "2x1"),
]  # fmt: skip
PLANS = [
    "2x1+tensor=2+shard=full", "1x2+tensor=2", "2x1+tensor=2+shard=full+recompute+accumulation=1",
    "4x1+shard=full", "2x1+tensor=2+shard=full",
]  # fmt: skip


def newest(runs: TrainingRuns) -> CompleteCheckpoint:
    checkpoint = CheckpointDirectory(runs.out / "ckpt", keep=2, log=print).newest()
    assert checkpoint is not None
    return checkpoint


def same_state(runs: TrainingRuns, alone: TrainingRuns) -> None:
    """Check that the last checkpoint has the parameters and optimizer state of another run."""
    read = newest(runs).read()
    for name, value in newest(alone).read().items():
        if not name.startswith("blob."):  # the plain values of each writer
            torch.testing.assert_close(read[name], value, rtol=1e-4, atol=2e-6, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"model": "transformer", "clip_norm": 0.5, "micro_batch": 3, "recompute": True},
        {"model": "tied", "optimizer": "sgd", "overlap": "buckets", "workers": 1},
        {"model": "tied", "optimizer": "plain-sgd", "clip_norm": 0.5},
        {"model": "plain", "clip_norm": 0.5, "micro_batch": 3},
    ],
)
def test_losses_over_a_walk_across_layouts_are_those_of_one_rank(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, **options)
    walk = TrainingRuns(tmp_path / "walk")
    divided = [d for d in WALK if options["model"] == "transformer" or d[1].get("tensor") != 3]
    ends = [STEPS * (i + 1) // len(divided) for i in range(len(divided))]
    for (size, division, _), end in zip(divided, ends, strict=True):
        walk.run_until(end, size, **options, **division)
    layouts = [layout for _, _, layout in divided]
    assert walk.layouts() == [b for a, b in zip(["", *layouts], layouts, strict=False) if a != b]
    assert walk.losses() == pytest.approx(alone.losses(), rel=1e-6)
    assert walk.samples() == [Counter(range(SAMPLES))] * EPOCHS
    if options["model"] != "transformer":  # AdamW enlarges gradients that are 0 but for rounding
        same_state(walk, alone)


def test_a_job_goes_through_plans_with_and_without_stages_by_order(
    tmp_path: Path, launcher: FakeLauncher
) -> None:
    options = {"model": "transformer"}
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, **options)
    moved = TrainingRuns(tmp_path / "moved")
    ends = [STEPS * (i + 1) // len(PLANS) for i in range(len(PLANS))]
    for plan, end in zip(PLANS, ends, strict=True):
        launcher.set_orders(layout=plan.partition("+")[0], plan=plan)
        launcher.begin_attempt()
        directive = "4,parallel=hybrid"
        moved.run_until(end, 4, launcher=launcher, directive=directive, **options)
        assert {report.get("plan", plan) for report in launcher.reports} == {plan}
        if "accumulation" in plan:
            assert {report.get("accumulation", 1) for report in launcher.reports} == {1}
    assert moved.losses() == pytest.approx(alone.losses(), rel=1e-6)


@pytest.mark.parametrize("background", [False, True])
def test_each_rank_writes_what_no_lower_rank_has(runs: TrainingRuns, background: bool) -> None:
    runs.run(4, model="transformer", background=background, every_s=0.0, epochs=1, **MESH)
    assert "failed" not in runs.log()
    index = newest(runs).index

    def writers(name: str) -> list[str]:
        return sorted(file for file, *_ in index[name])

    # Divided by both, and by replicas only.
    for key in ("model", "optim.exp_avg"):
        assert writers(f"{key}.wide.weight") == [f"__{rank}_0.distcp" for rank in range(4)]
        assert writers(f"{key}.norm.weight") == ["__0_0.distcp", "__2_0.distcp"]


def test_a_script_that_asks_for_both_reports_the_plan(
    runs: TrainingRuns, launcher: FakeLauncher
) -> None:
    runs.run(4, launcher=launcher, epochs=12, overlap="auto", **MESH)
    assert launcher.wait_for("training")["plan"] == "2x1+tensor=2+shard=full"
    assert "tensor=2: 2 layers are divided among 2 ranks" in runs.log()
    assert "tensor-parallel products: " in runs.log()
    # 176 of 180 parameters are divided between two ranks.
    sent = {line["reduced_bytes"] for line in lines(runs.out / "losses.jsonl")}
    assert sent == {4 * (176 // 2 + 4)}


def test_mixed_precision_of_the_script_is_kept(tmp_path: Path) -> None:
    alone, parts = TrainingRuns(tmp_path / "alone"), TrainingRuns(tmp_path / "parts")
    alone.run(1, model="half")
    parts.run(4, model="half", **MESH)
    assert "tensor=2: 2 layers are divided among 2 ranks" in parts.log()
    # Of products with 8 bits of mantissa.
    assert parts.losses() == pytest.approx(alone.losses(), rel=4e-3)


class OldTorch:
    """A torch that cannot divide parameters, as a fault of `TrainingRuns.start`."""

    def prepare(self, rank: int) -> None:
        """Replace the check in this rank."""
        del rank
        training_builder.unsupported = lambda: "torch is too old"

    def begin(self, step: int) -> None:
        """Do nothing."""


def test_with_an_old_torch_ranks_share_weights_and_divide_nothing(runs: TrainingRuns) -> None:
    runs.run(4, epochs=1, faults=[OldTorch()], **MESH)
    assert "torch is too old; every replica holds the whole model" in runs.log()
    assert runs.layouts() == ["2x1"]
    assert isinstance(newest(runs).index["model.front.weight"][0], list)  # two halves
    assert len(newest(runs).index["model.front.weight"]) == 2


def test_layers_that_may_be_frozen_are_divided_by_replicas_only(runs: TrainingRuns) -> None:
    runs.run(4, epochs=1, directive="4,freeze=auto", **MESH)
    assert "tensor=2: layers that may be frozen are not divided; each rank is a rep" in runs.log()
    assert runs.layouts() == ["4x1"]


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model": "direct"}, "tensor_styles={'name of the layer': 'whole'}"),
        ({"optimizer": "foreach"}, "foreach=True) is invalid with divided layers"),
    ],
)
def test_what_cannot_be_divided_ends_in_one_line(
    runs: TrainingRuns, options: dict[str, Any], line: str
) -> None:
    runs.start(4, **options, **MESH)
    assert set(runs.join()) == {1}, runs.log()
    assert line in runs.log()


def test_ranks_that_share_weights_have_the_same_micro_batches_and_others_as_many() -> None:
    for count in range(1, 20):
        splits = [
            fsdp.PaddedSplit(rank=rank, world_size=6, micro=2, group_size=2).slices(count)
            for rank in range(6)
        ]
        assert len({len(pieces) for pieces in splits}) == 1
        for first, second in zip(splits[::2], splits[1::2], strict=True):
            kinds = [[(p.number, p.span, p.padding) for p in pieces] for pieces in (first, second)]
            assert kinds[0] == kinds[1]
            assert not any(piece.counts for piece in second)
        taken = [i for pieces in splits for piece in pieces if piece.counts for i in piece.span]
        assert sorted(taken) == list(range(count))
