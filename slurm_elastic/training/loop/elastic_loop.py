"""A training loop that belongs to the script: boundaries of steps, checkpoints, data.

    from slurm_elastic.training import ElasticLoop

    loop = ElasticLoop("ckpt", global_batch=64, model=model, optimizer=optimizer)
    loader = loop.loader(dataset)
    for epoch in loop.epochs(3):
        for inputs, targets in loader:
            loss = loss_fn(model(inputs), targets) * loop.loss_weight
            loss.backward()
            if loop.last_micro_batch:
                optimizer.step()
                optimizer.zero_grad()

The script keeps forward and backward pass, optimizers, schedules and communication
(DistributedDataParallel, FSDP2). The loop restores every object that it is given, saves it
between two steps, divides the global batch among the ranks, and stops the script
at a boundary when the job is to be changed. Without Slurm it is a plain loop.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from slurm_elastic.training import excepthook
from slurm_elastic.training.checkpoint.checkpoint_directory import (
    CheckpointDirectory,
    CheckpointError,
)
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager, agree
from slurm_elastic.training.checkpoint.object_state import LoopValues, ObjectState
from slurm_elastic.training.checkpoint.training_state import Stateful
from slurm_elastic.training.dealt_split import DealtSplit
from slurm_elastic.training.env_directive import read_directive
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.job_requests import JobRequests
from slurm_elastic.training.loop import loop_arguments
from slurm_elastic.training.loop.elastic_loader import ElasticLoader, settings_of
from slurm_elastic.training.loop.live_loop import LiveLoop
from slurm_elastic.training.loop.loop_arguments import LoopError
from slurm_elastic.training.loop.loop_position import LoopPosition
from slurm_elastic.training.loop.step_boundary import StepBoundary
from slurm_elastic.training.ranks.control_group import ControlGroup
from slurm_elastic.training.regroup.loop_changes import LoopChanges
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import Signals

_OF_LOOP = "loop_state"


class ElasticLoop:
    """A training whose loop belongs to the script; the constructor restores its checkpoint.

    All ranks construct it, after `init_process_group` if the script calls that itself, and after
    `fully_shard`. DistributedDataParallel may come before or after.

    Args:
        checkpoint_dir: on a file system that all nodes share.
        global_batch: samples per optimisation step, over all ranks.
        micro_batch: samples that go through the model at once; None: a rank's whole share.
        seed: of the samples' order and of all randomness during training.
        checkpoint_every_s: seconds of training between two checkpoints.
        keep: number of checkpoints that are kept.
        background_saves: continue training while a periodic checkpoint is written from a copy.
        application: name of what this script trains; "": the job's name alone counts.
        in_place: ranks may join and leave between two steps: the script reads `rank`, `world_size`
            and the weight of the loss anew in each step, and leaves `init_process_group` to the
            loop (docs/training-in-place.md).
        objects: everything else that training changes: models, optimizers, schedulers, GradScaler,
            an average of the weights; anything with `state_dict` and `load_state_dict`. None is
            left out.

    Attributes:
        state: dictionary for values of the script, such as the best loss; saved as rank 0 has it,
            and restored on all ranks.
        resumed_from: step of the checkpoint that this attempt began with, or after which this rank
            joined it, or None.

    Raises:
        CheckpointError: the newest checkpoint is of other objects, or of another seed.
        LoopError: an invalid argument, or a directive for `init` only.
        UnsavableObjectError: an object without `state_dict`.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        checkpoint_every_s: float = 600.0,
        keep: int = 2,
        background_saves: bool = False,
        application: str = "",
        in_place: bool = False,
        **objects: Stateful | None,
    ) -> None:
        excepthook.install()
        loop_arguments.check_arguments(global_batch, micro_batch, objects)
        self._signals = Signals()
        self._signals.install()
        self._control_group = ControlGroup(may_change=in_place)
        changes = LoopChanges(self._control_group, signals=self._signals, enabled=in_place)
        remark = loop_arguments.check_directive(read_directive(), global_batch)
        self.state: dict[str, Any] = {}
        given = {name: item for name, item in objects.items() if item is not None}
        state = ObjectState(given | {_OF_LOOP: LoopValues(self.state)}, leads=self.rank == 0)
        self._global_batch, self._seed = global_batch, seed
        self._split = DealtSplit(rank=self.rank, world_size=self.world_size, micro=micro_batch)
        remark = remark or self._split.remark(global_batch)
        if remark and self.rank == 0:
            log_line(remark)
        self._reporter = Reporter(
            rank=self.rank,
            world_size=self.world_size,
            global_batch=global_batch,
            micro_batch=micro_batch,
            application=application,
            device=self._control_group.device,
        )
        self._checkpoints = CheckpointDirectory(Path(checkpoint_dir), keep=keep, log=log_line)
        self._checkpoint_manager = CheckpointManager(
            self._checkpoints,
            state,
            self._control_group,
            writers=tuple(range(self.world_size)) if state.sharded else (0,),
            background=background_saves,
            every_s=checkpoint_every_s,
            identity={"loop_seed": seed},
            log=log_line,
        )
        self._progress_of: Callable[[Cursor], float] = lambda _: 0.0
        cursor, restore_s = self._restore()
        self.resumed_from = None if restore_s is None else cursor.step
        boundary = StepBoundary(
            control_group=self._control_group,
            requests=JobRequests(
                signals=self._signals,
                reporter=self._reporter,
                checkpoint_manager=self._checkpoint_manager,
                rank_group=self._control_group,
                progress=self._progress,
            ),
            checkpoint_manager=self._checkpoint_manager,
            reporter=self._reporter,
            signals=self._signals,
            modules=state.modules,
            sharded=state.sharded,
            resumed_from=self.resumed_from,
            restore_s=restore_s,
            every_step=checkpoint_every_s <= 0,
            changes=changes,
        )
        self._reporter.set_fields(layout=f"{self.world_size}x1")
        optimizers = [o for o in given.values() if isinstance(o, torch.optim.Optimizer)]
        self._position = LoopPosition(
            cursor, boundary=boundary, split=self._split, seed=seed, optimizers=optimizers
        )
        live = LiveLoop(
            control_group=self._control_group,
            position=self._position,
            state=state,
            kept=self._checkpoint_manager.kept,
            split=self._split,
            reporter=self._reporter,
            optimizers=optimizers,
            global_batch=global_batch,
            seed=seed,
        )
        changes.attach(live, reporter=self._reporter, save=self._checkpoint_manager.save)
        self._loader: ElasticLoader | None = None
        atexit.register(_log_unsaved, weakref.ref(self._position), self.rank)

    @property
    def rank(self) -> int:
        """Rank of this process; on one that joins it is provisional, and not 0, until the loop."""
        return self._control_group.rank

    @property
    def world_size(self) -> int:
        """Number of ranks; on one that joins it is provisional until the loop."""
        return self._control_group.size

    @property
    def step(self) -> int:
        """Optimisation steps done since the beginning of the training."""
        return self._position.cursor.step

    @property
    def epoch(self) -> int:
        """The present epoch, counted from 0."""
        return self._position.cursor.epoch

    @property
    def accumulation(self) -> int:
        """Micro-batches of each rank in a full step.

        Raises:
            LoopError: ranks have unequally many.
        """
        self._position.weighed = True
        count = len(self._split.spans(self._global_batch))
        if count % self.world_size:
            raise LoopError(
                f"loop.accumulation: {count} micro-batches on {self.world_size} ranks is invalid:"
                " expected equal shares; iterate over loop.micro_batches() and multiply the loss by"
                " loop.loss_weight"
            )
        return count // self.world_size

    @property
    def loss_weight(self) -> float:
        """Factor of the present micro-batch's mean loss before `backward`.

        With it the averaged gradient is that of the mean over the global batch, also where shares
        are unequal. It is 1 / `accumulation` where they are equal.
        """
        piece, count, _ = self._position.present("loss_weight")
        return self._split.weight(piece, count)

    @property
    def last_micro_batch(self) -> bool:
        """Whether the present micro-batch is this rank's last of the step: then update."""
        return self._position.present("last_micro_batch")[2]

    def steps(self, last: int | None = None) -> Iterator[int]:
        """Yield the number of each step, counted from 0, from the present one on.

        The script takes the samples of a step by itself, for each of `micro_batches`. After the
        last step the training is saved.

        Args:
            last: steps of the whole training; None: until `break`, which `finish` must follow.
        """
        if last is not None:
            self._progress_of = lambda cursor: min(1.0, cursor.step / max(1, last))
        position = self._position
        self._enter()
        while last is None or self.step < last:
            if self._loader is not None:
                raise LoopError(
                    "loop.steps: a loop with loop.loader is invalid: expected one of them, as the"
                    " loader marks the steps; use `for epoch in loop.epochs(…)`"
                )
            position.begin_step()
            slices = self._split.slices(self._global_batch)
            if len(slices) == 1:
                position.enter_micro_batch(slices[0], self._global_batch, last=True)
            yield self.step
            position.end_step(Cursor(self.step + 1, self.epoch, 0))
            position.pass_boundary()
        self.finish()

    def micro_batches(self) -> Iterator[int]:
        """Yield the number of each micro-batch of this rank in the present step, from 0.

        Random generators are seeded by the micro-batch's number among those of all ranks: random
        draws, of samples for example, are the same for the step on any number of ranks.
        """
        slices = self._split.slices(self._global_batch)
        for number, piece in enumerate(slices):
            last = number == len(slices) - 1
            self._position.enter_micro_batch(piece, self._global_batch, last=last)
            yield number

    def epochs(self, last: int) -> Iterator[int]:
        """Yield each epoch, counted from 0, from the present one on.

        Its steps are those of `loader`; without it an epoch is one step. The present epoch
        continues where the checkpoint was made. After the last one the training is saved.

        Args:
            last: epochs of the whole training.
        """
        self._progress_of = lambda cursor: min(1.0, self._epochs_done(cursor) / max(1, last))
        position = self._position
        self._enter()
        while self.epoch < last:
            epoch = self.epoch
            position.begin_step()
            yield epoch
            if self.epoch == epoch:  # without the loader, or left early
                position.end_step(Cursor(self.step + 1, epoch + 1, 0))
            position.pass_boundary()
        self.finish()

    def loader(
        self, dataset: Any, *, shuffle: bool = True, drop_last: bool = False, **options: Any
    ) -> ElasticLoader:
        """Return this rank's micro-batches of a dataset, in place of torch's DataLoader.

        Args:
            dataset: with `len()` and `[index]`, or a stream: an iterable of all samples, in the
                same order on all ranks and in each attempt. Or a DataLoader or StatefulDataLoader,
                whose dataset and options are taken.
            shuffle: False: in the order of the dataset; a stream keeps its own.
            drop_last: leave out the last, smaller batch of an epoch.
            options: of DataLoader, such as num_workers, collate_fn and pin_memory.

        Raises:
            CheckpointError: the checkpoint is of a dataset of another size or order.
            LoaderError: an invalid dataset or option.
        """
        if self._loader is not None:
            raise LoopError(
                "loop.loader: a second one is invalid: expected one, which marks the steps; read"
                " other data with torch's DataLoader"
            )
        if isinstance(dataset, torch.utils.data.DataLoader):
            dataset, taken = settings_of(dataset)
            shuffle = shuffle and taken.pop("shuffle", True)
            drop_last = taken.pop("drop_last", False) or drop_last
            options = taken | options
        loader = ElasticLoader(
            dataset,
            owner=self._position,
            split=self._split,
            global_batch=self._global_batch,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
            options=options,
        )
        order = loader.order
        restored = self._checkpoint_manager.restored.get("data")
        if restored is not None and restored != order:
            raise CheckpointError(
                f"loop.loader: dataset: {order} is invalid: expected {restored}, as in the"
                " checkpoint; use the former dataset, or choose another checkpoint_dir"
            )
        self._checkpoint_manager.kept["data"] = lambda: order
        self._loader = loader
        return loader

    def finish(self) -> None:
        """Save the complete training; `steps` and `epochs` do so at their end.

        The step in which the loop was left by `break` counts if an optimizer was stepped in it.
        """
        self._progress_of = lambda _: 1.0
        self._position.finish()

    def _enter(self) -> None:
        self._position.enter()
        if self._control_group.companion and self.resumed_from is None:
            self.resumed_from = self.step

    def _progress(self, cursor: Cursor) -> float:
        return self._progress_of(cursor)

    def _epochs_done(self, cursor: Cursor) -> float:
        sampler = None if self._loader is None else self._loader.sampler
        return cursor.epoch + (0.0 if sampler is None else cursor.consumed / sampler.samples)

    def _restore(self) -> tuple[Cursor, float | None]:
        """Return the position to continue at, and the seconds of reading a checkpoint."""
        if self._control_group.companion:
            return Cursor(), None  # it gets the state from rank 0
        checkpoint = agree(self._checkpoints, self._control_group)
        if checkpoint is None:
            return Cursor(), None
        begun = time.monotonic()
        cursor = self._checkpoint_manager.restore(checkpoint)
        if self.rank == 0:
            log_line(f"resumed from step {cursor.step} with {self.world_size} rank(s)")
        data = self._checkpoint_manager.restored.get("data")
        self._checkpoint_manager.kept["data"] = lambda: data
        return cursor, time.monotonic() - begun


def _log_unsaved(reference: weakref.ref[LoopPosition], rank: int) -> None:
    """Log, at the end of the process, that the last steps are not saved."""
    position = reference()
    if position is not None and position.unsaved and rank == 0 and not hasattr(sys, "last_type"):
        log_line(
            f"the loop was left after step {position.cursor.step} without loop.finish(): steps"
            " since the last checkpoint are not saved"
        )
