"""Data parallelism: every rank holds the whole model and takes its part of the samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slurm_elastic.training.exchange.gradient_exchange import GradientExchange
from slurm_elastic.training.init_arguments import loss_of, pair
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, moved
from slurm_elastic.training.parallel.replica_strategy import ReplicaStrategy
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.sampler import BatchSplit, EvenSplit
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests


class DataParallel(ReplicaStrategy[GradientExchange]):
    """Replicas of the whole model; see `ParallelStrategy`.

    Args:
        model: whole.
        loss_fn: of (output, targets).
        micro_batch: most samples through the model at once.
        rank_group: all ranks.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps and layers.
        overlap: whether gradients are exchanged during the backward pass
            (`exchange_schedule.OVERLAPS`).
        log: takes one line for the job's log, on rank 0.
    """

    writers: tuple[int, ...] = (0,)

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        *,
        micro_batch: int | None,
        rank_group: RankGroup,
        signals: Signals,
        step_profiler: StepProfiler,
        overlap: str = "none",
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(
            model,
            loss_fn,
            rank_group=rank_group,
            signals=signals,
            step_profiler=step_profiler,
        )
        self._micro_batch = micro_batch
        self._divide()
        self._overlap, self._log = overlap, log

    @property
    def measured(self) -> MeasuredLayers | None:
        """See `ParallelStrategy`."""
        return self._step_profiler.measured

    def step(
        self, batch: Batch, requested: StepRequests, update: Callable[[], None]
    ) -> tuple[float, StepRequests]:
        """See `ParallelStrategy`."""
        del update
        exchange = self._joined()
        with self._signals.tolerate_ending_peers():
            if exchange.begin():
                self._step_profiler.schedule_changed()
        self._step_profiler.begin()
        total = run_passes(
            self.model,
            self._loss_fn,
            batch,
            device=self._rank_group.device,
            step_profiler=self._step_profiler,
            before_last=exchange.begin_last_pass,
        )
        small, inverse = self._step_profiler.reducing()
        requested = requested._replace(exchange=exchange.requested)
        shared_values = total.new_tensor([inverse, *requested]).unbind()
        count = batch.share.count
        with self._signals.tolerate_ending_peers():
            sums = exchange.reduce(torch.stack([total, small, *shared_values]), count)
        self._step_profiler.reduced(sums[1:3], count)
        self._step_profiler.exchanged(exchange.name, exchange.exposed, exchange.alone_s)
        agreed = StepRequests(*sums[3:])
        exchange.agree(agreed.exchange)
        return sums[0] / count, agreed

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        # Buffers follow each rank's own samples; a frozen layer must be the same on all ranks.
        with self._signals.tolerate_ending_peers():
            self._rank_group.broadcast(changed)
        self._joined().rebuild()

    def regroup(self, *, fresh: bool) -> None:
        """Adapt to a changed group of ranks, between two steps.

        Args:
            fresh: do not use the memory of former reductions again.
        """
        self._divide()
        self._joined().regroup(fresh=fresh)

    def _divide(self) -> None:
        rank, size = self._rank_group.rank, self._rank_group.size
        self.layout = f"{size}x1"
        self.split: BatchSplit = EvenSplit(rank=rank, world_size=size, micro=self._micro_batch)

    def _new_exchange(self) -> GradientExchange:
        """See `ReplicaStrategy`."""
        return GradientExchange(
            self.model.parameters(), self._rank_group, overlap=self._overlap, log=self._log
        )


def run_passes(
    model: Callable[[Any], Any],
    loss_fn: LossFunction,
    batch: Batch,
    *,
    device: torch.device,
    step_profiler: StepProfiler,
    before_last: Callable[[], None],
) -> torch.Tensor:
    """Run forward and backward passes of this rank's micro-batches, of a model held whole.

    Args:
        model: its gradients become sums over this rank's samples.
        loss_fn: of (output, targets).
        batch: this rank's part of a step.
        device: of the model.
        step_profiler: measures the passes.
        before_last: called before the last backward pass.

    Returns:
        The sum of the losses over the samples.
    """
    total = torch.zeros((), device=device)
    for micro_batch, part in zip(batch.share.slices, batch.parts, strict=True):
        samples = len(micro_batch.span)
        step_profiler.forward(samples)
        inputs, targets = pair(moved(part, device))
        loss = loss_of(loss_fn, model(inputs), targets)
        summed = loss.sum() if loss.dim() else loss * samples
        step_profiler.backward()
        if micro_batch is batch.share.slices[-1]:
            before_last()
        summed.backward()
        step_profiler.micro_batch_done(samples)
        total += summed.detach()
    return total
