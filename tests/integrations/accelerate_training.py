"""A loop on accelerate that records each step; run by test_accelerate.py."""

# Before torch: the library starts torch faster than torch does.
import slurm_elastic.training  # isort: skip # noqa: F401

import os
from collections.abc import Sequence

import torch
from accelerate import InitProcessGroupKwargs
from torch import nn

from slurm_elastic.integrations.accelerate import (
    TrainingProgress,
    elastic_accelerator,
    kept_global_batch,
    share,
)
from tests.integrations.regression_task import (
    RegressionSamples,
    optimizer_and_schedule,
    regression_network,
)
from tests.integrations.step_recorder import StepRecorder, recording_options


def main(words: Sequence[str] | None = None) -> None:
    options = recording_options().parse_args(words)
    torch.set_num_threads(1)
    torch.manual_seed(int(os.environ["RANK"]))  # each rank has a seed of its own
    planned = share(kept_global_batch(per_rank=8), per_rank=8)
    # Debian's torch has MPI, which accelerate would take on CPUs.
    gloo = InitProcessGroupKwargs(backend="gloo")
    accelerator = elastic_accelerator(planned, cpu=True, kwargs_handlers=[gloo])
    torch.manual_seed(0)
    model = regression_network()
    optimizer, schedule = optimizer_and_schedule(model.parameters())
    loader = torch.utils.data.DataLoader(
        RegressionSamples(options.samples), planned.per_rank, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(schedule)
    progress = TrainingProgress(
        accelerator, options.out / "ckpt", planned, epochs=options.epochs,
        save_every=options.save_every,
    )  # fmt: skip
    recorder = StepRecorder(options)
    for batch in progress.batches(loader):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(batch["x"]).squeeze(1), batch["y"])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        recorder.add(batch["number"], loss)
        if accelerator.sync_gradients:
            schedule.step()
            recorder.write(
                rank=accelerator.process_index,
                world=accelerator.num_processes,
                step=progress.steps + 1,
                epoch=progress.epoch,
                rate=schedule.get_last_lr()[0],
            )
            progress.step()
            if options.stop_at and progress.steps >= options.stop_at:
                os._exit(0)


if __name__ == "__main__":
    main()
