#!/usr/bin/env python3
"""PyTorch Lightning under esrun: Lightning saves and loads, esrun watches its checkpoints.

    python docs/examples/train_lightning.py --out /tmp/run
    sbatch docs/examples/train_lightning.sbatch

docs/lightning.md describes Lightning's own requeueing.
"""

import argparse
import json
import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EsrunEnvironment(TorchElasticEnvironment):
    """Ranks as started by esrun: RANK and WORLD_SIZE as of torchrun, one visible GPU each.

    So each rank counts as a node with one device, on nodes with any number of GPUs.
    """

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return self.global_rank()


class Classifier(lightning.LightningModule):
    """A small network; rank 0 writes each epoch's loss into a file."""

    def __init__(self, log: Path) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 10))
        self.file = log

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.network(inputs), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            loss = float(self.trainer.callback_metrics["loss"])
            line = {"epoch": self.current_epoch, "loss": loss, "world": self.trainer.world_size}
            with self.file.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network on synthetic data.")
    parser.add_argument("--out", type=Path, required=True, help="directory on a shared file system")
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--global-batch", type=int, default=64)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    under_esrun, world = "RANK" in os.environ, int(os.environ.get("WORLD_SIZE", "1"))
    lightning.seed_everything(0)
    points = torch.randn(args.samples, 32)
    labels = (points @ torch.randn(32, 10)).argmax(dim=1)
    dataset = TensorDataset(points, labels)
    # The batch of all ranks together does not depend on their number.
    loader = DataLoader(dataset, batch_size=max(1, args.global_batch // world), shuffle=True)

    trainer = lightning.Trainer(
        default_root_dir=args.out,
        max_epochs=args.epochs,
        devices=1,
        num_nodes=world,
        plugins=[EsrunEnvironment()] if under_esrun else None,
        # At the end of an epoch: within one, Lightning does not save which samples are left.
        callbacks=[ModelCheckpoint(args.out / "ckpt", "{epoch:04d}", every_n_epochs=1)],
        logger=False,
        enable_progress_bar=False,
    )
    saved = sorted((args.out / "ckpt").glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    trainer.fit(
        Classifier(args.out / "epochs.jsonl"), loader, ckpt_path=saved[-1] if saved else None
    )


if __name__ == "__main__":
    main()
