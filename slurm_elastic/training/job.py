"""The face of the library: a training loop that can stop, move and go on.

    job = init(model, loss_fn, optimizer, dataset, global_batch=256, epochs=3, checkpoint_dir="c")
    for batch in job:
        loss = job.step(batch)
    job.finish()

The same lines run alone on a laptop, under esrun on any number of GPUs, and
after a change of that number: the loop begins where the newest checkpoint
ends, and every optimisation step takes the same samples whoever computes it.

Between two steps, and only there, the job does what it was asked: all ranks
learn of a request in the all-reduce of the same step, so they agree on where
to stop. The script's own code of that step has run by then.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from slurm_elastic.training import state as states
from slurm_elastic.training.checkpoint import Checkpoints
from slurm_elastic.training.freezing import Freezer, Freezing, wanted
from slurm_elastic.training.keeper import Keeper
from slurm_elastic.training.loader import Batch, Loader
from slurm_elastic.training.measure import process_age
from slurm_elastic.training.parallel import Reducer, World
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.requests import Requests, say
from slurm_elastic.training.sampler import Cursor, Sampler
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.watch import Watch

#: A module, or its layers in order.
Model: TypeAlias = torch.nn.Module | Sequence[tuple[str, torch.nn.Module]]


def init(
    model: Model,
    loss_fn: Callable[[Any, Any], torch.Tensor],
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer],
    dataset: Any,
    *,
    global_batch: int,
    epochs: int,
    checkpoint_dir: str | os.PathLike[str],
    seed: int = 0,
    scheduler: Any = None,
    micro_batch: int | None = None,
    workers: int = 0,
    collate: Callable[[Sequence[Any]], Any] | None = None,
    clip_norm: float | None = None,
    checkpoint_every_s: float = 600.0,
    keep: int = 2,
    extra: Mapping[str, states.Stateful] | None = None,
    application: str = "",
    freeze: str | Freezing = "off",
) -> Job:
    """Make a job out of the usual parts, and restore it if there is a checkpoint.

    Args:
        model: a module, or an ordered list of (name, module).
        loss_fn: of (output, targets); the mean over the samples it is given, or one value each.
        optimizer: one, or a function of the parameters that makes one.
        dataset: `len()` and `[index]`, giving (inputs, targets).
        global_batch: samples per optimisation step over all ranks; never changes by itself.
        epochs: how often every sample is trained on.
        checkpoint_dir: on a file system that all nodes share.
        seed: of the samples' order and of all randomness during training.
        scheduler: of the learning rate, or a function of the optimizer that makes one; it is
            stepped after every optimisation step.
        micro_batch: most samples that go through the model at once; None: a rank's whole share.
        workers: processes per rank that fetch samples ahead.
        collate: makes a micro-batch out of samples, as in DataLoader.
        clip_norm: largest norm of the whole gradient.
        checkpoint_every_s: seconds of training between two checkpoints.
        keep: how many checkpoints stay.
        extra: objects with `state_dict` and `load_state_dict` that join the checkpoint.
        application: what this script trains; jobs of one user with equal names of job and
            application scale alike. "" leaves it to the job's name.
        freeze: "auto": layers may be frozen, as far as the directive allows it where there is
            one; `Freezing` says how. The directive's `freeze=auto` alone does as well.

    Raises:
        CheckpointError: the newest checkpoint is of another model or another dataset.
        ValueError: an argument cannot be.
    """
    freezing, remark = wanted(freeze)
    signals = Signals()
    signals.install()
    world = World()
    if remark and world.rank == 0:
        say(remark)
    world.connect()
    whole = _whole(model).to(world.device)
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(whole.parameters())
    if callable(scheduler) and not hasattr(scheduler, "state_dict"):
        scheduler = scheduler(optimizer)
    state = states.State(
        model=whole, optimizer=optimizer, scheduler=scheduler, extra=dict(extra or {})
    )
    states.check(state)
    sampler = Sampler(samples=len(dataset), global_batch=global_batch, epochs=epochs, seed=seed)
    loader = Loader(
        dataset=dataset,
        micro_batch=micro_batch,
        workers=workers,
        collate=collate,
        pin=world.device.type == "cuda",
        seed=seed,
    )
    keeper = Keeper(
        Checkpoints(Path(checkpoint_dir), keep=keep, say=say),
        state,
        world,
        every_s=checkpoint_every_s,
        identity={"samples": sampler.samples, "order": sampler.fingerprint()},
        say=say,
    )
    reporter = Reporter(
        rank=world.rank,
        world=world.size,
        global_batch=global_batch,
        micro_batch=micro_batch,
        application=application,
    )
    return Job(
        state=state,
        loss_fn=loss_fn,
        sampler=sampler,
        loader=loader,
        keeper=keeper,
        reporter=reporter,
        world=world,
        signals=signals,
        clip_norm=clip_norm,
        freezing=freezing,
    )


class Job:
    """A training run on this attempt's ranks; made by `init`.

    Attributes:
        model, optimizer, scheduler: as given, on the device, restored.
        rank, world_size, device: of this process.
        resumed_from: step of the checkpoint that this attempt began with, or None.
    """

    def __init__(
        self,
        *,
        state: states.State,
        loss_fn: Callable[[Any, Any], torch.Tensor],
        sampler: Sampler,
        loader: Loader,
        keeper: Keeper,
        reporter: Reporter,
        world: World,
        signals: Signals,
        clip_norm: float | None,
        freezing: Freezing | None = None,
    ) -> None:
        self.model, self.optimizer, self.scheduler = state.model, state.optimizer, state.scheduler
        self.rank, self.world_size, self.device = world.rank, world.size, world.device
        self._loss_fn = loss_fn
        self._sampler = sampler
        self._loader = loader
        self._keeper = keeper
        self._reporter = reporter
        self._signals = signals
        self._clip_norm = clip_norm
        self._requests = Requests(
            signals=signals,
            reporter=reporter,
            keeper=keeper,
            world=world,
            progress=sampler.progress,
        )
        self._notice = self._stop = False
        self._running = False
        begun = time.monotonic()
        cursor = keeper.restore()
        self._restore_s = None if cursor is None else time.monotonic() - begun
        self.resumed_from = None if cursor is None else cursor.step
        self._cursor = cursor or Cursor()
        world.join()
        if cursor is None:
            # Whoever forgot to seed the model's construction would train replicas that differ.
            world.broadcast(self.model.state_dict().values())
        elif self.rank == 0:
            say(f"went on from step {cursor.step} with {world.size} rank(s)")
        self._world = world
        self._watch = Watch(
            timer=reporter.timer,
            noise=reporter.noise,
            parameters=[p for p in self.model.parameters() if p.requires_grad],
            world=world,
        )
        self._freezer = self._make_freezer(freezing)
        self._reducer = Reducer(self.model.parameters(), world)

    @property
    def steps_done(self) -> int:
        """Optimisation steps done since the beginning of the training."""
        return self._cursor.step

    @property
    def frozen(self) -> int:
        """Layers, counted from the front, that do not train now."""
        return self._freezer.frozen if self._freezer else 0

    @property
    def penalties(self) -> tuple[float, ...]:
        """What freezing 0, 1, ... layers costs, up to the longest prefix that may be frozen.

        Fractions of useful progress (`slurm_elastic.models.freezing`); known to rank 0 only.
        """
        return self._freezer.penalties if self._freezer else (0.0,)

    def freeze(self, layers: int | None) -> None:
        """Choose how many layers are frozen, of those that may be; None: all of them.

        Rank 0's choice counts, after the next step.

        Raises:
            ValueError: a negative number.
        """
        if layers is not None and layers < 0:
            raise ValueError(f"{layers} layers cannot be frozen; write 0 to thaw all")
        if self._freezer:
            self._freezer.chosen = layers

    def validated(self, loss: float) -> None:
        """Tell the loss on samples that are not trained on: if it worsens, all layers thaw.

        Rank 0's counts. Without freezing it means nothing.
        """
        if self._freezer:
            self._freezer.validated(loss)

    def __iter__(self) -> Iterator[Batch]:
        def rest() -> Iterator[Any]:
            return self._sampler.shares(self._cursor, rank=self.rank, world=self.world_size)

        self._signals.leave_at_once(False)
        for batch in self._loader.batches(rest, rank=self.rank, step=self._cursor.step):
            yield batch
            if self._cursor != batch.share.after:
                raise RuntimeError("the loop's body must call job.step(batch)")
            self._heed()

    def step(self, batch: Batch) -> float:
        """Train on one batch: forward, backward, reduce, update.

        Returns:
            The mean loss over the global batch, the same on all ranks.
        """
        share = batch.share
        if share.before != self._cursor:
            raise RuntimeError("job.step takes every batch of the loop once, in their order")
        self._reducer.clear()
        self._watch.begin()
        if self._freezer:
            self._freezer.begin(share.after.step)
        total = torch.zeros((), device=self.device)
        sizes = [len(part) for part in share.micro_batches(self._loader.micro_batch)]
        for part, size in zip(batch.parts, sizes, strict=True):
            self._watch.piece()
            inputs, targets = _moved(part, self.device)
            loss = self._loss_fn(self.model(inputs), targets)
            summed = loss.sum() if loss.dim() else loss * size
            summed.backward()
            self._watch.piece_done(size)
            total += summed.detach()
        loss, frozen = self._reduce(total, share.count)
        if self._freezer:
            self._freezer.see(
                share.after.step,
                loss,
                epoch=share.after.epoch,
                progress=self._sampler.progress(share.after),
            )
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self._cursor = share.after
        self._reporter.timer.end()
        if self._freezer:
            self._freeze_as_agreed(self._freezer, frozen)
        return loss

    def finish(self) -> None:
        """Save the end of the training and part from the other ranks."""
        self._requests.finish(self._cursor)

    def _reduce(self, total: torch.Tensor, count: int) -> tuple[float, int]:
        """Mean loss over the whole batch, and how many layers are to be frozen after this step.

        Gradients follow, and what else the ranks agree on.
        """
        wish = float(self._freezer.wish if self._freezer else 0)
        notice, stop = (total.new_tensor(float(heard)) for heard in self._requests.heard())
        small, inverse = self._watch.reducing()
        rest = total.new_tensor([inverse, wish]).unbind()
        control = torch.stack([total, notice, stop, small, *rest])
        with self._requests.together():
            summed = self._reducer.reduce(control, count)
        self._watch.reduced(summed[3:5], count)
        self._notice, self._stop = summed[1] > 0, summed[2] > 0
        return summed[0] / count, round(summed[5])

    def _make_freezer(self, how: Freezing | None) -> Freezer | None:
        if how is None:
            return None
        sampler = self._sampler
        freezer = Freezer(
            self.model,
            how,
            optimizer=self.optimizer,
            steps=sampler.epochs * -(-sampler.samples // sampler.global_batch),
            epochs=sampler.epochs,
            global_batch=sampler.global_batch,
            leads=self.rank == 0,
            say=say,
        )
        freezer.restore(self._keeper.restored_freezing)
        self._keeper.freezing = freezer.state_dict
        self._reporter.tell(**freezer.facts())
        return freezer

    def _freeze_as_agreed(self, freezer: Freezer, frozen: int) -> None:
        before = freezer.frozen
        if not freezer.obey(frozen):
            return
        # Each rank has seen its own samples; a frozen layer must be the same function everywhere.
        with self._requests.together():
            self._world.broadcast(freezer.prefix.buffers(before, frozen))
        self._reducer.clear()
        self._reducer = Reducer(self.model.parameters(), self._world)
        self._reporter.timer.restart()
        self._reporter.tell(**freezer.facts())

    def _heed(self) -> None:
        if not self._running:
            self._running = True
            self._keeper.begin()
            self._reporter.started(
                startup_s=process_age(), restore_s=self._restore_s, step=self.resumed_from
            )
        self._requests.obey(self._cursor, notice=self._notice, stop=self._stop)


def _whole(model: Model) -> torch.nn.Module:
    if isinstance(model, torch.nn.Module):
        return model
    return torch.nn.Sequential(OrderedDict(model))


def _moved(value: Any, device: torch.device) -> Any:
    """Tensors within tuples, lists and dictionaries, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: _moved(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_moved(v, device) for v in value]
    return value
