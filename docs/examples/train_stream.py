#!/usr/bin/env python3
"""A streaming dataset without length, whose samples are dictionaries, in a loop of its own.

    python docs/examples/train_stream.py --out /tmp/stream                   # a laptop
    esrun --local 2 python docs/examples/train_stream.py --out /tmp/stream   # two ranks

The stream has 1000 records an epoch and draws their order itself. Each is trained on once per
epoch on any number of ranks and of worker processes. Lines that the library needs end with
`# elastic`. Writes OUT/losses.jsonl, one line per step, and OUT/records-rank*.txt.
"""

from slurm_elastic.training import ElasticLoop  # isort: skip  # elastic

import argparse
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import IterableDataset

RECORDS, WIDTH = 1000, 16


class Records(IterableDataset[dict[str, Any]]):
    """Records in a random order, as from files that are read in blocks and shuffled."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(RECORDS))
        random.shuffle(order)  # the same on all ranks: the library seeds it
        for number in order:
            values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(number))
            yield {"number": number, "values": values, "target": values[:4].sum().tanh()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a stream of records.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="processes per rank that read")
    args = parser.parse_args()
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))
    if distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    loop = ElasticLoop(  # elastic
        args.out / "checkpoints",
        global_batch=32,
        micro_batch=8,
        model=model,
        optimizer=optimizer,
        plateau=plateau,
    )
    loader = loop.loader(Records(), num_workers=args.workers)  # elastic
    for epoch in loop.epochs(args.epochs):  # elastic
        mean = loop.state.setdefault("mean", 0.0)
        with (args.out / f"records-rank{loop.rank}.txt").open("a") as seen:
            step_loss, numbers = 0.0, []
            for batch in loader:
                loss = nn.functional.mse_loss(model(batch["values"]).squeeze(1), batch["target"])
                (loss * loop.loss_weight).backward()  # elastic
                step_loss += float(loss.detach()) * loop.loss_weight / loop.world_size
                numbers += batch["number"].tolist() if loop.loss_weight else []
                if loop.last_micro_batch:  # elastic
                    optimizer.step()
                    optimizer.zero_grad()
                    step_loss = total(step_loss)
                    mean = loop.state["mean"] = 0.9 * mean + 0.1 * step_loss
                    seen.writelines(f"{epoch} {number}\n" for number in numbers)
                    if loop.rank == 0:
                        write(args.out, {"step": loop.step + 1, "loss": step_loss})
                    step_loss, numbers = 0.0, []
        plateau.step(mean)
    if distributed.is_initialized():
        distributed.destroy_process_group()


def total(value: float) -> float:
    """Return the sum over all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    if distributed.is_initialized():
        distributed.all_reduce(tensor)
    return float(tensor)


def write(out: Path, line: dict[str, Any]) -> None:
    with (out / "losses.jsonl").open("a") as losses:
        losses.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
