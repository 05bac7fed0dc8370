"""A loop on DeepSpeed that records each step; run by test_deepspeed.py."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from torch import nn

from slurm_elastic.integrations.deepspeed import (
    ElasticSampler,
    EngineProgress,
    elastic_config,
    kept_global_batch,
    share,
)
from tests.integrations.regression_samples import RegressionSamples


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--stop-at", type=int, default=0, help="end after this step")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per step")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    planned = share(kept_global_batch(per_rank=8), per_rank=8)
    folder = options.out / "ckpt"
    config = elastic_config(
        {
            "zero_optimization": {"stage": options.stage},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": 10**9,
        },
        planned,
        folder,
        backend="gloo",
    )
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 24)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    data = RegressionSamples(192)
    sampler = ElasticSampler(len(data), planned)
    progress = EngineProgress(
        engine, folder, planned, sampler, epochs=options.epochs, save_every=options.save_every
    )
    loader = torch.utils.data.DataLoader(data, planned.per_rank, sampler=sampler)
    samples, losses = [], []
    for batch in progress.batches(loader):
        loss = nn.functional.mse_loss(engine(batch["x"]).squeeze(1), batch["y"])
        engine.backward(loss)
        engine.step()
        samples += batch["number"].tolist()
        losses.append(float(loss.detach()))
        if engine.global_steps > progress.steps:
            time.sleep(options.sleep)
            total = torch.tensor(losses).mean()
            torch.distributed.all_reduce(total)
            line = {
                "step": engine.global_steps,
                "epoch": progress.epoch,
                "rate": engine.get_lr()[0],
                "loss": float(total) / planned.world,
                "samples": samples,
                "rank": engine.global_rank,
                "world": planned.world,
            }
            with (options.out / f"steps.{engine.global_rank}").open("a") as file:
                file.write(json.dumps(line) + "\n")
            samples, losses = [], []
        progress.step()
        if options.stop_at and progress.steps >= options.stop_at:
            os._exit(0)


if __name__ == "__main__":
    main()
