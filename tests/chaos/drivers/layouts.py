#!/usr/bin/env python3
"""One training of a layout other than replicas, from the parts of docs/examples.

    layouts.py LAYOUT --out OUT [--checkpoint-every S]

| layout | |
|---|---|
| slices | the state of the optimizer is divided among replicas |
| buckets | replicas exchange 2 MiB of gradients in buckets, during the backward pass |
| stages | a small GPT on pipeline stages |
| sliced-stages | the same; replicas of a stage divide the state of the optimizer |
| spatial | a 3D network, each sample on several ranks |
| tensor | a small GPT whose weights pairs of ranks share |
| plans | a small GPT whose execution plan the controller chooses |

OUT/losses.jsonl as docs/examples/train_library.py writes it; OUT/done: it has completed.
"""

# Before torch: the library starts torch faster than torch does.
from slurm_elastic.training import init  # isort: skip

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, "/opt/src/slurm-elastic/docs/examples")

SAMPLES, EPOCHS, BATCH = 256, 4, 8
#: A step takes at least so long, so that faults hit the training.
STEP_S = 0.5


def classification(model: nn.Module, rate: float, overlap: str) -> dict[str, Any]:
    from train_library import synthetic  # noqa: PLC0415

    return {
        "model": model,
        "loss_fn": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=rate),
        "dataset": synthetic(SAMPLES, 0),
        "overlap": overlap,
    }


def slices() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 10))
    return classification(model, 3e-3, "sliced")


def buckets() -> dict[str, Any]:
    # Of a single bucket, 1 MiB, the schedule would be the flat one.
    hidden = [part for _ in range(2) for part in (nn.Linear(512, 512), nn.GELU())]
    model = nn.Sequential(nn.Linear(32, 512), nn.GELU(), *hidden, nn.Linear(512, 10))
    return classification(model, 1e-3, "buckets")


def stages() -> dict[str, Any]:
    from train_gpt import layers, loss_fn, pieces  # noqa: PLC0415

    return {
        "model": layers(2, tied=False),
        "loss_fn": loss_fn,
        "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        "dataset": pieces(SAMPLES, 0),
        "micro_batch": 2,
    }


def sliced_stages() -> dict[str, Any]:
    return stages() | {"overlap": "sliced"}


def tensor() -> dict[str, Any]:
    return stages() | {"tensor": 2}


def spatial() -> dict[str, Any]:
    from train_volumes import RandomFields, cosmoflow  # noqa: PLC0415

    model = cosmoflow(16, 2)
    return {
        "model": model,
        "loss_fn": nn.MSELoss(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=2e-3),
        "dataset": RandomFields(SAMPLES, 16, classes=False, seed=0),
    }


LAYOUTS = {
    "slices": slices, "buckets": buckets, "stages": stages, "sliced-stages": sliced_stages,
    "spatial": spatial, "tensor": tensor, "plans": stages,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("layout", choices=LAYOUTS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--checkpoint-every", type=float, default=600.0)
    parser.add_argument("--step", type=float, default=STEP_S)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    parts = LAYOUTS[args.layout]()
    job = init(
        global_batch=BATCH,
        epochs=EPOCHS,
        checkpoint_dir=args.out / "checkpoints",
        checkpoint_every_s=args.checkpoint_every,
        application=args.layout,
        **parts,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    run = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    with (args.out / "losses.jsonl").open("a", buffering=1) as losses:
        for batch in job:
            began = time.monotonic()
            loss = job.step(batch)
            if job.rank == 0:
                losses.write(json.dumps({"step": batch.step, "run": run, "loss": loss}) + "\n")
            time.sleep(max(0.0, args.step - (time.monotonic() - began)))
    job.finish()
    (args.out / "done").write_text("done\n")


if __name__ == "__main__":
    main()
