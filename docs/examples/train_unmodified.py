#!/usr/bin/env python3
"""An ordinary DistributedDataParallel script. It saves nothing, so it can never be resized.

    python docs/examples/train_unmodified.py          # alone
    torchrun --nproc-per-node 2 docs/examples/train_unmodified.py
    sbatch docs/examples/train_unmodified.sbatch      # one rank per GPU, from beginning to end

It reads RANK and WORLD_SIZE as set by torchrun or esrun, and prints the loss after each epoch.
"""

import argparse
import os

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on synthetic data.")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32, help="samples per rank and step")
    args = parser.parse_args()

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cpu")
    if torch.cuda.is_available():
        local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    points = torch.randn(args.samples, 32)
    dataset = TensorDataset(points, (points @ torch.randn(32, 10)).argmax(dim=1))
    model = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10)).to(device)
    if world > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank)
    loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        losses = []
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if rank == 0:
            mean = sum(losses) / len(losses)
            print(f"epoch {epoch} with {world} rank(s): loss {mean:.4f}", flush=True)


if __name__ == "__main__":
    main()
