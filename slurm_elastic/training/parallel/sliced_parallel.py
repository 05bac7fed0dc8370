"""Replicas of the whole model whose optimizer state is divided among the ranks.

See `slurm_elastic.training.exchange.sliced_exchange`. Each rank keeps the optimizer state of the
parameters that it owns, and writes it to checkpoints under their global names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange, keep_owned
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.gradient_noise import squared_norm
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.data_parallel import run_passes
from slurm_elastic.training.parallel.parallel_strategy import CLIP_EPSILON, LossFunction
from slurm_elastic.training.parallel.replica_strategy import ReplicaStrategy
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import Subgroup
from slurm_elastic.training.sampler import BatchSplit, EvenSplit
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests


class SlicedParallel(ReplicaStrategy[SlicedExchange]):
    """Replicas with sliced optimizer state; see `ParallelStrategy`.

    Args:
        model: whole.
        optimizer: of its parameters; afterwards of those that this rank owns.
        loss_fn: of (output, targets).
        micro_batch: most samples through the model at once.
        rank_group: all ranks, at least two.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps.
    """

    #: Layers also wait for their weights, so their own times are not measured.
    measured: MeasuredLayers | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        *,
        micro_batch: int | None,
        rank_group: RankGroup,
        signals: Signals,
        step_profiler: StepProfiler,
    ) -> None:
        super().__init__(
            model,
            loss_fn,
            rank_group=rank_group,
            signals=signals,
            step_profiler=step_profiler,
        )
        self.layout = f"{rank_group.size}x1"
        self.split: BatchSplit = EvenSplit(
            rank=rank_group.rank, world_size=rank_group.size, micro=micro_batch
        )
        self.writers = tuple(range(rank_group.size))
        self._replicas = Subgroup(rank_group, range(rank_group.size), None)
        keep_owned(optimizer, model, rank=self._replicas.rank, ranks=self._replicas.size)
        self._hook = optimizer.register_step_post_hook(self._updated)

    def step(
        self, batch: Batch, requested: StepRequests, update: Callable[[], None]
    ) -> tuple[float, StepRequests]:
        """See `ParallelStrategy`."""
        del update
        exchange, profiler = self._joined(), self._step_profiler
        exchange.clear()
        profiler.begin()
        count = batch.share.count
        with self._signals.tolerate_ending_peers():
            total = run_passes(
                self.model,
                self._loss_fn,
                batch,
                device=self._rank_group.device,
                step_profiler=profiler,
                before_last=exchange.begin_last_pass,
            )
            small, inverse = profiler.reducing()
            shared_values = total.new_tensor([inverse, *requested]).unbind()
            sums = exchange.reduce(torch.stack([total, small, *shared_values]), count)
            sqr = self._squared_norm() if profiler.sampled else None
        profiler.reduced(sums[1:3], count, sqr=sqr)
        return sums[0] / count, StepRequests(*sums[3:])

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            norm = self._squared_norm() ** 0.5
        factor = min(1.0, most / (norm + CLIP_EPSILON))
        for gradient in self._gradients():
            gradient.mul_(factor)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            self._joined().close()
            self._rank_group.broadcast(changed)
        self._exchange = self._new_exchange()

    def dissolve(self) -> None:
        """See `ParallelStrategy`."""
        super().dissolve()
        self._hook.remove()

    def _updated(self, *_: Any) -> None:
        self._joined().send_weights()

    def _squared_norm(self) -> float:
        """Return the squared norm of the whole gradient, the same on all ranks."""
        own = squared_norm(self._gradients()).to(self._rank_group.device)
        return self._joined().add_up(own)

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def _new_exchange(self) -> SlicedExchange:
        """See `ReplicaStrategy`."""
        return SlicedExchange(self.model, self._replicas)
