"""A loop on DeepSpeed in changing worlds: batches, schedule and losses stay the same."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("deepspeed", reason="needs requirements/integrations.txt")

from slurm_elastic.integrations.batch_share import share
from slurm_elastic.integrations.deepspeed import elastic_config
from tests.integrations import deepspeed_training, training_attempts
from tests.integrations.recorded_steps import worlds_of
from tests.integrations.training_attempts import assert_same_training, run_until_saved

attempt = functools.partial(training_attempts.attempt, deepspeed_training)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("deepspeed") / "undisturbed"
    attempt(out, ranks=1)
    return out


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_training_that_changes_its_world_is_the_undisturbed_one(tmp_path, undisturbed, stage):
    """2 → 4 → 1 ranks, cut within an epoch each time; with ZeRO the checkpoint is converted."""
    out = tmp_path / "run"
    for ranks, stop in ((2, 7), (4, 16), (1, 0)):
        words = ["--stage", str(stage), "--save-every", "5", "--stop-at", str(stop)]
        attempt(out, *words, ranks=ranks)
    assert worlds_of(out) == [2] * 5 + [4] * 10 + [1] * 9
    assert_same_training(out, undisturbed)
    names = sorted(path.name for path in (out / "ckpt").iterdir() if path.is_dir())
    assert names == ["global_step20", "global_step24"]


def test_a_notice_is_answered_by_a_save_and_no_step_is_lost(tmp_path, undisturbed):
    out = tmp_path / "run"
    run_until_saved(deepspeed_training, out, "--stage", "1", ranks=2)
    attempt(out, "--stage", "1", ranks=4)
    assert_same_training(out, undisturbed)


def test_elasticity_of_deepspeed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="elasticity: enabled is invalid"):
        elastic_config({"elasticity": {"enabled": True}}, share(8, per_rank=8, world=1), tmp_path)
