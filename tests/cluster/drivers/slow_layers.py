#!/usr/bin/env python3
"""A training whose layers sleep for each sample: in stages, or with a divided optimizer.

    slow_layers.py OUT stages    # slurm_elastic.training.init, to be cut into stages
    slow_layers.py OUT slices    # init, whose replicas divide the state of the optimizer
    slow_layers.py OUT loop      # ElasticLoop and ZeroRedundancyOptimizer: reports whole steps only

With `slices` the exchange of more than two replicas takes `EXCHANGE_S` longer.

Writes OUT/steps.jsonl, one line per step.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import ElasticLoop, init  # isort: skip

import json
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
from torch.utils.data import TensorDataset

from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange

LAYERS, WIDTH, BATCH, MICRO_BATCH = 4, 64, 16, 4
#: Seconds of a sample in a layer.
SAMPLE_S = 0.005
#: Seconds by which the exchange of more than two replicas is slower.
EXCHANGE_S = 0.4
CHECKPOINT_S = 3.0
SGD = {"lr": 1e-3, "momentum": 0.9}

Step = tuple[int, str, int]


class SlowLinear(nn.Linear):
    """Linear layer that takes as long as the samples need."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as in torch
        time.sleep(SAMPLE_S * len(input))
        return super().forward(input)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, **SGD)


def stages(
    out: Path, layers: list[tuple[str, nn.Module]], *, overlap: str = "auto"
) -> Iterator[Step]:
    points = torch.randn(256, WIDTH)
    job = init(
        layers,
        nn.MSELoss(),
        sgd,
        TensorDataset(points, points),
        global_batch=BATCH,
        epochs=10_000,
        checkpoint_dir=out / "checkpoints",
        checkpoint_every_s=CHECKPOINT_S,
        overlap=overlap,
    )
    for batch in job:
        job.step(batch)
        yield batch.step, job.layout, job.rank
    job.finish()


def slices(out: Path, layers: list[tuple[str, nn.Module]]) -> Iterator[Step]:
    reduce = SlicedExchange.reduce

    def slow_with_many(self: SlicedExchange, *args: Any) -> list[float]:
        if distributed.get_world_size() > 2:
            time.sleep(EXCHANGE_S)
        return reduce(self, *args)

    SlicedExchange.reduce = slow_with_many
    return stages(out, layers, overlap="sliced")


def loop(out: Path, layers: list[tuple[str, nn.Module]]) -> Iterator[Step]:
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    model: nn.Module = nn.Sequential(*(layer for _, layer in layers))
    optimizer = sgd(model.parameters())
    sharded = distributed.is_initialized()
    if sharded:
        model = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **SGD)
    steps = ElasticLoop(
        out / "checkpoints",
        global_batch=BATCH,
        micro_batch=MICRO_BATCH,
        checkpoint_every_s=CHECKPOINT_S,
        model=model,
        optimizer=optimizer,
    )
    for step in steps.steps(100_000):
        optimizer.zero_grad()
        for _ in steps.micro_batches():
            points = torch.randn(MICRO_BATCH, WIDTH)
            loss = nn.functional.mse_loss(model(points), points)
            (loss * steps.loss_weight).backward()
        optimizer.step()
        if sharded:  # before its state is saved
            optimizer.consolidate_state_dict(to=0)
        yield step, f"{steps.world_size}x1", steps.rank


KINDS: dict[str, Callable[[Path, list[tuple[str, nn.Module]]], Iterator[Step]]] = {
    "stages": stages,
    "slices": slices,
    "loop": loop,
}


def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [(f"layer{i}", SlowLinear(WIDTH, WIDTH)) for i in range(LAYERS)]
    with (out / "steps.jsonl").open("a", buffering=1) as lines:
        for step, layout, rank in KINDS[sys.argv[2]](out, layers):
            if rank == 0:
                lines.write(json.dumps({"step": step, "layout": layout}) + "\n")


if __name__ == "__main__":
    main()
