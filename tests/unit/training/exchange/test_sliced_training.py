"""Replicas with sliced optimizer state train as one rank does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.support.trainings.small_buckets import SmallBuckets
from tests.support.trainings.training_runs import EPOCHS, SAMPLES, STEPS, TrainingRuns


@pytest.mark.parametrize(
    ("model", "optimizer", "frozen"), [("tied", "adamw", 0), ("plain", "sgd", 1)]
)
def test_sliced_ranks_train_as_one_rank_and_exchange_checkpoints_with_replicas(
    tmp_path: Path, model: str, optimizer: str, frozen: int
) -> None:
    options = {"optimizer": optimizer, "model": model, "clip_norm": 0.5, "frozen": frozen}
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, **options)
    sliced = TrainingRuns(tmp_path / "sliced")
    options |= {"micro_batch": 3, "faults": [SmallBuckets()]}
    for size, until, overlap in ((2, 5, "sliced"), (3, 10, "sliced"), (2, STEPS, "none")):
        sliced.run_until(until, size, overlap=overlap, **options)
    assert sliced.sizes() == [2, 3, 2]
    assert sliced.losses() == pytest.approx(alone.losses(), abs=1e-6)
    assert sliced.samples() == [Counter(range(SAMPLES))] * EPOCHS
