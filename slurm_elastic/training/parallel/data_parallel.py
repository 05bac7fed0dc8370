"""Data parallel: every rank holds the whole model and takes its part of the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayer
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, StrategySettings, moved
from slurm_elastic.training.parallel.process_group import Reducer, World
from slurm_elastic.training.sampler import BatchSplit, EvenSplit
from slurm_elastic.training.signals import Signals


class DataParallel:
    """See `Mode`.

    Args:
        model: whole.
        loss_fn: of (output, targets).
        micro_batch: most samples through the model at once.
        world: this rank and the others.
        signals: tell a broken connection from the end of the job.
        watch: looks into the steps, and measures the layers.
    """

    writers: tuple[int, ...] = (0,)
    updates_itself = False

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        *,
        micro_batch: int | None,
        world: World,
        signals: Signals,
        watch: StepProfiler,
    ) -> None:
        self.model = model
        self.layout = f"{world.size}x1"
        self.split: BatchSplit = EvenSplit(rank=world.rank, world=world.size, micro=micro_batch)
        self._loss_fn = loss_fn
        self._world = world
        self._signals = signals
        self._watch = watch
        self._reducer: Reducer | None = None

    @property
    def measured(self) -> MeasuredLayer | None:
        """See `Mode`."""
        return self._watch.measured

    @property
    def reduced_bytes(self) -> int:
        """See `Mode`."""
        return self._reducer.bytes if self._reducer else 0

    def join(self, *, fresh: bool) -> None:
        """See `Mode`."""
        if fresh:
            # Whoever forgot to seed the model's construction would train replicas that differ.
            self._world.broadcast(self.model.state_dict().values())
        self._reducer = Reducer(self.model.parameters(), self._world)

    def step(
        self, batch: Batch, asks: StrategySettings, update: Callable[[], None]
    ) -> tuple[float, StrategySettings]:
        """See `Mode`."""
        del update
        reducer = self._joined()
        reducer.clear()
        self._watch.begin()
        total = torch.zeros((), device=self._world.device)
        for piece, part in zip(batch.share.pieces, batch.parts, strict=True):
            self._watch.piece(len(piece.span))
            inputs, targets = moved(part, self._world.device)
            loss = self._loss_fn(self.model(inputs), targets)
            summed = loss.sum() if loss.dim() else loss * len(piece.span)
            self._watch.backward()
            summed.backward()
            self._watch.piece_done(len(piece.span))
            total += summed.detach()
        small, inverse = self._watch.reducing()
        rest = total.new_tensor([inverse, *asks]).unbind()
        count = batch.share.count
        with self._signals.together():
            sums = reducer.reduce(torch.stack([total, small, *rest]), count)
        self._watch.reduced(sums[1:3], count)
        return sums[0] / count, StrategySettings(*sums[3:])

    def clip(self, most: float) -> None:
        """See `Mode`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `Mode`."""
        # Each rank has seen its own samples; a frozen layer must be the same function everywhere.
        with self._signals.together():
            self._world.broadcast(changed)
        self._joined().clear()
        self._reducer = Reducer(self.model.parameters(), self._world)

    def close(self) -> None:
        """See `Mode`."""

    def _joined(self) -> Reducer:
        if self._reducer is None:
            raise RuntimeError("the ranks have not met")
        return self._reducer
