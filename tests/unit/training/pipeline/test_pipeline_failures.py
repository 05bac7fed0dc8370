"""Ranks that end, hang or disagree: the others end with a one-line error."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from slurm_elastic.training.pipeline import StageLayout, cut
from tests.support.patience import PATIENCE_S
from tests.support.trainings.pipeline_ranks import (
    LENGTHS,
    data,
    engine,
    errors,
    layers,
    spawn,
)

GONE = 3


class FailingHook:
    """Forward hook that ends the process, or hangs, at its third call."""

    def __init__(self, what: str) -> None:
        self.left, self.what = 3, what

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            if self.what == "hangs":
                time.sleep(PATIENCE_S)  # until it is killed
            os._exit(9)


def trapped(rank: int, layout: StageLayout, schedule: str, victim: int, what: str) -> None:
    modules = list(cut(layers(), LENGTHS[len(layout.stages)]))
    if rank == victim:
        for part in modules:
            part.register_forward_pre_hook(FailingHook(what))
    run = engine(layout, rank, modules, schedule=schedule, micro_batches=4, timeout_s=2.5)
    for _ in range(3):
        if schedule == "pipedream":
            run.run(data(12), torch.optim.SGD(run.parameters(), lr=0.1).step)
        else:
            run.step(data(4))


def one_line(text: str) -> bool:
    lines = [line for line in text.splitlines() if line]
    return len(lines) == 1 and bool(re.match(r"rank \d failed .*: .", lines[0]))


@pytest.mark.parametrize(
    ("layout", "schedule", "victim", "what"),
    [
        (StageLayout.of(1, 1, 1), "1f1b", 0, "dies"),
        (StageLayout.of(1, 1, 1), "gpipe", 2, "dies"),
        (StageLayout.of(2, 1), "1f1b", 1, "dies"),
        (StageLayout.of(1, 1, 1), "pipedream", 1, "dies"),
        (StageLayout.of(1, 2), "pipedream", 2, "dies"),
        (StageLayout.of(2, 1), "1f1b", 2, "hangs"),
        (StageLayout.of(1, 1, 1), "pipedream", 0, "hangs"),
    ],
    ids=str,
)
def test_ranks_end_with_a_one_line_error_when_another_dies_or_hangs(
    layout: StageLayout, schedule: str, victim: int, what: str, tmp_path: Path
) -> None:
    # A hanging rank is killed when the others have ended.
    codes = [GONE] * 3
    codes[victim] = 9 if what == "dies" else -9
    spawn(tmp_path, 3, trapped, layout, schedule, victim, what, codes=codes)
    for rank in range(3):
        if rank != victim:
            assert one_line(errors(tmp_path, rank)), errors(tmp_path, rank)


DISAGREEMENTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"micro_batches": 4},
        {"micro_batches": 5},
        "micro_batches: 5 on rank 1 is invalid: expected 4 as",
    ),
    (
        {"schedule": "gpipe"},
        {"schedule": "1f1b"},
        "schedule: 1f1b on rank 1 is invalid: expected gpipe as on rank 0",
    ),
    ({"schedule": "1f1b"}, {"schedule": "nope"}, "rank 1: schedule: 'nope' is invalid"),
]


def disagree(rank: int, options: list[dict[str, Any]]) -> None:
    engine(StageLayout.of(1, 1), rank, **options[rank])


def other_replica(rank: int) -> None:
    parts = [cut(layers(), [7])[0]]
    if rank == 1:
        parts[0][0] = torch.nn.Linear(6, 17)
    engine(StageLayout.of(2), rank, list(parts))


def no_stage(rank: int) -> None:
    engine(StageLayout.of(1, 1) if rank == 0 else StageLayout(((1,), (0,))), rank)


def other_shape(rank: int) -> None:
    batch = [*data(1), *data(1, rows=5)]
    engine(StageLayout.of(1, 1), rank, micro_batches=2, timeout_s=3.0).step(batch)


@pytest.mark.parametrize(("one", "other", "message"), DISAGREEMENTS)
def test_arguments_that_differ_between_ranks_are_an_error_on_all_ranks(
    one: dict[str, Any], other: dict[str, Any], message: str, tmp_path: Path
) -> None:
    spawn(tmp_path, 2, disagree, [one, other], codes=[GONE, GONE])
    for rank in range(2):
        assert re.search(message, errors(tmp_path, rank)), errors(tmp_path, rank)


def test_replicas_with_different_parameters_are_an_error_on_all_ranks(tmp_path: Path) -> None:
    spawn(tmp_path, 2, other_replica, codes=[GONE, GONE])
    message = (
        r"stage 0: parameters of rank 1 are invalid: expected those of rank 0: front.weight is"
        r" .*\[17, 6\], not"
    )
    for rank in range(2):
        assert re.search(message, errors(tmp_path, rank)), errors(tmp_path, rank)


def test_a_micro_batch_of_another_shape_needs_sizes(tmp_path: Path) -> None:
    spawn(tmp_path, 2, other_shape, codes=[GONE, GONE])
    assert "pass sizes= where shapes differ" in errors(tmp_path, 0)
    # Rank 0 may be gone before the last group is whole on rank 1.
    assert re.search("rank 0|group of ranks 0, 1", errors(tmp_path, 1)), errors(tmp_path, 1)


def test_layouts_that_differ_between_ranks_are_an_error(tmp_path: Path) -> None:
    spawn(tmp_path, 2, no_stage, codes=[GONE, GONE])
    message = "layout: ((1,), (0,)) on rank 1 is invalid: expected ((0,), (1,)) as on rank 0"
    assert message in errors(tmp_path, 0)
