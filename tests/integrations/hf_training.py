"""A Hugging Face Trainer that records each step; run by test_transformers.py."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

if "--plain" not in sys.argv:
    # Before torch: the library starts torch faster than torch does.
    import slurm_elastic.training  # noqa: F401

import torch
from torch import nn
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests.integrations.regression_task import RegressionSamples, regression_network
from tests.integrations.step_recorder import StepRecorder, recording_options


class Config(PretrainedConfig):
    model_type = "tests_integrations"


class Net(PreTrainedModel):
    config_class = Config

    def __init__(self, config: Config, recorder: StepRecorder) -> None:
        super().__init__(config)
        self.layers = regression_network()
        self.recorder = recorder
        self.post_init()

    def forward(self, x: torch.Tensor, y: torch.Tensor, number: torch.Tensor, **_: object) -> dict:
        loss = nn.functional.mse_loss(self.layers(x).squeeze(1), y)
        self.recorder.add(number, loss)
        return {"loss": loss}


class RecordTrainerSteps(TrainerCallback):
    """Callback that records each step, and ends the process after the save of step `stop_at`."""

    def __init__(self, recorder: StepRecorder, stop_at: int) -> None:
        self.recorder, self.stop_at = recorder, stop_at

    def on_step_end(self, args, state, control, lr_scheduler=None, **_):
        self.recorder.write(
            rank=args.process_index,
            world=args.world_size,
            step=state.global_step,
            epoch=state.epoch,
            rate=lr_scheduler.get_last_lr()[0],
            max_steps=state.max_steps,
        )

    def on_save(self, args, state, control, **_):
        if self.stop_at and state.global_step >= self.stop_at:
            os._exit(0)


def main(words: Sequence[str] | None = None) -> None:
    parser = recording_options()
    parser.set_defaults(save_every=5)
    parser.add_argument("--per-device", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="without slurm_elastic")
    parser.add_argument("--callback-only", action="store_true")
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
        save_steps=options.save_every,
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
    recorder = StepRecorder(options)
    callbacks: list[TrainerCallback] = [RecordTrainerSteps(recorder, options.stop_at)]
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

        has_folder = Path(args.output_dir).is_dir()
        resume = get_last_checkpoint(args.output_dir) if has_folder else None
    trainer = Trainer(
        model=Net(Config(), recorder),
        args=args,
        train_dataset=RegressionSamples(options.samples),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=resume)


if __name__ == "__main__":
    main()
