#!/usr/bin/env python3
"""A GAN: two models, two optimizers, and a loop of its own whose ranks may change at any step.

    python docs/examples/train_gan.py --out /tmp/gan                   # a laptop, some seconds
    esrun --local 2 python docs/examples/train_gan.py --out /tmp/gan   # two ranks on this machine

The generator learns points on a ring, the critic to distinguish them from true ones. Lines that
the library needs end with `# elastic`. The loop makes the process group, which changes with the
ranks; `in_place=True` lets them join and leave while it runs. Writes OUT/losses.jsonl, one line
per step.
"""

from slurm_elastic.training import ElasticLoop  # isort: skip  # elastic

import argparse
import json
import time
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

NOISE = 8


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs))


def ring(samples: int) -> TensorDataset:
    """Return points on a ring of radius 2."""
    angles = torch.rand(samples, generator=torch.Generator().manual_seed(0)) * 2 * torch.pi
    return TensorDataset(2 * torch.stack([angles.cos(), angles.sin()], dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GAN on points of a ring.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step over all ranks")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds to wait in each step")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    generator, critic = network(NOISE, 2), network(2, 1)
    adam_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.999))
    adam_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.999))
    loop = ElasticLoop(  # elastic
        args.out / "checkpoints",
        global_batch=args.batch,
        micro_batch=args.batch // 4,
        generator=generator,
        critic=critic,
        adam_g=adam_g,
        adam_c=adam_c,
        in_place=True,
    )
    generator, critic = DistributedDataParallel(generator), DistributedDataParallel(critic)
    loader = loop.loader(ring(1024), drop_last=True)  # elastic
    means = [0.0, 0.0]
    for _epoch in loop.epochs(args.epochs):  # elastic
        for (real,) in loader:
            fake = generator(torch.randn(len(real), NOISE))
            # The critic: gradients of its own loss only.
            scores = critic(torch.cat([real, fake.detach()]))
            truth = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
            loss_c = binary_cross_entropy_with_logits(scores, truth)
            (loss_c * loop.loss_weight).backward()  # elastic
            # The generator: its loss runs through the critic, whose own gradients are not kept.
            critic.requires_grad_(False)
            loss_g = binary_cross_entropy_with_logits(critic(fake), torch.ones(len(fake), 1))
            (loss_g * loop.loss_weight).backward()  # elastic
            critic.requires_grad_(True)
            means[0] += float(loss_c.detach()) * loop.loss_weight
            means[1] += float(loss_g.detach()) * loop.loss_weight
            if loop.last_micro_batch:  # elastic
                for optimizer in (adam_c, adam_g):
                    optimizer.step()
                    optimizer.zero_grad()
                log(args.out, loop, means)
                means = [0.0, 0.0]
                time.sleep(args.pause)


def log(out: Path, loop: ElasticLoop, means: list[float]) -> None:
    """Write the losses of a step, as means over the global batch."""
    values = torch.tensor(means, dtype=torch.float64) / loop.world_size
    distributed.all_reduce(values)
    if loop.rank == 0:
        line = {"step": loop.step + 1, "critic": float(values[0]), "generator": float(values[1])}
        with (out / "losses.jsonl").open("a") as losses:
            losses.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
