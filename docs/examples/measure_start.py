#!/usr/bin/env python3
"""Measure the parts of the time from a process start to its first step.

    esrun python docs/examples/measure_start.py --out DIR            # with the library
    esrun python docs/examples/measure_start.py --out DIR --usual    # the usual way

The usual way is DistributedDataParallel and torch.distributed.checkpoint. Both
train the same network from a checkpoint of an earlier call with the same DIR;
rank 0 prints seconds: Python and imports, model and optimizer, connecting and
restoring, the first step, and their sum; CPU seconds do not depend on the load.
"""

import argparse
import os
import time
from pathlib import Path


def age() -> float:
    """Return the seconds since this process was started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def parts(width: int):
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(32, width), nn.GELU(), nn.Linear(width, width), nn.Linear(width, 10)
    )
    points = torch.randn(1024, 32)
    return model, torch.optim.AdamW(model.parameters()), points, points.argmax(dim=1) % 10


def with_library(args: argparse.Namespace) -> list[float]:
    from slurm_elastic.training import init

    times = [age()]
    import torch

    model, optimizer, points, labels = parts(args.width)
    times.append(age())
    data = torch.utils.data.TensorDataset(points, labels)
    loss_fn = torch.nn.CrossEntropyLoss()
    job = init(
        model, loss_fn, optimizer, data, global_batch=16, epochs=99, checkpoint_dir=args.out / "own"
    )
    times.append(age())
    for batch in job:
        job.step(batch)
        break
    times.append(age())
    cpu = time.process_time()
    job.finish()
    return [*times, cpu]


def usual(args: argparse.Namespace) -> list[float]:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    times = [age()]
    model, optimizer, points, labels = parts(args.width)
    times.append(age())
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(model)
    folder = args.out / "usual"
    if folder.exists():
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    times.append(age())
    mine = slice(dist.get_rank(), 16, dist.get_world_size())
    torch.nn.functional.cross_entropy(model(points[mine]), labels[mine]).backward()
    optimizer.step()
    times.append(age())
    cpu = time.process_time()
    if not folder.exists():
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder)
    dist.barrier()
    return [*times, cpu]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a start.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--usual", action="store_true")
    args = parser.parse_args()
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29555",
    }.items():
        os.environ.setdefault(name, value)
    imported, built, ready, stepped, cpu = usual(args) if args.usual else with_library(args)
    if os.environ["RANK"] == "0":
        print(
            f"{'usual' if args.usual else 'library'}: import {imported:.2f},"
            f" model and optimizer {built - imported:.2f}, connect and restore {ready - built:.2f},"
            f" first step {stepped - ready:.2f}, in all {stepped:.2f} (CPU {cpu:.2f})",
            flush=True,
        )
    if args.usual:
        os._exit(0)  # torch 2.6 may hang in destroy_process_group


if __name__ == "__main__":
    main()
