"""A Lightning training that records each step; run by test_lightning.py."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import nn

from slurm_elastic.integrations.lightning import (
    ElasticSampler,
    kept_global_batch,
    newest_file,
    share,
    trainer_settings,
)
from tests.integrations.regression_samples import RegressionSamples


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.samples: list[int] = []
        self.losses: list[float] = []

    def training_step(self, batch: dict, _: int) -> torch.Tensor:
        self.samples += batch["number"].tolist()
        loss = nn.functional.mse_loss(self.network(batch["x"]).squeeze(1), batch["y"])
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class Recorder(Callback):
    """Writes what each step did; ends the process when told to."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.step = None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if not module.losses or trainer.global_step == self.step:
            return
        if trainer.fit_loop.epoch_loop._should_accumulate():
            return
        self.step = trainer.global_step
        losses = module.all_gather(torch.tensor(module.losses))
        time.sleep(self.options.sleep)
        line = {
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "rate": trainer.optimizers[0].param_groups[0]["lr"],
            "loss": float(losses.mean()),
            "samples": module.samples,
            "rank": trainer.global_rank,
            "world": trainer.world_size,
        }
        with (self.options.out / f"steps.{trainer.global_rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        module.samples, module.losses = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        # After the saves of the step before.
        if self.options.stop_at and trainer.global_step >= self.options.stop_at:
            os._exit(0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=0, help="steps")
    parser.add_argument("--save-epochs", action="store_true")
    parser.add_argument("--stop-at", type=int, default=0, help="end after this step")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per step")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    planned = share(kept_global_batch(per_rank=8), per_rank=8)
    data = RegressionSamples(192)
    sampler = ElasticSampler(len(data), planned)
    loader = torch.utils.data.DataLoader(data, planned.per_rank, sampler=sampler)
    saves = []
    if options.save_every:
        saves = [
            ModelCheckpoint(
                options.out / "ckpt", every_n_train_steps=options.save_every, save_top_k=-1
            )
        ]
    elif options.save_epochs:
        saves = [ModelCheckpoint(options.out / "ckpt", every_n_epochs=1, save_top_k=-1)]
    trainer = lightning.Trainer(
        **trainer_settings(
            planned, sampler, options.out / "ckpt", callbacks=[Recorder(options), *saves]
        ),
        max_epochs=options.epochs,
        default_root_dir=options.out,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(saves),
    )
    trainer.fit(Regression(), loader, ckpt_path=newest_file(options.out / "ckpt"))


if __name__ == "__main__":
    main()
