"""A Trainer that records samples and learning rate of each step; run by test_transformers.py."""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.integrations.regression_samples import RegressionSamples


class Config(PretrainedConfig):
    model_type = "tests_integrations"


class Net(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.post_init()

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor, **_: object) -> dict:
        SEEN.extend(number.tolist())
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(1), y)}


SEEN: list[int] = []


class Recorder(TrainerCallback):
    """Writes rate, epoch and this rank's samples of each step; ends the process when told to."""

    def __init__(self, path: Path, stop_at: int, pause_s: float) -> None:
        self.path, self.stop_at, self.pause_s = path, stop_at, pause_s

    def on_step_end(self, args, state, control, lr_scheduler=None, **_):
        time.sleep(self.pause_s)
        line = {
            "step": state.global_step,
            "epoch": state.epoch,
            "rate": lr_scheduler.get_last_lr()[0],
            "max_steps": state.max_steps,
            "samples": list(SEEN),
            "rank": args.process_index,
            "world": args.world_size,
        }
        SEEN.clear()
        with self.path.with_suffix(f".{args.process_index}").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def on_save(self, args, state, control, **_):
        if self.stop_at and state.global_step >= self.stop_at:
            os._exit(0)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--per-device", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-steps", type=int, default=5)
    parser.add_argument("--stop-at", type=int, default=0, help="end after this step's save")
    parser.add_argument("--plain", action="store_true", help="without slurm_elastic")
    parser.add_argument("--callback-only", action="store_true")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds per step")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    args = TrainingArguments(
        str(options.out / "ckpt"),
        per_device_train_batch_size=options.per_device,
        gradient_accumulation_steps=options.accumulation,
        num_train_epochs=options.epochs,
        learning_rate=0.01,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        save_strategy="steps",
        save_steps=options.save_steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        ddp_backend="gloo",  # Debian's torch has MPI, which the Trainer would take
        seed=7,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
    )
    options.out.mkdir(parents=True, exist_ok=True)
    callbacks = [Recorder(options.out / "steps", options.stop_at, options.sleep)]
    if not options.plain:
        from slurm_elastic.integrations.transformers import (
            ElasticCallback,
            keep_global_batch,
            newest_checkpoint,
        )

        if not options.callback_only:
            args = keep_global_batch(args)
        callbacks.append(ElasticCallback())
        resume = newest_checkpoint(args.output_dir)
    else:
        from transformers.trainer_utils import get_last_checkpoint

        found = Path(args.output_dir).is_dir()
        resume = get_last_checkpoint(args.output_dir) if found else None
    trainer = Trainer(
        model=Net(Config()),
        args=args,
        train_dataset=RegressionSamples(options.samples),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)
    if args.process_index == 0:
        state = trainer.state
        losses = {e["step"]: e["loss"] for e in state.log_history if "loss" in e}
        result = {"steps": state.global_step, "epoch": state.epoch, "losses": losses}
        (options.out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
