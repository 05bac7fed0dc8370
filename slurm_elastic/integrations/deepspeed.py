"""DeepSpeed under esrun: the global batch, and ZeRO's checkpoints on another number of ranks.

>>> planned = share(64, per_rank=8)                                           # doctest: +SKIP
>>> config = elastic_config({"zero_optimization": {"stage": 1}}, planned, "ckpt")   # doctest: +SKIP
>>> engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
... # doctest: +SKIP
>>> sampler = ElasticSampler(len(data), planned)                              # doctest: +SKIP
>>> progress = EngineProgress(engine, "ckpt", planned, sampler, epochs=3)     # doctest: +SKIP
>>> for batch in progress.batches(DataLoader(data, planned.per_rank, sampler=sampler)):
...     engine.backward(loss_of(engine, batch))                               # doctest: +SKIP
...     engine.step()
...     progress.step()
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from slurm_elastic.integrations.batch_share import (
    BatchShare,
    is_first_rank,
    kept_global_batch,
    log_line,
    share,
)
from slurm_elastic.integrations.elastic_sampler import ElasticSampler
from slurm_elastic.integrations.resize_notices import ResizeNotices
from slurm_elastic.training import excepthook

try:
    import deepspeed
except ImportError as _error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"slurm_elastic.integrations.deepspeed: {_error}; install it: pip install deepspeed"
    ) from None

__all__ = [
    "BatchShare",
    "ElasticSampler",
    "EngineProgress",
    "elastic_config",
    "kept_global_batch",
    "share",
]

_CURSOR = "slurm_elastic.json"
#: Hidden: esrun must not take a converted checkpoint for one that the training has written.
_UNIVERSAL = ".universal_"
#: Longest conversion of a checkpoint, in seconds; the other ranks wait for it.
_CONVERT_S = 1500.0
_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def elastic_config(
    config: Mapping[str, Any],
    planned: BatchShare,
    folder: str | Path,
    *,
    backend: str | None = None,
) -> dict[str, Any]:
    """Return DeepSpeed's configuration for this world; on all ranks.

    Sets the three batch sizes. If the newest checkpoint was saved by another number of ranks with
    ZeRO, which DeepSpeed itself refuses to load, it is converted to a universal checkpoint.

    Args:
        config: as the script has it; its batch sizes are replaced.
        planned: the share of a rank.
        folder: of the checkpoints, on a file system that all nodes share.
        backend: of `deepspeed.init_distributed`, which is called here; None: the accelerator's.

    Raises:
        ValueError: DeepSpeed's own elasticity is on.
        RuntimeError: the checkpoint cannot be converted.
    """
    excepthook.install()
    if config.get("elasticity", {}).get("enabled"):
        raise ValueError(
            "elasticity: enabled is invalid: DeepSpeed would choose another global batch; leave it"
            " out"
        )
    if not dist.is_initialized():
        deepspeed.init_distributed(backend, verbose=False)
    if planned.remark:
        log_line(planned.remark)
    sizes = (planned.actual, planned.per_rank, planned.accumulation)
    result = {**config, **dict(zip(_BATCH_KEYS, sizes, strict=True))}
    checkpoint = dict(result.get("checkpoint", {}))
    checkpoint["load_universal"] = _prepare_checkpoint(result, planned, Path(folder))
    result["checkpoint"] = checkpoint
    return result


def _prepare_checkpoint(config: Mapping[str, Any], planned: BatchShare, folder: Path) -> bool:
    """Convert the newest checkpoint if this world needs it; return whether it does."""
    tag = newest_tag(folder)
    partitioned = config.get("zero_optimization", {}).get("stage", 0) > 0
    if tag is None or not partitioned or _cursor(folder, tag)["world"] == planned.world:
        return False
    problem = [_convert(folder, tag) if is_first_rank() else ""]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise RuntimeError(f"{folder / tag}: not converted for {planned.world} ranks: {problem[0]}")
    return True


def _convert(folder: Path, tag: str) -> str:
    """Write the universal form of a checkpoint; return why that failed, or ""."""
    target = folder / f"{_UNIVERSAL}{tag}"
    shutil.rmtree(target, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
        *("--input_folder", str(folder / tag), "--output_folder", str(target)),
    ]
    # The converter is a separate program: without these variables it does not act as a rank.
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=_CONVERT_S
        )
    except subprocess.TimeoutExpired:
        return f"it takes longer than {_CONVERT_S:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"exit code {done.returncode}"
    (folder / "latest_universal").write_text(target.name, encoding="utf-8")
    log_line(f"{tag}: converted to a universal checkpoint, as the number of ranks has changed")
    return ""


def newest_tag(folder: str | Path) -> str | None:
    """Return the tag of the newest complete checkpoint, which `latest` names; None without one."""
    try:
        tag = (Path(folder) / "latest").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return tag if (Path(folder) / tag / _CURSOR).is_file() else None


def _cursor(folder: Path, tag: str) -> dict[str, int]:
    cursor: dict[str, int] = json.loads((folder / tag / _CURSOR).read_text(encoding="utf-8"))
    return cursor


class EngineProgress:
    """Position of a training with a DeepSpeed engine, its saves, and its exchange with esrun.

    Made after `deepspeed.initialize` with `elastic_config`; it loads the newest checkpoint.

    Args:
        engine: DeepSpeed's.
        folder: of the checkpoints, as for `elastic_config`.
        planned: the share of a rank.
        sampler: of the data loader.
        epochs: of the whole training.
        save_every: steps between two saves; None: only when esrun asks, and at the end.
        keep: checkpoints that are kept.

    Attributes:
        steps: steps of the optimizer done.
        epoch: the present epoch, from 0.
        consumed: samples of that epoch already trained on, over all ranks.
    """

    def __init__(
        self,
        engine: Any,
        folder: str | Path,
        planned: BatchShare,
        sampler: ElasticSampler,
        *,
        epochs: int,
        save_every: int | None = None,
        keep: int = 2,
    ) -> None:
        self._engine, self._folder = engine, Path(folder)
        self._planned, self._sampler, self._epochs = planned, sampler, epochs
        self._save_every, self._keep = save_every, keep
        self._notices = ResizeNotices(engine.device)
        self.steps = self.epoch = self.consumed = 0
        tag = newest_tag(self._folder)
        if tag is not None:
            self._load(tag)

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the micro-batches of this rank that are left, epoch after epoch; save at the end.

        Args:
            loader: a DataLoader with the sampler.
        """
        while self.epoch < self._epochs:
            self._sampler.resume(self.epoch, self.consumed)
            yield from loader
            self.epoch, self.consumed = self.epoch + 1, 0
        self.save()
        self._notices.close()

    def step(self) -> None:
        """Count a step of the optimizer if there was one; after each `engine.step`, on all ranks.

        Saves if it is time or esrun asks for it.
        """
        if self._engine.global_steps == self.steps:
            return
        self.steps = self._engine.global_steps
        self.consumed += self._planned.actual
        self._notices.trained(
            self.steps,
            progress=(self.epoch + self.consumed / self._sampler.per_epoch) / self._epochs,
            **self._planned.report_fields,
        )
        due = self._save_every is not None and self.steps % self._save_every == 0
        if self._notices.save_requested() or due:
            self.save()
            self._notices.saved(self.steps)

    def save(self) -> None:
        """Save as `global_stepN`, and name it in `latest`; on all ranks."""
        tag = f"global_step{self.steps}"
        if is_first_rank():
            cursor = {"steps": self.steps, "epoch": self.epoch, "consumed": self.consumed}
            # DeepSpeed writes `latest` last: a checkpoint that it names has this file.
            (self._folder / tag).mkdir(parents=True, exist_ok=True)
            text = json.dumps(cursor | {"world": self._planned.world})
            (self._folder / tag / _CURSOR).write_text(text, encoding="utf-8")
        self._engine.save_checkpoint(str(self._folder), tag=tag)
        if is_first_rank():
            self._remove_old()

    def _remove_old(self) -> None:
        saves = [
            (int(match[1]), path)
            for path in self._folder.glob("global_step*")
            if (match := re.fullmatch(r"global_step(\d+)", path.name))
        ]
        for _, path in sorted(saves)[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)
        for path in self._folder.glob(f"{_UNIVERSAL}*"):
            shutil.rmtree(path, ignore_errors=True)
        (self._folder / "latest_universal").unlink(missing_ok=True)

    def _load(self, tag: str) -> None:
        cursor = _cursor(self._folder, tag)
        path, _ = self._engine.load_checkpoint(str(self._folder))
        if path is None:
            raise RuntimeError(f"{self._folder / tag}: DeepSpeed did not load this checkpoint")
        self.steps, self.epoch = cursor["steps"], cursor["epoch"]
        self.consumed = cursor["consumed"]
