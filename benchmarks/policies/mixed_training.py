#!/usr/bin/env python3
"""One training of `mixed_cluster`, whose GPUs are emulated (docs/examples/emulate.py).

    mixed_training.py OUT KIND --steps N [--rate SAMPLES/S] [--thawed]

| kind | |
|---|---|
| data | `slurm_elastic.training.init`: on replicas, or on stages where the directive says so |
| frozen | the same; the first two of four layers hardly matter, and may be frozen |
| sharded | `ElasticLoop` with a part of the optimizer's state on each rank (ZeRO) |

OUT/steps.jsonl, written by rank 0: step, loss, ranks, layout, layers that are frozen, run of the
job, and the time (epoch s) at the end of the step.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import CriterionInputs, ElasticLoop, Freezing, init  # isort: skip

import argparse
import importlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

LAYERS, WIDTH, BATCH, MICRO_BATCH, SAMPLES = 4, 32, 16, 4, 512
CHECKPOINT_S = 20.0
FROZEN_LAYERS = 2
LEARNING = {"lr": 2e-3, "momentum": 0.9}

#: What a step reports: its number, its loss, and fields of the line.
Step = tuple[int, float, dict[str, Any]]


class Pause(torch.autograd.Function):  # type: ignore[misc, unused-ignore]
    """Identity that takes time: once in the forward pass, twice in the backward pass."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        """Wait."""
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Wait twice as long."""
        time.sleep(2 * ctx.seconds)
        return gradient, None


class Layer(nn.Module):  # type: ignore[misc, unused-ignore]
    """Residual layer that takes as long as its samples need on the emulated GPU.

    Args:
        scale: of what it adds to its input.
        sample_s: seconds of a sample in forward and backward pass.
    """

    def __init__(self, scale: float, sample_s: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self._scale, self._sample_s = scale, sample_s

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        """Add to the input."""
        added = points + self._scale * torch.tanh(self.inner(points))
        seconds = self._sample_s * len(points) / 3
        return Pause.apply(added, seconds) if seconds else added


class Front:
    """Criterion of freezing: the first layers have converged."""

    plastic = False

    def see(self, look: CriterionInputs) -> int:
        """Return the number of converged layers."""
        return max(look.frozen, FROZEN_LAYERS)

    def thawed(self) -> None:
        """Ignore that layers train again."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: it has no state."""
        return {}

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore nothing."""


def targets(points: torch.Tensor) -> torch.Tensor:
    """Return the target values of these points."""
    matrix = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(2))
    return points + torch.tanh(points @ matrix / math.sqrt(WIDTH))


def network(kind: str, sample_s: float) -> nn.Sequential:
    """Return the network of a kind."""
    torch.manual_seed(0)
    scales = [1e-3 if kind == "frozen" and i < FROZEN_LAYERS else 0.5 for i in range(LAYERS)]
    return nn.Sequential(*(Layer(scale, sample_s / LAYERS) for scale in scales))


def library(
    out: Path, kind: str, *, steps: int, sample_s: float, communicate: Any, freezes: bool
) -> Iterator[Step]:
    """Train by `init`."""
    points = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(parameters, **LEARNING)
        sgd.register_step_pre_hook(communicate)
        return sgd

    job = init(
        network(kind, sample_s),
        nn.MSELoss(),
        optimizer,
        torch.utils.data.TensorDataset(points, targets(points)),
        global_batch=BATCH,
        micro_batch=MICRO_BATCH,
        epochs=math.ceil(steps * BATCH / SAMPLES),
        checkpoint_dir=out / "checkpoints",
        checkpoint_every_s=CHECKPOINT_S,
        application=kind,
        freeze=Freezing(criterion=Front(), begin=0.05) if freezes else "off",
    )
    for batch in job:
        loss = job.step(batch)
        if job.rank == 0:
            frozen = sum(not p.requires_grad for p in job.model.parameters()) // 2
            fields = {"ranks": job.world_size, "layout": job.layout, "frozen": frozen}
            yield batch.step, loss, fields
    job.finish()


def sharded(
    out: Path, kind: str, *, steps: int, sample_s: float, communicate: Any, freezes: bool
) -> Iterator[Step]:
    """Train in a loop of the script's own."""
    del freezes
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    model: nn.Module = network(kind, sample_s)
    optimizer: torch.optim.Optimizer
    if distributed.is_initialized():
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **LEARNING)
    else:
        optimizer = torch.optim.SGD(model.parameters(), **LEARNING)
    optimizer.register_step_pre_hook(communicate)
    loop = ElasticLoop(
        out / "checkpoints",
        global_batch=BATCH,
        micro_batch=MICRO_BATCH,
        checkpoint_every_s=CHECKPOINT_S,
        application=kind,
        model=model,
        optimizer=optimizer,
    )
    for step in loop.steps(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for _ in loop.micro_batches():
            points = torch.randn(MICRO_BATCH, WIDTH)
            loss = nn.functional.mse_loss(model(points), targets(points)) * loop.loss_weight
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if distributed.is_initialized():
            distributed.all_reduce(total)
            # The library calls state_dict on rank 0 alone, after any step.
            optimizer.consolidate_state_dict(to=0)  # type: ignore[attr-defined, unused-ignore]
        if loop.rank == 0:
            fields = {"ranks": loop.world_size, "layout": f"{loop.world_size}x1", "frozen": 0}
            yield step + 1, float(total) / loop.world_size, fields


KINDS: dict[str, Callable[..., Iterator[Step]]] = {
    "data": library,
    "frozen": library,
    "sharded": sharded,
}


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rate", type=float, default=25.0, help="samples/s of an emulated v100")
    parser.add_argument("--thawed", action="store_true", help="freeze nothing")
    parser.add_argument("--examples", default="/opt/src/slurm-elastic/docs/examples")
    args = parser.parse_args()
    sys.path.insert(0, args.examples)
    emulate = importlib.import_module("emulate")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    device = emulate.device(args.rate)
    sample_s = 1.0 / device.samples_per_s if device else 0.0

    def communicate(*_: Any) -> None:
        if device and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            time.sleep(device.communication_s)

    run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with (args.out / "steps.jsonl").open("a", buffering=1) as lines:
        for step, loss, fields in KINDS[args.kind](
            args.out,
            args.kind,
            steps=args.steps,
            sample_s=sample_s,
            communicate=communicate,
            freezes=args.kind == "frozen" and not args.thawed,
        ):
            row = {"step": step, "loss": loss, "run": run, "end": time.time(), **fields}
            lines.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
