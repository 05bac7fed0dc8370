"""Training of a network of a chosen number of parameters, with a line of times for each step.

    wide_training.py OUT --parameters 1000000 [--steps N] [--layers 4] [--batch 16] [--overlap auto]

OUT/steps.jsonl, written by rank 0: step, loss, ranks, run of the job, begin and end (epoch s).
"""

from slurm_elastic.training import init  # isort: skip - before torch, which it starts faster

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
from torch import nn

CLASSES, SAMPLES = 10, 4096


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--steps", type=int, default=10**7)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=16, help="samples of a step, of all ranks")
    parser.add_argument("--overlap", default="auto", help="as of init")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = math.isqrt(args.parameters // args.layers)
    layers = [m for _ in range(args.layers) for m in (nn.Linear(width, width), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(width, CLASSES))
    points = torch.randn(SAMPLES, width, generator=torch.Generator().manual_seed(1))
    job = init(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        torch.utils.data.TensorDataset(points, points[:, :CLASSES].argmax(dim=1)),
        global_batch=args.batch,
        epochs=math.ceil(args.steps * args.batch / SAMPLES),
        checkpoint_dir=args.out / "checkpoints",
        checkpoint_every_s=3600.0,
        overlap=args.overlap,
    )
    run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with (args.out / "steps.jsonl").open("a", buffering=1) as lines:
        for batch in job:
            begin = time.time()
            loss = job.step(batch)
            row = {"step": batch.step, "loss": loss, "world": job.world_size, "run": run}
            if job.rank == 0:
                lines.write(json.dumps(row | {"begin": begin, "end": time.time()}) + "\n")
            if batch.step >= args.steps:
                break
    if batch.step < args.steps:
        job.finish()


if __name__ == "__main__":
    main()
