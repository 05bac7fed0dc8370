#!/usr/bin/env python3
"""A small GPT in a loop of its own: steps, not epochs, and samples that are drawn at random.

    python docs/examples/train_steps.py --out /tmp/steps                   # a laptop
    esrun --local 2 python docs/examples/train_steps.py --out /tmp/steps   # two ranks

Gradient accumulation, a scaler, clipping, and a learning rate that is computed from the step, all
in the script. Lines that the library needs end with `# elastic`. Each micro-batch draws the same
samples on any number of ranks. Writes OUT/losses.jsonl, one line per step.
"""

from slurm_elastic.training import ElasticLoop  # isort: skip  # elastic

import argparse
import json
import math
import os
from collections import OrderedDict
from pathlib import Path
from random import Random

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from train_gpt import ALPHABET, CONTEXT, layers, loss_fn, text

MICRO_BATCH, WARMUP, RATE = 4, 20, 3e-3


def draw(letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random pieces of the text, with the letter that follows each."""
    starts = torch.randint(len(letters) - CONTEXT - 1, (MICRO_BATCH,)).tolist()
    inputs = torch.stack([letters[i : i + CONTEXT] for i in starts])
    return inputs, torch.stack([letters[i + 1 : i + 1 + CONTEXT] for i in starts])


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a linear rise, then a cosine."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small GPT on random pieces of a text.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=32)
    args = parser.parse_args()
    if "RANK" in os.environ:
        distributed.init_process_group("gloo")
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    letters = torch.tensor([ALPHABET.index(letter) for letter in text(100_000, Random(0))])
    model: nn.Module = nn.Sequential(OrderedDict(layers(2, tied=True)))
    if distributed.is_initialized():
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    loop = ElasticLoop(  # elastic
        args.out / "checkpoints",
        global_batch=args.global_batch,
        micro_batch=MICRO_BATCH,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
    )
    for step in loop.steps(args.steps):  # elastic
        for group in optimizer.param_groups:
            group["lr"] = rate(step, args.steps)
        mean = torch.zeros(())
        for _ in loop.micro_batches():  # elastic
            inputs, targets = draw(letters)
            loss = loss_fn(model(inputs), targets)
            scaler.scale(loss * loop.loss_weight).backward()  # elastic
            mean += loss.detach() * loop.loss_weight / loop.world_size
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if distributed.is_initialized():
            distributed.all_reduce(mean)
        if loop.rank == 0:
            with (args.out / "losses.jsonl").open("a") as losses:
                losses.write(json.dumps({"step": step + 1, "loss": float(mean)}) + "\n")
            if step % 20 == 0:
                print(f"step {step + 1} of {args.steps}: loss {float(mean):.4f}", flush=True)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
