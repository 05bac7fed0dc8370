"""A loop on DeepSpeed that records each step; run by test_deepspeed.py."""

# Before torch: the library starts torch faster than torch does.
import slurm_elastic.training  # isort: skip # noqa: F401

import os
from collections.abc import Sequence

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from deepspeed.runtime import compiler
from torch import nn

from slurm_elastic.integrations.deepspeed import (
    ElasticSampler,
    EngineProgress,
    elastic_config,
    kept_global_batch,
    share,
)
from tests.integrations.regression_task import (
    RegressionSamples,
    optimizer_and_schedule,
    regression_network,
)
from tests.integrations.step_recorder import StepRecorder, recording_options

# When ranks on CPUs connect, DeepSpeed compiles a C++ module that only inference uses. Not every
# environment has a compiler, so no module is declared compatible.
deepspeed.ops.__compatible_ops__ = {}
# ZeRO imports functions that are compiled when they are defined, for an optimizer that is not used:
# torch would import its compiler, for half of the start.
compiler.compile = lambda: lambda function: function


def main(words: Sequence[str] | None = None) -> None:
    parser = recording_options()
    parser.add_argument("--stage", type=int, default=0, help="of ZeRO")
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
    model = regression_network()
    optimizer, schedule = optimizer_and_schedule(model.parameters())
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    data = RegressionSamples(options.samples)
    sampler = ElasticSampler(len(data), planned)
    progress = EngineProgress(
        engine, folder, planned, sampler, epochs=options.epochs, save_every=options.save_every
    )
    loader = torch.utils.data.DataLoader(data, planned.per_rank, sampler=sampler)
    recorder = StepRecorder(options)
    for batch in progress.batches(loader):
        loss = nn.functional.mse_loss(engine(batch["x"]).squeeze(1), batch["y"])
        engine.backward(loss)
        engine.step()
        recorder.add(batch["number"], loss)
        if engine.global_steps > progress.steps:
            recorder.write(
                rank=engine.global_rank,
                world=planned.world,
                step=engine.global_steps,
                epoch=progress.epoch,
                rate=engine.get_lr()[0],
            )
        progress.step()
        if options.stop_at and progress.steps >= options.stop_at:
            os._exit(0)


if __name__ == "__main__":
    main()
