"""A loop on accelerate that records each step; run by test_accelerate.py."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import InitProcessGroupKwargs
from torch import nn

from slurm_elastic.integrations.accelerate import (
    TrainingProgress,
    elastic_accelerator,
    kept_global_batch,
    share,
)
from tests.integrations.regression_samples import RegressionSamples


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--stop-at", type=int, default=0, help="end after this step")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per step")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))  # each rank has a seed of its own
    planned = share(kept_global_batch(per_rank=8), per_rank=8)
    # Debian's torch has MPI, which accelerate would take on CPUs.
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = elastic_accelerator(planned, cpu=True, kwargs_handlers=[gloo])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    loader = torch.utils.data.DataLoader(
        RegressionSamples(options.samples), planned.per_rank, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    progress = TrainingProgress(
        accelerator, options.out / "ckpt", planned, epochs=options.epochs,
        save_every=options.save_every,
    )  # fmt: skip
    samples, losses = [], []
    for batch in progress.batches(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        samples += batch["number"].tolist()
        losses.append(float(loss.detach()))
        if accelerator.sync_gradients:
            schedule.step()
            time.sleep(options.sleep)
            line = {
                "step": progress.steps + 1,
                "epoch": progress.epoch,
                "rate": schedule.get_last_lr()[0],
                "loss": float(accelerator.gather(torch.tensor(losses)).mean()),
                "samples": samples,
                "rank": accelerator.process_index,
                "world": accelerator.num_processes,
            }
            with (options.out / f"steps.{accelerator.process_index}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            samples, losses = [], []
            progress.step()
            if options.stop_at and progress.steps >= options.stop_at:
                os._exit(0)


if __name__ == "__main__":
    main()
