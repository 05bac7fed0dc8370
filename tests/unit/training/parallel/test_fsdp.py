"""FSDP2 gives the result of replicas."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from slurm_elastic.training.parallel import fsdp
from tests.support.trainings.training_runs import (
    EPOCHS,
    LABELS,
    SAMPLES,
    STEPS,
    WIDTH,
    FakeLauncher,
    TrainingRuns,
)

pytestmark = pytest.mark.skipif(bool(fsdp.unsupported()), reason=fsdp.unsupported())


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_sharded_ranks_train_as_one_rank_and_exchange_checkpoints_with_replicas(
    tmp_path: Path, optimizer: str
) -> None:
    alone = TrainingRuns(tmp_path / "alone")
    alone.run(1, optimizer=optimizer)
    parts = TrainingRuns(tmp_path / "parts")
    # Uneven shares, in uneven numbers of micro-batches; then whole replicas; then parts again.
    for size, until, shard in ((3, 6, True), (2, 12, False), (2, STEPS, True)):
        parts.run_until(until, size, optimizer=optimizer, shard=shard, micro_batch=3)
    expected = alone.losses()
    assert parts.losses().keys() == expected.keys()
    for step, loss in parts.losses().items():
        assert loss == pytest.approx(expected[step], rel=1e-5)
    assert parts.samples() == [Counter(range(SAMPLES))] * EPOCHS


def test_all_ranks_have_equally_many_micro_batches() -> None:
    for count in range(1, 20):
        splits = [
            fsdp.PaddedSplit(rank=rank, world_size=3, micro=2).slices(count) for rank in range(3)
        ]
        assert len({len(pieces) for pieces in splits}) == 1
        taken = [i for pieces in splits for piece in pieces if piece.counts for i in piece.span]
        assert sorted(taken) == list(range(count))


@pytest.mark.parametrize(("micro_batch", "accumulation"), [(None, 0), (3, 1)])
def test_sharded_ranks_report_their_micro_steps(
    tmp_path: Path, launcher: FakeLauncher, micro_batch: int | None, accumulation: int
) -> None:
    runs = TrainingRuns(tmp_path / "parts")
    runs.run(2, launcher=launcher, shard=True, micro_batch=micro_batch, step_s=0.01)
    measured = [r for r in launcher.reports if r.get("micro_step_s")]
    assert measured
    for r in measured:
        assert r["layout"] == "2x1"
        assert 0 < r["micro_step_s"] * (1 + accumulation) <= r["step_time_s"]
        assert (r["accumulation"], r.get("micro_batches")) == (accumulation, None)
        assert r["sync_s"] > 0
        # Two ranks: half of all parts is gathered twice for each pass, and half is reduced.
        whole = 4 * ((WIDTH + 1) * 16 + 17 * LABELS)
        assert r["exchange_bytes"] == (2 * (1 + accumulation) + 1) * whole // 2
