#!/usr/bin/env python3
"""A plain PyTorch script that does not use slurm-elastic.

    python docs/examples/train_plain.py --out /tmp/run
    sbatch docs/examples/train_plain.sbatch

It starts from its newest checkpoint, saves every `--save-every` steps under a
temporary name and renames the file, and takes its rank from RANK and WORLD_SIZE.
With `--save-on-usr2` it also saves on SIGUSR2.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import emulate
import torch
import torch.distributed as dist
from torch import nn


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on synthetic data.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--save-every", type=int, default=20, metavar="STEPS")
    parser.add_argument("--save-on-usr2", action="store_true")
    parser.add_argument("--keep", type=int, default=3, help="checkpoints kept")
    parser.add_argument("--rate", type=float, default=160.0, help="samples/s of an emulated v100")
    return parser.parse_args()


def save(folder: Path, state: dict, keep: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{state['step']:06d}.pt"
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)
    for old in sorted(folder.glob("step_*.pt"))[:-keep]:
        old.unlink()


def main() -> None:
    args = arguments()
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    save_requests = []
    if args.save_on_usr2:
        signal.signal(signal.SIGUSR2, lambda *_: save_requests.append(True))
    if world_size > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    points = torch.randn(args.samples, 32)
    labels = (points @ torch.randn(32, 10)).argmax(dim=1)
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    device = emulate.device(args.rate)
    if device is not None:
        device.attach(model, optimizer)

    step = 0
    newest = sorted((args.out / "ckpt").glob("step_*.pt"))[-1:]
    for path in newest:
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        print(f"rank {rank} of {world_size}: resumed from {path.name}", flush=True)

    per_epoch = -(-args.samples // args.global_batch)
    args.out.mkdir(parents=True, exist_ok=True)
    while step < args.epochs * per_epoch:
        epoch, position = divmod(step, per_epoch)
        order = torch.randperm(args.samples, generator=torch.Generator().manual_seed(epoch))
        batch = order[position * args.global_batch :][: args.global_batch]
        own = batch[rank::world_size]
        optimizer.zero_grad()
        # The mean over the whole batch, also where ranks have different numbers of samples.
        loss = nn.functional.cross_entropy(model(points[own]), labels[own], reduction="sum")
        loss = loss / len(batch)
        loss.backward()
        # Loss, and whether some rank has received SIGUSR2: summed over all ranks.
        sums = torch.tensor([float(loss.detach()), float(bool(save_requests))])
        if world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            dist.all_reduce(sums)
        optimizer.step()
        step += 1
        if rank == 0:
            with (args.out / "losses.jsonl").open("a") as losses:
                line = {"step": step, "loss": float(sums[0]), "world": world_size}
                losses.write(json.dumps(line) + "\n")
        if step % args.save_every == 0 or sums[1] > 0 or step == args.epochs * per_epoch:
            save_requests.clear()
            if rank == 0:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                }
                save(args.out / "ckpt", state, args.keep)
                print(f"step {step}: loss {float(sums[0]):.4f}, saved", flush=True)
    if world_size > 1:
        dist.barrier()
        # Debian's torch 2.6 may hang in destroy_process_group, which is not needed here.
        os._exit(0)


if __name__ == "__main__":
    main()
