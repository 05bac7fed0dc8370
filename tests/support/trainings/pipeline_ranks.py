"""Pipelines of several processes, for the tests of the engine."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

from slurm_elastic.training.pipeline import LayoutError, LinkError, PipelineEngine, StageLayout, cut
from tests.support.patience import PATIENCE_S
from tests.support.trainings.training_runs import PROCESSES

ROWS, WIDTH, CLASSES = 3, 6, 4


def layers() -> list[tuple[str, torch.nn.Module]]:
    """Return seven layers, equal in every process."""
    torch.manual_seed(1)
    return [
        ("front", torch.nn.Linear(WIDTH, 16)),
        ("act1", torch.nn.Tanh()),
        ("mid1", torch.nn.Linear(16, 16)),
        ("act2", torch.nn.Tanh()),
        ("mid2", torch.nn.Linear(16, 16)),
        ("act3", torch.nn.Tanh()),
        ("back", torch.nn.Linear(16, CLASSES)),
    ]


#: Layers of each stage, by the number of stages.
LENGTHS = {1: [7], 2: [3, 4], 3: [2, 2, 3], 4: [2, 2, 2, 1]}


def data(count: int, seed: int = 5, rows: int = ROWS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches, equal in every process."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, WIDTH, generator=generator),
            torch.randint(CLASSES, (rows,), generator=generator),
        )
        for _ in range(count)
    ]


def loss(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, targets)


def engine(
    layout: StageLayout,
    rank: int,
    modules: list[torch.nn.Module] | None = None,
    **options: Any,
) -> PipelineEngine:
    """Return this rank's part of the model above, or of other modules."""
    modules = modules or list(cut(layers(), LENGTHS[len(layout.stages)]))
    held = {stage: modules[stage] for stage in layout.held_by(rank)}
    for stage, module in held.items():
        if layout.stages[stage][0] != rank:
            # Without a seed replicas differ; they take the values of the first.
            for parameter in module.parameters():
                parameter.data.add_(1.0)
    return PipelineEngine(held, layout, **({"loss": loss, "timeout_s": 30.0} | options))


def spawn(
    out: Path,
    size: int,
    main: Callable[..., Any],
    *arguments: Any,
    codes: list[int] | None = None,
) -> list[Any]:
    """Return the results of `main(rank, ...)` on each rank of a gloo group.

    With `codes` ranks are expected to end with these; -9: killed when the others have ended.
    """
    out.mkdir(parents=True, exist_ok=True)
    ranks = [
        PROCESSES.Process(target=_rank, args=(rank, size, out, main, arguments))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    end = time.monotonic() + PATIENCE_S
    for rank, process in enumerate(ranks):
        if codes is None or codes[rank] >= 0:
            process.join(max(0.0, end - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    exit_codes = [process.exitcode for process in ranks]
    stderr = {rank: errors(out, rank) for rank in range(size)}
    assert exit_codes == (codes or [0] * size), stderr
    results = [out / f"{rank}.pt" for rank in range(size)]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in results]


def errors(out: Path, rank: int) -> str:
    """Return the stderr of a rank."""
    return (out / f"rank{rank}.err").read_text()


def _rank(
    rank: int, size: int, out: Path, main: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    log = os.open(out / f"rank{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(out / "store"), size),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    try:
        result = main(rank, *arguments)
    except (LayoutError, LinkError) as error:
        # As a caller of the library: one line, then exit, as other ranks may have ended.
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
        os._exit(3)
    torch.save(result, out / f"{rank}.pt")
    dist.barrier()
    # Debian's torch 2.6 can hang when groups end right after a collective.
    os._exit(0)
