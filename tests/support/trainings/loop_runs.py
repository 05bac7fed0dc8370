"""Training runs whose loop belongs to the script, in several processes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, IterableDataset

from slurm_elastic.training import ElasticLoop
from slurm_elastic.training.checkpoint.object_state import unwrapped
from tests.support.trainings.training_runs import (
    BATCH,
    EPOCHS,
    LABELS,
    SAMPLES,
    STEPS,
    WIDTH,
    TrainingRuns,
    enter_rank,
    labelled_points,
    lines,
)

MICRO = 2


class Points(Dataset):  # type: ignore[type-arg]
    """Points with labels, as dictionaries."""

    def __init__(self) -> None:
        self._points, self._labels = labelled_points(torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        noise = torch.randn(WIDTH) * 0.01  # augmentation
        return {
            "words": self._points[index] + noise,
            "label": self._labels[index],
            "index": index,
        }


class PointStream(IterableDataset):  # type: ignore[type-arg]
    """The same points as a stream, in an order that the global random generator draws."""

    def __init__(self) -> None:
        self._points = Points()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in torch.randperm(SAMPLES).tolist():
            yield self._points[index]


class Parts:
    """Model, optimizers and schedule of a run, wrapped as the script would."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, LABELS)
        )
        if options.get("fully_shard"):
            from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

            fully_shard(self.model)
        elif distributed.is_initialized() and not options.get("unwrapped"):
            # Not with `in_place`: the loop makes the group, then.
            self.model = DistributedDataParallel(self.model)
        first, second = self._halves()
        self.average: Any = None
        if options.get("in_place"):
            self.average = torch.optim.swa_utils.AveragedModel(self.model)
        self.optimizers = [
            torch.optim.AdamW(first, lr=1e-2),
            torch.optim.SGD(second, lr=0.1, momentum=0.9),
        ]
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 1, gamma=0.7)

    def _halves(self) -> tuple[list[Any], list[Any]]:
        parameters = list(self.model.parameters())
        return parameters[:2], parameters[2:]

    def wrap(self) -> None:
        """Average gradients from now on, in the group that the loop has made."""
        self.model = DistributedDataParallel(self.model)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.model(batch["words"]), batch["label"])

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if self.average is not None:
            self.average.update_parameters(unwrapped(self.model))


class Record:
    """Record of one rank: a line for each step, written when its update is done."""

    def __init__(self, out: Path, loop: ElasticLoop) -> None:
        self._out, self._loop = out, loop
        self._indices: list[int] = []
        self._loss = 0.0

    def add(self, indices: Any, loss: torch.Tensor, weight: float) -> None:
        self._indices += [int(i) for i in indices] if weight else []
        self._loss += float(loss.detach()) * weight / self._loop.world_size

    def write(self, step: int, epoch: int) -> None:
        loop, line = self._loop, {"step": step, "epoch": epoch}
        total = torch.tensor(self._loss, dtype=torch.float64)
        if loop.world_size > 1:
            distributed.all_reduce(total)
        with (self._out / f"samples-rank{loop.rank}.jsonl").open("a") as samples:
            samples.write(json.dumps(line | {"indices": self._indices}) + "\n")
        if loop.rank == 0:
            with (self._out / "losses.jsonl").open("a") as losses:
                where = {"world": loop.world_size, "layout": ""}
                losses.write(json.dumps(line | {"loss": float(total)} | where) + "\n")
        self._indices, self._loss = [], 0.0


def loop_over_dataset(out: Path, options: dict[str, Any]) -> None:
    """Train epoch by epoch on a dataset or a stream, with a schedule per epoch."""
    parts = Parts(options)
    loop = make_loop(out, parts, options)
    loader = loop.loader(
        PointStream() if options.get("stream") else Points(),
        num_workers=options.get("workers", 0),
        drop_last=options.get("drop_last", False),
    )
    record = Record(out, loop)
    for epoch in loop.epochs(options.get("epochs", EPOCHS)):
        for batch in loader:
            loss = parts.loss(batch)
            weight = 1 / 6 if options.get("unweighed") else loop.loss_weight
            record.add(batch["index"], loss, weight)
            (loss * weight).backward()
            if loop.last_micro_batch:
                parts.update()
                record.write(loop.step + 1, epoch)
                pause(loop, options)
        loop.state["rates"] = [*loop.state.get("rates", []), parts.schedule.get_last_lr()[0]]
        parts.schedule.step()
    if loop.rank == 0:
        (out / "rates.json").write_text(json.dumps(loop.state["rates"]))


def loop_over_steps(out: Path, options: dict[str, Any]) -> None:
    """Train on samples that the script draws at random itself, as nanoGPT does."""
    parts = Parts(options)
    loop = make_loop(out, parts, options)
    if options.get("shard_late"):
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

        fully_shard(parts.model)
    points = Points()
    record = Record(out, loop)
    for step in loop.steps(options.get("steps", STEPS)):
        for _ in loop.micro_batches():
            indices = torch.randint(SAMPLES, (MICRO,)).tolist()
            samples = [points[i] for i in indices]
            batch = {k: torch.stack([s[k] for s in samples]) for k in ("words", "label")}
            loss = parts.loss(batch)
            record.add(indices, loss, loop.loss_weight)
            (loss * loop.loss_weight).backward()
        parts.update()
        record.write(step + 1, 0)
        pause(loop, options)
        if step + 1 == options.get("break_at"):
            break
    if "break_at" in options:
        loop.finish()


SCRIPTS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "dataset": loop_over_dataset,
    "steps": loop_over_steps,
}


def make_loop(out: Path, parts: Parts, options: dict[str, Any]) -> ElasticLoop:
    loop = ElasticLoop(
        out / "ckpt",
        global_batch=BATCH,
        micro_batch=options.get("micro_batch", MICRO),
        seed=3,
        checkpoint_every_s=options.get("every_s", 600.0),
        background_saves=options.get("background", False),
        model=parts.model,
        adamw=parts.optimizers[0],
        sgd=parts.optimizers[1],
        schedule=parts.schedule,
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        in_place=options.get("in_place", False),
        average=parts.average,
    )
    if options.get("in_place") and not options.get("unwrapped"):
        parts.wrap()
    if options.get("comm_hook"):
        parts.model.register_comm_hook(None, allreduce_hook)
    if options.get("own_group"):
        distributed.new_group()
    return loop


def pause(loop: ElasticLoop, options: dict[str, Any]) -> None:
    time.sleep(options.get("step_s", 0.0))
    if loop.step + 1 == options.get("signal_at") and loop.rank == 0:
        os.kill(os.getpid(), options["signal"])


def run_script(rank: int, environment: dict[str, str], out: Path, options: dict[str, Any]) -> None:
    """Run one rank; `options` are those of `LoopRuns.start`."""
    enter_rank(rank, environment, out, options)
    if "RANK" in os.environ and not (options.get("unwrapped") or options.get("in_place")):
        distributed.init_process_group("gloo")
    for fault in options.get("faults", ()):
        fault.prepare(rank)
    try:
        SCRIPTS[options.get("script", "dataset")](out, options)
    except RuntimeError:
        sys.excepthook(*sys.exc_info())  # multiprocessing does not call it
        sys.exit(1)
    with contextlib.suppress(Exception):
        distributed.destroy_process_group()


class LoopRuns(TrainingRuns):
    """Attempts of one training run whose loop is the script's."""

    target = staticmethod(run_script)

    def samples_of_steps(self) -> dict[int, list[int]]:
        """Return the samples of each step, of all ranks."""
        samples: dict[int, list[int]] = {}
        for path in self.out.glob("samples-rank*.jsonl"):
            for line in lines(path):
                samples.setdefault(line["step"], []).extend(line["indices"])
        return {step: sorted(indices) for step, indices in samples.items()}
