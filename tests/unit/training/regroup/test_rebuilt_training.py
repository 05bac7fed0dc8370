"""Ranks that hold parts of the model join and leave a training while it runs."""

import signal
from collections import Counter
from pathlib import Path

import pytest

from slurm_elastic.job.rank_socket import RESTART_CODE
from slurm_elastic.training.parallel.fsdp import unsupported
from tests.support.patience import PATIENCE_S
from tests.support.trainings.member_faults import MemberFault
from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import SAMPLES, STEPS, FakeLauncher, TrainingRuns
from tests.unit.training.regroup.test_members_change import begin

needs_fsdp = pytest.mark.skipif(bool(unsupported()), reason=unsupported())
PIPELINE = {"directive": "1-8,parallel=pipeline"}
LIBRARY = "slurm_elastic.training."
#: Epochs of a training that does not end before the changes of a test.
LONG = 8
#: Options of such a training.
SLOW = {"step_s": 0.15, "epochs": LONG}
HYBRID = {"directive": "2-8,unit=2,parallel=hybrid"}


@pytest.mark.parametrize(
    ("sizes", "layouts", "options"),
    [
        pytest.param(
            [2, 3, 2],
            ["2x1", "3x1", "2x1"],
            {"shard": True, "clip_norm": 0.5},
            marks=needs_fsdp,
        ),
        pytest.param(
            [1, 3, 1], ["1x1", "3x1", "1x1"], {"shard": True, "model": "tied"}, marks=needs_fsdp
        ),
        ([2, 4, 2], ["1x2", "1x4", "1x2"], PIPELINE | {"model": "tied", "clip_norm": 0.5}),
        ([1, 3, 1], ["1x1", "1x3", "1x1"], PIPELINE | {"optimizer": "sgd"}),
        ([2, 4, 2], ["1x2", "2x2", "1x2"], HYBRID),
        ([2, 4, 2], ["1x2", "2x2", "1x2"], HYBRID | {"overlap": "sliced", "model": "tied"}),
        (
            [2, 4, 2],
            ["1x1", "2x1", "1x1"],
            {"tensor": 2, "model": "transformer", "recompute": True},
        ),
        ([1, 2, 1], ["1x1", "1x1", "1x1"], {"tensor": 2, "model": "transformer"}),
        pytest.param(
            [2, 4, 2],
            ["1x1", "2x1", "1x1"],
            {"tensor": 2, "shard": True, "model": "tied", "clip_norm": 0.5, "recompute": True},
            marks=needs_fsdp,
        ),
        pytest.param(
            [4, 6, 4],
            ["2x1", "3x1", "2x1"],
            {"tensor": 2, "shard": True},
            marks=needs_fsdp,
        ),
        # Three ranks are replicas, whose gradients leave in buckets.
        (
            [2, 3, 2],
            ["1x1", "3x1", "1x1"],
            {
                "tensor": 2,
                "model": "transformer",
                "overlap": "buckets",
                "faults": [SmallBuckets()],
            },
        ),
        ([2, 3, 2], ["2x1", "3x1", "2x1"], {"overlap": "sliced", "clip_norm": 0.5}),
    ],
)
def test_a_divided_training_whose_ranks_change_equals_an_undisturbed_one(
    tmp_path: Path,
    launcher: FakeLauncher,
    runs: TrainingRuns,
    sizes: list[int],
    layouts: list[str],
    options: dict,
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    several = ("shard", "directive", "tensor", "overlap", "faults")
    alone = {k: v for k, v in options.items() if k not in several}
    plain.run(1, epochs=LONG, **alone)
    options = options | SLOW
    port = begin(runs, launcher, sizes[0], **options)
    joining = sizes[1] - sizes[0]
    runs.start_companion(4711, joining, port=port, **options)
    launcher.set_companions({"4711": joining})
    joined = launcher.wait_for_group(generation=1)
    assert joined["companions"] == {"4711": joining}
    runs.wait_for_step(joined["step"] + 5)
    launcher.set_companions({})
    left = launcher.wait_for_group(generation=2)
    assert left["companions"] == {}
    assert not left["lost"]
    runs.hurry()
    assert runs.join() == [0] * sizes[1], runs.log()
    in_buckets = options.get("overlap") == "buckets"
    assert ("exchange of gradients: buckets" in runs.log()) == in_buckets
    assert runs.sizes() == sizes
    assert runs.layouts() == [b for a, b in zip(["", *layouts], layouts, strict=False) if a != b]
    assert runs.samples() == [Counter(range(SAMPLES))] * LONG
    assert sorted(runs.losses()) == list(range(1, 6 * LONG + 1))
    # Sums over a tensor-parallel group round each activation otherwise.
    tolerance = 1e-5 if "tensor" in options else 1e-6
    assert runs.losses() == pytest.approx(plain.losses(), abs=tolerance)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("regrouping:receive_state", PIPELINE),  # ready: in or before the switch
        pytest.param("regrouping:receive_state", {"shard": True}, marks=needs_fsdp),
        ("rebuilt_training:RebuiltTraining.take_over", PIPELINE),  # after the switch
    ],
)
def test_a_rank_that_dies_while_it_joins_does_not_stop_the_others(
    tmp_path: Path, launcher: FakeLauncher, runs: TrainingRuns, function: str, options: dict
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1, epochs=LONG)
    options = options | SLOW
    port = begin(runs, launcher, 2, **options)
    fault = MemberFault(rank=47110, function=f"{LIBRARY}regroup.{function}")
    (rank,) = runs.start_companion(4711, 1, port=port, faults=[fault], **options)
    launcher.set_companions({"4711": 1})
    rank.join(PATIENCE_S)
    runs.start_companion(4712, 1, port=port, **options)
    launcher.set_companions({"4712": 1})
    launcher.wait_for_group(companions={"4712": 1})
    runs.hurry()
    assert runs.join() == [0, 0, -signal.SIGKILL, 0], runs.log()
    assert sorted(runs.losses()) == list(range(1, 6 * LONG + 1))
    assert runs.losses() == pytest.approx(plain.losses(), abs=1e-6)


@pytest.mark.parametrize("options", [PIPELINE, pytest.param({"shard": True}, marks=needs_fsdp)])
@pytest.mark.parametrize("moment", ["", "training_builder:StepProfiler"])
def test_after_the_loss_of_a_companion_the_ranks_start_again_from_a_checkpoint(
    tmp_path: Path, launcher: FakeLauncher, runs: TrainingRuns, options: dict, moment: str
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1)
    options = options | {"step_s": 0.05}
    port = begin(runs, launcher, 2, **options)
    fault = MemberFault(rank=47110, step=0 if moment else 12)
    if moment:  # after the switch
        fault = MemberFault(rank=47110, function=LIBRARY + moment)
    runs.start_companion(4711, 1, port=port, faults=[fault], **options)
    launcher.set_companions({"4711": 1})
    codes = runs.join()
    assert codes == [RESTART_CODE, RESTART_CODE, -signal.SIGKILL], runs.log()
    launcher.set_companions({})
    runs.run(2, launcher=launcher, **options)
    assert sorted(runs.losses()) == list(range(1, STEPS + 1))
    assert runs.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_a_checkpoint_that_fails_postpones_the_change(
    launcher: FakeLauncher, runs: TrainingRuns
) -> None:
    options = PIPELINE | {"step_s": 0.5, "epochs": LONG}
    port = begin(runs, launcher, 2, **options)
    (runs.out / "ckpt").write_text("in the way of the directory")
    runs.start_companion(4711, 1, port=port, **options)
    launcher.set_companions({"4711": 1})
    dropped = launcher.wait_for_group(dropped=1)
    assert "checkpoint" in dropped["why"]
    runs.wait_for_step(max(runs.losses()) + 3)
    (runs.out / "ckpt").unlink()
    launcher.wait_for_group(companions={"4711": 1})
    runs.hurry()
    assert runs.join() == [0, 0, 0], runs.log()


def test_another_layout_is_taken_without_the_end_of_the_companions(
    launcher: FakeLauncher, runs: TrainingRuns
) -> None:
    options = PIPELINE | SLOW
    port = begin(runs, launcher, 2, **options)
    runs.start_companion(4711, 2, port=port, **options)
    launcher.set_companions({"4711": 2})
    joined = launcher.wait_for_group(companions={"4711": 2})
    runs.wait_for_step(joined["step"] + 1)
    launcher.set_orders(layout="2x2")
    launcher.wait_for("training", layout="2x2")
    runs.hurry()
    assert runs.join() == [0] * 4, runs.log()
    assert runs.layouts() == ["1x2", "1x4", "2x2"]
    assert runs.samples() == [Counter(range(SAMPLES))] * LONG


@needs_fsdp
def test_a_plan_is_followed_in_place_and_left_with_its_layout(
    tmp_path: Path, launcher: FakeLauncher, runs: TrainingRuns
) -> None:
    plain = TrainingRuns(tmp_path / "plain")
    plain.run(1, epochs=LONG)
    options = {"shard": True} | SLOW
    port = begin(runs, launcher, 2, **options)
    runs.start_companion(4711, 1, port=port, **options)
    launcher.set_companions({"4711": 1})
    joined = launcher.wait_for_group(companions={"4711": 1})
    runs.wait_for_step(joined["step"] + 1)
    for plan in ("3x1+shard=optimizer+recompute", "3x1+shard=full+recompute"):
        launcher.set_orders(layout="3x1", plan=plan)
        launcher.wait_for("training", plan=plan)
    launcher.clear_reports()
    launcher.set_companions({})
    launcher.wait_for_group(companions={}, generation=2)
    launcher.wait_for("training", plan="", gpus=2)
    runs.hurry()
    assert runs.join() == [0] * 3, runs.log()
    assert runs.layouts() == ["2x1", "3x1", "2x1"]
    assert sorted(runs.losses()) == list(range(1, 6 * LONG + 1))
    assert runs.losses() == pytest.approx(plain.losses(), abs=1e-6)


def test_spatial_groups_do_not_change_in_place(launcher: FakeLauncher, runs: TrainingRuns) -> None:
    launcher.set_companions({})
    directive = "2-4,parallel=spatial,unit=2"
    runs.start(2, launcher=launcher, model="cosmology", directive=directive, shard=True)
    assert launcher.wait_for_group(can=False)["why"] == "spatial"
    assert runs.join() == [0, 0], runs.log()
