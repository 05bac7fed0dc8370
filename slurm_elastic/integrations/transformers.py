"""Hugging Face's Trainer under esrun: the global batch, saves before a resize, and reports.

>>> from slurm_elastic.integrations.transformers import (   # doctest: +SKIP
...     ElasticCallback, keep_global_batch, newest_checkpoint)
>>> args = keep_global_batch(TrainingArguments("out", …))   # doctest: +SKIP
>>> trainer = Trainer(model, args, callbacks=[ElasticCallback()], …)        # doctest: +SKIP
>>> trainer.train(resume_from_checkpoint=newest_checkpoint(args.output_dir))  # doctest: +SKIP
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from slurm_elastic.integrations.batch_share import BatchShare, kept_global_batch, log_line, share
from slurm_elastic.integrations.resize_notices import ResizeNotices
from slurm_elastic.training import excepthook

try:
    from transformers import TrainerCallback
except ImportError as _error:  # pragma: no cover - depends on what is installed
    raise ImportError(
        f"slurm_elastic.integrations.transformers: {_error}; install it: pip install 'transformers"
        "[torch]'"
    ) from None

__all__ = [
    "BatchShare",
    "ElasticCallback",
    "keep_global_batch",
    "kept_global_batch",
    "newest_checkpoint",
    "share",
]

#: Part by which the steps of an epoch may differ after a resume, or one step.
_TOLERANCE = 0.1


def keep_global_batch(args: Any, global_batch: int | None = None) -> Any:
    """Set accumulation and batch of a rank so that a step takes as many samples in every world.

    To be called before the Trainer is made, which copies both.

    Args:
        args: `TrainingArguments`. As they are written they describe the start world, or with
            `esrun --micro-batches` one micro-batch.
        global_batch: samples per step of the optimizer; None: from esrun and `args`
            (`slurm_elastic.integrations.batch_share.kept_global_batch`).

    Returns:
        `args`.

    Raises:
        ValueError: `auto_find_batch_size` is on, the batch is less than 1, or `deepspeed` is set
            and has copied other sizes.
    """
    excepthook.install()
    if getattr(args, "auto_find_batch_size", False):
        raise ValueError(
            "auto_find_batch_size: True is invalid: it changes the global batch; leave it out"
        )
    per_rank, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if global_batch is None:
        global_batch = kept_global_batch(per_rank=per_rank, accumulation=accumulation)
    planned = share(global_batch, per_rank=per_rank, world=args.world_size)
    unchanged = (planned.per_rank, planned.accumulation) == (per_rank, accumulation)
    if getattr(args, "deepspeed", None) and not unchanged:
        raise ValueError(
            "deepspeed: TrainingArguments has copied the batch sizes into its config; give it"
            f" per_device_train_batch_size={planned.per_rank} and"
            f" gradient_accumulation_steps={planned.accumulation}, those of share()"
        )
    args.per_device_train_batch_size = planned.per_rank
    args.gradient_accumulation_steps = planned.accumulation
    if planned.remark:
        log_line(planned.remark)
    if args.dataloader_drop_last:
        log_line(
            "dataloader_drop_last: True is unsafe: an epoch may have a step more or less in another"
            " world unless the global batch divides the samples; leave it out"
        )
    return args


def newest_checkpoint(output_dir: str) -> str | None:
    """Return the complete `checkpoint-N` with the largest N; None without one.

    A checkpoint is complete when it has `trainer_state.json`, which is written last.
    """
    complete = [
        (int(match[1]), str(path))
        for path in Path(output_dir).glob("checkpoint-*")
        if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))
        and (path / "trainer_state.json").is_file()
    ]
    return max(complete)[1] if complete else None


class ElasticCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that saves after the present step when esrun asks for it, then waits.

    Reports step, step time and batch, and refuses to go on after a resume where the epochs, and so
    the schedule, would jump.

    Args:
        strict: raise ValueError where they would; False: only a line in the job's log.
    """

    def __init__(self, *, strict: bool = True) -> None:
        self._strict = strict
        self._notices: ResizeNotices | None = None
        self._share: BatchShare | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Connect to esrun and check the schedule."""
        excepthook.install()
        self._notices = ResizeNotices(args.device)
        per_rank, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
        self._share = BatchShare(
            per_rank * accumulation * args.world_size, args.world_size, per_rank, accumulation
        )
        problem = _schedule_problem(args, state, kwargs.get("train_dataloader"))
        if problem and self._strict:
            raise ValueError(problem)
        if problem:
            log_line(problem)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Report the step; request a save if esrun does."""
        if self._notices is not None and self._share is not None:
            progress = state.global_step / state.max_steps if state.max_steps > 0 else None
            fields = self._share.report_fields
            self._notices.trained(state.global_step, progress=progress, **fields)
            if self._notices.save_requested() and state.global_step < state.max_steps:
                control.should_save = True
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Report the save; wait if it answers a notice."""
        if self._notices is not None:
            self._notices.saved(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Disconnect from esrun."""
        if self._notices is not None:
            self._notices.close()
            self._notices = None


def _schedule_problem(args: Any, state: Any, loader: Any) -> str:
    """Return why the schedule jumps over a resume, or "".

    Compared are the epochs done as the checkpoint has them, and as this world counts them.
    """
    try:
        batches = len(loader)
    except TypeError:
        return ""  # without a length there are no epochs: max_steps is the schedule
    per_epoch = max(1, math.ceil(batches / args.gradient_accumulation_steps))
    if not state.global_step or not state.epoch:
        return ""
    epoch, former = state.global_step / per_epoch, state.global_step / state.epoch
    # Steps per epoch are rounded up, in each world differently: one more or less.
    if abs(per_epoch - former) <= max(1.01, _TOLERANCE * former):
        return ""
    return (
        f"the checkpoint of step {state.global_step} is of epoch {state.epoch:.2f}, which is epoch"
        f" {epoch:.2f} with a global batch for {args.world_size} ranks: the schedule would jump;"
        " use keep_global_batch(args)"
    )
