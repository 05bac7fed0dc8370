"""PyTorch Lightning under esrun: ranks, the global batch, order of samples, saves before a resize.

>>> planned = share(64, per_rank=16)                                    # doctest: +SKIP
>>> sampler = ElasticSampler(len(data), planned)                        # doctest: +SKIP
>>> loader = DataLoader(data, planned.per_rank, sampler=sampler)        # doctest: +SKIP
>>> trainer = Trainer(**trainer_settings(planned, sampler, "ckpt"), max_epochs=3)   # doctest: +SKIP
>>> trainer.fit(model, loader, ckpt_path=newest_file("ckpt"))           # doctest: +SKIP
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from slurm_elastic.integrations.batch_share import BatchShare, kept_global_batch, log_line, share
from slurm_elastic.integrations.elastic_sampler import ElasticSampler
from slurm_elastic.integrations.resize_notices import ResizeNotices
from slurm_elastic.training import excepthook

try:
    from lightning.pytorch.callbacks import Callback
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
except ImportError as _error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"slurm_elastic.integrations.lightning: {_error}; install it: pip install lightning"
    ) from None

__all__ = [
    "BatchShare",
    "ElasticSampler",
    "EsrunEnvironment",
    "SaveAtNotice",
    "kept_global_batch",
    "newest_file",
    "share",
    "trainer_settings",
]

_KEY = "slurm_elastic"
_CURRENT = ("ready", "started", "processed", "completed")


class EsrunEnvironment(TorchElasticEnvironment):  # type: ignore[misc]
    """Ranks as started by esrun: to Lightning, each is a node with one device.

    So nodes may have different numbers of GPUs. It is not Lightning's Slurm environment: its
    requeueing on SIGUSR1 is off.
    """

    def local_rank(self) -> int:
        """Return 0: the rank's GPU is the only one in `trainer_settings`."""
        return 0

    def node_rank(self) -> int:
        """Return the rank."""
        return int(self.global_rank())


def rank_devices() -> int | list[int]:
    """Return `devices` of a Trainer: this rank's GPU, also if all GPUs of the node are visible."""
    if torch.cuda.is_available() and torch.cuda.device_count() > 1:
        return [int(os.environ.get("LOCAL_RANK", "0"))]
    return 1


def trainer_settings(
    planned: BatchShare,
    sampler: ElasticSampler,
    folder: str | Path,
    *,
    callbacks: Sequence[Any] = (),
) -> dict[str, Any]:
    """Return the arguments of a Trainer that depend on the world.

    Args:
        planned: the share of a rank.
        sampler: of the training's data loader.
        folder: of the checkpoints, on a file system that all nodes share.
        callbacks: further ones, such as a ModelCheckpoint that saves into `folder` too.
    """
    excepthook.install()
    if planned.remark:
        log_line(planned.remark)
    settings: dict[str, Any] = {
        "devices": rank_devices(),
        "num_nodes": planned.world,
        "accumulate_grad_batches": planned.accumulation,
        "use_distributed_sampler": False,  # the ElasticSampler is one
        "callbacks": [*callbacks, SaveAtNotice(planned, sampler, folder)],
    }
    if "RANK" in os.environ:
        settings["plugins"] = [EsrunEnvironment()]
    return settings


def newest_file(folder: str | Path) -> str | None:
    """Return the newest complete checkpoint, `*.ckpt`; None without one.

    A file that was cut while it was written is left out: it lacks the end of its zip archive.
    """
    files = sorted(Path(folder).glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    return next((str(path) for path in reversed(files) if zipfile.is_zipfile(path)), None)


class SaveAtNotice(Callback):  # type: ignore[misc]
    """Callback that saves after the present step when esrun asks for it, then waits.

    It also keeps the position within an epoch in each checkpoint, and converts Lightning's counts
    of micro-batches to those of another world when it is loaded.

    Args:
        planned: the share of a rank.
        sampler: of the training's data loader.
        folder: of the checkpoints.
    """

    def __init__(self, planned: BatchShare, sampler: ElasticSampler, folder: str | Path) -> None:
        self._planned, self._sampler, self._folder = planned, sampler, Path(folder)
        self._notices: ResizeNotices | None = None
        self._step = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Connect to esrun."""
        self._notices = ResizeNotices(
            trainer.strategy.root_device, ended=lambda: bool(trainer.received_sigterm)
        )
        self._step = trainer.global_step

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report each step of the optimizer, and save if esrun asks for it."""
        if self._notices is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        self._notices.trained(
            self._step,
            progress=self._progress(trainer),
            **self._planned.report_fields,
        )
        if self._notices.save_requested():
            name = f"epoch={trainer.current_epoch}-step={self._step}.ckpt"
            trainer.save_checkpoint(self._folder / name)
            self._notices.saved(self._step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Disconnect from esrun."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Add the position within the epoch, in samples of all ranks."""
        micro_batch = self._planned.per_rank * self._planned.world
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        checkpoint[_KEY] = {
            "epoch": self._sampler.epoch,
            "consumed": done * micro_batch,
            "micro_batch": micro_batch,
        }

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Continue after the samples of the checkpoint, in the micro-batches of this world."""
        saved = checkpoint.get(_KEY)
        if saved is None:
            log_line(
                "the checkpoint was saved without SaveAtNotice: it continues at the beginning of an"
                " epoch"
            )
            return
        epoch, consumed = saved["epoch"], saved["consumed"]
        if consumed >= self._sampler.per_epoch:
            self._sampler.resume(epoch + 1, 0)
        else:
            self._sampler.resume(epoch, consumed)
        micro_batch = self._planned.per_rank * self._planned.world
        loops = checkpoint["loops"]["fit_loop"]
        convert_counts(loops["epoch_loop.batch_progress"], saved["micro_batch"], micro_batch)

    def _progress(self, trainer: Any) -> float | None:
        if trainer.max_steps > 0:
            return float(self._step / trainer.max_steps)
        if not trainer.max_epochs or trainer.max_epochs < 0:
            return None
        done = trainer.fit_loop.epoch_loop.batch_progress.current.ready
        part = done * self._planned.per_rank * self._planned.world / self._sampler.per_epoch
        return float((self._sampler.epoch + part) / trainer.max_epochs)


def convert_counts(progress: Mapping[str, Any], former: int, present: int) -> None:
    """Convert Lightning's counts of micro-batches to micro-batches of another size, in place.

    Differences between the counts stay as they are: Lightning reads from them where in its loop the
    checkpoint was saved.

    Args:
        progress: `batch_progress` of a checkpoint.
        former: samples of one micro-batch over all ranks when it was saved.
        present: the same in this world.
    """
    for counts in (progress["total"], progress["current"]):
        done = counts["ready"]
        for name in _CURRENT:
            counts[name] += done * former // present - done
