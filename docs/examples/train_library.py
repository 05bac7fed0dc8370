#!/usr/bin/env python3
"""A training script that uses the library, so that it can be stopped and resized at any step.

    python docs/examples/train_library.py --out /tmp/run          # alone, no Slurm
    sbatch docs/examples/train_library.sbatch                     # in a cluster

Its output shows that no step was lost (`docs/examples/check_run.py`):

    OUT/samples-rankN.jsonl   one line per finished step: the samples this rank trained on
    OUT/losses.jsonl          one line per finished step: the loss over the global batch
    OUT/checkpoints/          the library's
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import CriterionInputs, Freezing, init  # isort: skip

import argparse
import json
import math
import os
from pathlib import Path

import emulate
import torch
from torch import nn
from torch.utils.data import TensorDataset


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on synthetic data.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--micro-batch", type=int, help="most samples through the model at once")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--workers", type=int, default=0, help="data-loader processes per rank")
    parser.add_argument("--checkpoint-every", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument("--rate", type=float, default=160.0, help="samples/s of an emulated v100")
    parser.add_argument(
        "--app",
        choices=emulate.APPLICATIONS,
        default="typed",
        help="`even` runs equally fast on every emulated GPU type",
    )
    parser.add_argument(
        "--communication",
        type=float,
        default=1.0,
        metavar="FACTOR",
        help="emulated seconds of communication, times this",
    )
    parser.add_argument(
        "--settled",
        type=int,
        default=0,
        metavar="N",
        help="begin with N layers that hardly matter and can be frozen",
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def synthetic(samples: int, seed: int) -> TensorDataset:
    """Return points in 32 dimensions; a fixed random matrix gives their classes, 10 in all."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(samples, 32, generator=generator)
    matrix = torch.randn(32, 10, generator=generator)
    return TensorDataset(points, (points @ matrix).argmax(dim=1))


class Front:
    """Criterion for freeze=auto: a fixed number of front layers have converged."""

    plastic = False

    def __init__(self, layers: int) -> None:
        self.layers = layers

    def see(self, look: CriterionInputs) -> int:
        return max(look.frozen, self.layers)

    def thawed(self) -> None:
        pass

    def state_dict(self) -> dict[str, int]:
        return {"layers": self.layers}

    def load_state_dict(self, state: dict[str, int], /) -> None:
        self.layers = state["layers"]


class Settled(nn.Module):
    """Layer that hardly matters: it adds a thousandth to its input.

    It has few parameters, so that freezing mainly saves computing, as in the front of a CNN.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points + 1e-3 * torch.tanh(self.inner(points))


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = nn.Sequential(
        *(Settled(32) for _ in range(args.settled)),
        nn.Linear(32, 128),
        nn.GELU(),
        nn.Linear(128, 64),
        nn.GELU(),
        nn.Linear(64, 10),
    )
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    steps = args.epochs * math.ceil(args.samples / args.global_batch)
    # Down to a fifth: where the learning rate falls tenfold, all layers thaw.
    least = 0.2 if args.settled else 0.0
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: max(least, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))
    )
    device = emulate.device(args.rate, args.app, communication=args.communication)
    if device is not None:
        device.attach(model, optimizer)

    job = init(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        synthetic(args.samples, args.seed),
        global_batch=args.global_batch,
        epochs=args.epochs,
        checkpoint_dir=args.out / "checkpoints",
        seed=args.seed,
        scheduler=scheduler,
        micro_batch=args.micro_batch,
        workers=args.workers,
        checkpoint_every_s=args.checkpoint_every,
        application=args.app,
        freeze=Freezing(criterion=Front(args.settled)) if args.settled else "off",
    )
    args.out.mkdir(parents=True, exist_ok=True)
    run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with (
        (args.out / f"samples-rank{job.rank}.jsonl").open("a", buffering=1) as samples,
        (args.out / "losses.jsonl").open("a", buffering=1) as losses,
    ):
        for batch in job:
            loss = job.step(batch)
            line = {"step": batch.step, "epoch": batch.epoch, "world": job.world_size, "run": run}
            samples.write(json.dumps(line | {"indices": batch.indices}) + "\n")
            if job.rank == 0:
                losses.write(json.dumps(line | {"loss": loss}) + "\n")
                if batch.step % 20 == 0:
                    print(f"step {batch.step} of {steps}: loss {loss:.4f}", flush=True)
    job.finish()


if __name__ == "__main__":
    main()
