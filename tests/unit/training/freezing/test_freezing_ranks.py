"""Freezing with several ranks: at the same step, with less to reduce, also after a resize."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slurm_elastic.training import Freezing, init
from slurm_elastic.training.exchange import exchange_schedule
from tests.support.trainings.fixed_criterion import FixedCriterion
from tests.support.trainings.rank_group import run_ranks
from tests.support.trainings.small_buckets import SmallBuckets

SAMPLES, BATCH, EPOCHS, WIDE = 60, 12, 8, 40
STEPS = EPOCHS * SAMPLES // BATCH
#: Bytes of the gradients of the first two layers.
FROZEN_BYTES = 4 * (6 * WIDE + WIDE + WIDE * WIDE + WIDE)
BUCKETS = "buckets-1MiB"


def network(norm: bool) -> nn.Sequential:
    torch.manual_seed(2)
    first = [nn.Linear(6, WIDE), *([nn.BatchNorm1d(WIDE)] if norm else []), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 4))


def rank_main(rank: int, size: int, out: Path, options: dict[str, Any]) -> None:
    if options.get("overlap") == "buckets":
        SmallBuckets().prepare(rank)
    generator = torch.Generator().manual_seed(5)
    points = torch.randn(SAMPLES, 6, generator=generator)
    labels = (points @ torch.randn(6, 4, generator=generator)).argmax(dim=1)
    job = init(
        network(options.get("norm", False)),
        nn.CrossEntropyLoss(),
        lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
        torch.utils.data.TensorDataset(points, labels),
        global_batch=BATCH,
        epochs=EPOCHS,
        checkpoint_dir=out / "ckpt",
        checkpoint_every_s=0.0,
        overlap=options.get("overlap", "auto"),
        freeze=Freezing(
            criterion=FixedCriterion(2), max_penalty=1.0, every=1, passes=1, begin=0.0, settled=1e9
        ),
    )
    with (out / f"rank{rank}.jsonl").open("a", buffering=1) as log:
        for batch in job:
            loss = job.step(batch)
            buffers = [b.double().sum().item() for b in job.model.buffers()]
            line = {"step": batch.step, "loss": loss, "frozen": job.frozen, "buffers": buffers}
            line["exchange"] = exchange_schedule.SCHEDULES[job._strategy._exchange.number].name
            log.write(json.dumps(line | {"bytes": job.reduced_bytes, "world": size}) + "\n")
            if batch.step == options.get("until"):
                break
    if "until" not in options:
        job.finish()
    elif size > 1:
        # As a kill would, but after the same step everywhere.
        torch.distributed.barrier()
    os._exit(0)


def run(out: Path, size: int, **options: Any) -> list[list[dict[str, Any]]]:
    """Return the output of each rank, by step."""
    out.mkdir(parents=True, exist_ok=True)
    run_ranks(rank_main, size, out, options)
    logs = [(out / f"rank{rank}.jsonl").read_text().splitlines() for rank in range(size)]
    return [[json.loads(line) for line in log] for log in logs]


def test_another_number_of_ranks_resumes_with_the_same_prefix(tmp_path: Path) -> None:
    (alone,) = run(tmp_path / "alone", 1)
    first, second = run(tmp_path / "moved", 2, until=28, overlap="buckets")
    assert [line["frozen"] for line in first] == [line["frozen"] for line in second]
    assert first[26]["frozen"] == 2
    assert [line["exchange"] for line in first] == [line["exchange"] for line in second]
    sent = {line["frozen"]: line["bytes"] for line in first if line["exchange"] == BUCKETS}
    assert set(sent) == {0, 2}, "gradients leave in buckets before and after layers freeze"
    assert sent[0] - sent[2] == FROZEN_BYTES + 4 * 4
    # One rank's log goes on in the other's file; the last step was not saved.
    run(tmp_path / "moved", 3, overlap="buckets")
    text = (tmp_path / "moved" / "rank2.jsonl").read_text()
    log = [json.loads(line) for line in text.splitlines()]
    assert {line["frozen"] for line in log} == {2}
    assert log[0]["step"] == 28
    assert log[-1]["exchange"] == BUCKETS
    assert log[-1]["bytes"] == sent[2]
    whole = {line["step"]: line["loss"] for line in [*first[:27], *log]}
    assert sorted(whole) == list(range(1, STEPS + 1))
    assert whole == pytest.approx({line["step"]: line["loss"] for line in alone}, abs=1e-6)
    assert [line["frozen"] for line in first[:27]] == [line["frozen"] for line in alone[:27]]


def test_gradients_of_frozen_layers_are_not_reduced(tmp_path: Path) -> None:
    log, _ = run(tmp_path / "run", 2)
    sent = [line["bytes"] for line in log]
    steps = {line["frozen"]: line["step"] for line in reversed(log)}
    # Four parameters less, and for each of them the word that tells whether there is a gradient.
    assert sent[0] - sent[-1] == FROZEN_BYTES + 4 * 4
    assert sent[steps[2] - 1] == sent[-1]


def test_frozen_batch_norms_are_the_same_on_all_ranks(tmp_path: Path) -> None:
    one, other = run(tmp_path / "run", 2, norm=True)
    for a, b in zip(one, other, strict=True):
        assert (a["buffers"] == b["buffers"]) == (a["frozen"] == 2), a["step"]
    after = [line["buffers"] for line in one if line["frozen"] == 2]
    assert len(after) > 5
    assert all(buffers == after[0] for buffers in after)
