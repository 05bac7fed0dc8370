"""A Lightning training that records each step; run by test_lightning.py."""

# Before torch: the library starts torch faster than torch does.
import slurm_elastic.training  # isort: skip # noqa: F401

import os
from collections.abc import Sequence

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
from tests.integrations.regression_task import (
    RegressionSamples,
    optimizer_and_schedule,
    regression_network,
)
from tests.integrations.step_recorder import StepRecorder, recording_options


class Regression(lightning.LightningModule):
    def __init__(self, recorder: StepRecorder) -> None:
        super().__init__()
        self.network = regression_network()
        self.recorder = recorder

    def training_step(self, batch: dict, _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.network(batch["x"]).squeeze(1), batch["y"])
        self.recorder.add(batch["number"], loss)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer, schedule = optimizer_and_schedule(self.parameters())
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }


class RecordSteps(Callback):
    """Callback that records each step, and ends the process after the step `stop_at`."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at

    def on_train_start(self, trainer, module):
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step:
            return
        self.step = trainer.global_step
        module.recorder.write(
            rank=trainer.global_rank,
            world=trainer.world_size,
            step=trainer.global_step,
            epoch=trainer.current_epoch,
            rate=trainer.optimizers[0].param_groups[0]["lr"],
        )

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        # After the saves of the step before.
        if self.stop_at and trainer.global_step >= self.stop_at:
            os._exit(0)


def main(words: Sequence[str] | None = None) -> None:
    parser = recording_options()
    parser.add_argument("--save-epochs", action="store_true")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    planned = share(kept_global_batch(per_rank=8), per_rank=8)
    data = RegressionSamples(options.samples)
    sampler = ElasticSampler(len(data), planned)
    loader = torch.utils.data.DataLoader(data, planned.per_rank, sampler=sampler)
    folder, saves = options.out / "ckpt", []
    if options.save_every:
        saves = [ModelCheckpoint(folder, every_n_train_steps=options.save_every, save_top_k=-1)]
    elif options.save_epochs:
        saves = [ModelCheckpoint(folder, every_n_epochs=1, save_top_k=-1)]
    callbacks = [RecordSteps(options.stop_at), *saves]
    trainer = lightning.Trainer(
        **trainer_settings(planned, sampler, folder, callbacks=callbacks),
        max_epochs=options.epochs,
        default_root_dir=options.out,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(saves),
    )
    trainer.fit(Regression(StepRecorder(options)), loader, ckpt_path=newest_file(folder))


if __name__ == "__main__":
    main()
