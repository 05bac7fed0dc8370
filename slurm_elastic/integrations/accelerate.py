"""Loops on Hugging Face accelerate under esrun: step, data cursor and saves of a changing world.

>>> planned = share(64, per_rank=16)                              # doctest: +SKIP
>>> accelerator = elastic_accelerator(planned)                    # doctest: +SKIP
>>> loader = DataLoader(data, planned.per_rank, shuffle=True)         # doctest: +SKIP
>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)   # doctest: +SKIP
>>> accelerator.register_for_checkpointing(scheduler)             # doctest: +SKIP
>>> progress = TrainingProgress(accelerator, "ckpt", planned, epochs=3)        # doctest: +SKIP
>>> for batch in progress.batches(loader):                        # doctest: +SKIP
...     with accelerator.accumulate(model):
...         accelerator.backward(model(batch))
...         optimizer.step(); optimizer.zero_grad()
...     if accelerator.sync_gradients:
...         scheduler.step(); progress.step()
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slurm_elastic.integrations.batch_share import BatchShare, kept_global_batch, log_line, share
from slurm_elastic.integrations.resize_notices import ResizeNotices
from slurm_elastic.training import excepthook

try:
    from accelerate import Accelerator, skip_first_batches
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
except ImportError as _error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"slurm_elastic.integrations.accelerate: {_error}; install it: pip install accelerate"
    ) from None

__all__ = [
    "BatchShare",
    "TrainingProgress",
    "elastic_accelerator",
    "kept_global_batch",
    "newest_state",
    "share",
]

_CURSOR = "slurm_elastic.json"


def elastic_accelerator(planned: BatchShare, *, seed: int = 0, **arguments: Any) -> Any:
    """Return an Accelerator whose batches, order of samples and schedule fit any world.

    Args:
        planned: the share of a rank.
        seed: of the samples' order, which then depends on seed and epoch only.
        arguments: further ones of `accelerate.Accelerator`.
    """
    excepthook.install()
    if planned.remark:
        log_line(planned.remark)
    return Accelerator(
        # A plugin takes precedence over ACCELERATE_GRADIENT_ACCUMULATION_STEPS.
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=planned.accumulation),
        # Else the order depends on the state of a generator that is not saved for all ranks.
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=seed),
        # Else a scheduler makes as many steps as there are ranks for each of the optimizer.
        step_scheduler_with_optimizer=False,
        **arguments,
    )


def newest_state(folder: str | Path) -> Path | None:
    """Return the complete save with the largest step; None without one."""
    complete = [
        (int(match[1]), path)
        for path in Path(folder).glob("step_*")
        if (match := re.fullmatch(r"step_(\d+)", path.name)) and (path / _CURSOR).is_file()
    ]
    return max(complete)[1] if complete else None


class TrainingProgress:
    """Position of a training, its saves, and its exchange with esrun.

    Made after `accelerator.prepare`: it loads the newest save, with everything that the Accelerator
    has prepared or registered. A save is the folder `step_N`, renamed into place when complete.

    Args:
        accelerator: from `elastic_accelerator`, or one with the same settings.
        folder: of the saves, on a file system that all nodes share.
        planned: the share of a rank.
        epochs: of the whole training.
        save_every: steps between two saves; None: only when esrun asks, and at the end.
        keep: saves that are kept.

    Attributes:
        steps: steps of the optimizer done.
        epoch: the present epoch, from 0.
        consumed: samples of that epoch already trained on, over all ranks.

    Raises:
        ValueError: the accelerator orders samples or steps schedulers by the number of ranks.
    """

    def __init__(
        self,
        accelerator: Any,
        folder: str | Path,
        planned: BatchShare,
        *,
        epochs: int,
        save_every: int | None = None,
        keep: int = 2,
    ) -> None:
        excepthook.install()
        _check(accelerator)
        self._accelerator = accelerator
        self._folder = Path(folder)
        self._planned = planned
        self._epochs = epochs
        self._save_every, self._keep = save_every, keep
        self._notices = ResizeNotices(accelerator.device)
        self._samples = 0
        self.steps = self.epoch = self.consumed = 0
        newest = newest_state(self._folder)
        if newest is not None:
            self._load(newest)

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield the micro-batches of this rank that are left, epoch after epoch.

        Saves at the end. Samples that do not fill a step are left out, others in each epoch: so an
        epoch has as many steps in every world.

        Args:
            loader: as prepared by the Accelerator, which shuffles or has a fixed order.

        Raises:
            ValueError: it has fewer samples than a step.
        """
        length = loader.total_dataset_length
        self._samples = length - length % self._planned.actual
        if not self._samples:
            raise ValueError(
                f"loader: {length} samples are invalid: expected at least the"
                f" {self._planned.actual} of one step"
            )
        while self.epoch < self._epochs:
            yield from self._rest_of_epoch(loader)
            self.epoch, self.consumed = self.epoch + 1, 0
        self.save()
        self._notices.close()

    def _rest_of_epoch(self, loader: Any) -> Iterator[Any]:
        micro_batch = self._planned.per_rank * self._planned.world
        done, left = self.consumed // micro_batch, (self._samples - self.consumed) // micro_batch
        if left <= 0:
            return
        rest = skip_first_batches(loader, done) if done else loader
        rest.set_epoch(self.epoch)
        for number, batch in enumerate(rest, 1):
            yield batch
            if number == left:
                break
        rest.end()  # accelerate itself calls this only at the end of the data

    def step(self) -> None:
        """Count a step of the optimizer; save if it is time or esrun asks for it; on all ranks."""
        self.steps += 1
        self.consumed += self._planned.actual
        done = self.epoch + (self.consumed / self._samples if self._samples else 0.0)
        self._notices.trained(
            self.steps,
            progress=done / self._epochs,
            **self._planned.report_fields,
        )
        due = self._save_every is not None and self.steps % self._save_every == 0
        if self._notices.save_requested() or due:
            self.save()
            self._notices.saved(self.steps)

    def save(self) -> Path:
        """Save everything in `step_N`; on all ranks."""
        target = self._folder / f"step_{self.steps:08d}"
        unfinished = self._folder / f".step_{self.steps:08d}"
        if self._accelerator.is_main_process:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        self._accelerator.wait_for_everyone()
        self._accelerator.save_state(str(unfinished))
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            cursor = {"steps": self.steps, "epoch": self.epoch, "consumed": self.consumed}
            (unfinished / _CURSOR).write_text(json.dumps(cursor), encoding="utf-8")
            if target.exists():
                shutil.rmtree(target)
            unfinished.rename(target)
            for old in sorted(self._folder.glob("step_*"))[: -self._keep]:
                shutil.rmtree(old, ignore_errors=True)
        self._accelerator.wait_for_everyone()
        return target

    def _load(self, path: Path) -> None:
        cursor = json.loads((path / _CURSOR).read_text(encoding="utf-8"))
        self._accelerator.load_state(str(path))
        # Micro-batches of the former world since the epoch began: another accumulation would not
        # begin at a step of the optimizer, as each save does.
        self._accelerator.step = 0
        self.steps, self.epoch = cursor["steps"], cursor["epoch"]
        self.consumed = cursor["consumed"]
        micro_batch = self._planned.per_rank * self._planned.world
        if self.consumed % micro_batch:
            log_line(
                f"{path.name}: {self.consumed} samples of its epoch are no multiple of the"
                f" {micro_batch} that all ranks compute at once here: up to that many are repeated"
            )


def _check(accelerator: Any) -> None:
    if accelerator.step_scheduler_with_optimizer:
        raise ValueError(
            "step_scheduler_with_optimizer: True is invalid: schedulers would step once per rank;"
            " use elastic_accelerator(), or False and step them when sync_gradients is true"
        )
    if not accelerator.dataloader_config.use_seedable_sampler:
        raise ValueError(
            "use_seedable_sampler: False is invalid: the order of samples would depend on the"
            " ranks; use elastic_accelerator(), or DataLoaderConfiguration("
            "use_seedable_sampler=True, data_seed=0)"
        )
