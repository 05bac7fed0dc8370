"""Lightning in changing worlds: batches, schedule and losses stay the same."""

import functools
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="needs requirements/integrations.txt")

from slurm_elastic.integrations.batch_share import share
from slurm_elastic.integrations.lightning import ElasticSampler, convert_counts, newest_file
from tests.integrations import lightning_training, training_attempts
from tests.integrations.recorded_steps import worlds_of
from tests.integrations.training_attempts import assert_same_training, run_until_saved

attempt = functools.partial(training_attempts.attempt, lightning_training)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("lightning") / "undisturbed"
    attempt(out, ranks=1)
    return out


def test_a_training_that_is_cut_within_epochs_is_the_undisturbed_one(tmp_path, undisturbed):
    """1 → 2 → 4 → 1 ranks; the second cut is after the last step of an epoch."""
    out = tmp_path / "run"
    for ranks, stop in ((1, 5), (2, 12), (4, 16), (1, 0)):
        attempt(out, "--save-every", "4", "--stop-at", str(stop), ranks=ranks)
    assert worlds_of(out) == [1] * 4 + [2] * 8 + [4] * 4 + [1] * 8
    assert_same_training(out, undisturbed)


def test_a_training_that_is_cut_between_epochs_is_the_undisturbed_one(tmp_path, undisturbed):
    out = tmp_path / "run"
    for ranks, stop in ((4, 8), (1, 15), (2, 0)):
        attempt(out, "--save-epochs", "--stop-at", str(stop), ranks=ranks)
    assert worlds_of(out) == [4] * 6 + [1] * 6 + [2] * 12
    assert_same_training(out, undisturbed)


def test_a_notice_is_answered_by_a_save_and_no_step_is_lost(tmp_path, undisturbed):
    out = tmp_path / "run"
    run_until_saved(lightning_training, out, ranks=2)
    attempt(out, ranks=4)
    assert_same_training(out, undisturbed)


def test_a_file_that_was_cut_is_not_the_newest(tmp_path):
    import torch

    assert newest_file(tmp_path) is None
    torch.save({"a": torch.zeros(1000)}, tmp_path / "epoch=1-step=4.ckpt")
    data = (tmp_path / "epoch=1-step=4.ckpt").read_bytes()
    (tmp_path / "epoch=2-step=8.ckpt").write_bytes(data[: len(data) // 2])
    assert newest_file(tmp_path) == str(tmp_path / "epoch=1-step=4.ckpt")


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_the_ranks_share_each_step_of_one_order(world):
    planned = share(24, per_rank=3, world=world)
    ranks = [list(ElasticSampler(250, planned, rank=rank)) for rank in range(world)]
    alone = list(ElasticSampler(250, share(24, per_rank=24, world=1), rank=0))
    size = planned.per_rank * planned.accumulation
    for step in range(10):
        own = [number for rank in ranks for number in rank[step * size : (step + 1) * size]]
        assert sorted(own) == sorted(alone[step * 24 : (step + 1) * 24])
    assert all(len(rank) == 240 // world for rank in ranks)


def test_counts_keep_their_differences():
    """Saved in on_train_batch_end, when the last micro-batch does not count as completed yet."""
    counts = {"ready": 8, "started": 8, "processed": 8, "completed": 7}
    progress = {"total": dict(counts), "current": counts}
    convert_counts(progress, 16, 32)
    assert progress["current"] == {"ready": 4, "started": 4, "processed": 4, "completed": 3}
