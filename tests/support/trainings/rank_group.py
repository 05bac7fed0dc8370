"""Processes with the environment of ranks, for functions that form a group of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tests.support.patience import PATIENCE_S
from tests.support.trainings.training_runs import PROCESSES, unused_port


def run_ranks(main: Callable[..., None], size: int, *arguments: Any) -> None:
    """Run `main(rank, size, *arguments)` in one process for each rank; all must end well."""
    port = unused_port()
    ranks = [
        PROCESSES.Process(target=_enter, args=(main, rank, size, port, arguments))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in ranks] == [0] * size


def _enter(
    main: Callable[..., None], rank: int, size: int, port: int, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    torch.set_num_threads(1)
    main(rank, size, *arguments)
