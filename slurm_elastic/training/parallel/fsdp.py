"""Data parallel with the model in parts: each rank keeps a part of every parameter (FSDP2).

`torch.distributed.fsdp.fully_shard` cuts parameters, gradients and optimizer state
along their first dimension. A layer is put together for its passes and dropped
afterwards. What is computed is what replicas compute, in the memory of one over the
number of ranks. Gradients are summed and divided by the true number of samples.

All ranks take part in every pass of every layer, so each has the same number of
micro-batches in a step: where a share has fewer, one sample goes through for nothing,
with weight 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers, layers_of
from slurm_elastic.training.measure.step_profiler import BACKWARD, FORWARD, SYNC, StepProfiler
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, StrategySettings, moved
from slurm_elastic.training.parallel.process_group import RankGroup
from slurm_elastic.training.parallel.tied_parameters import ties
from slurm_elastic.training.parallel.torch_compat import release
from slurm_elastic.training.sampler import BatchSplit, EvenSplit, MicroBatchSlice
from slurm_elastic.training.signals import Signals

#: Debian's 2.6 fails on CPU in `fully_shard` itself; 2.13 works.
_BROKEN = (2, 6)


def unsupported() -> str:
    """Why this torch cannot do it, or ""."""
    return f"shard=True: torch {torch.__version__} is too old" if release() <= _BROKEN else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSplit:
    """As `EvenSplit`, but the same number of pieces on all ranks."""

    rank: int
    world_size: int
    micro: int | None = None

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        all_of_them = [
            EvenSplit(rank=rank, world_size=self.world_size, micro=self.micro).slices(count)
            for rank in range(self.world_size)
        ]
        mine = all_of_them[self.rank]
        missing = max(map(len, all_of_them)) - len(mine)
        return mine + [
            MicroBatchSlice(len(mine) + i, range(1), counts=False) for i in range(missing)
        ]


class FullyShardedParallel:
    """See `ParallelStrategy`. Making it is collective; the model's parameters are replaced.

    Args:
        model: whole, the same on all ranks.
        optimizer: of its parameters; it is given the parts.
        loss_fn: of (output, targets).
        micro_batch: most samples through the model at once.
        rank_group: this rank and the others, who have met.
        signals: tell a broken connection from the end of the job.
        step_profiler: looks into the steps.
    """

    updates_itself = False
    #: Layers are put together between a pass and the next; what they cost is not told apart.
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
        self.layout = f"{rank_group.size}x1"
        self.split: BatchSplit = PaddedSplit(
            rank=rank_group.rank, world_size=rank_group.size, micro=micro_batch
        )
        self.writers = tuple(range(rank_group.size))
        self._loss_fn, self._rank_group, self._signals = loss_fn, rank_group, signals
        self._step_profiler = step_profiler
        self.model: Any = _cut(model, optimizer, rank_group)

    @property
    def reduced_bytes(self) -> int:
        """See `ParallelStrategy`."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    def join(self, *, fresh: bool) -> None:
        """See `ParallelStrategy`."""

    def step(
        self, batch: Batch, requested: StrategySettings, update: Callable[[], None]
    ) -> tuple[float, StrategySettings]:
        """See `ParallelStrategy`."""
        del update
        share = batch.share
        for parameter in self.model.parameters():
            parameter.grad = None
        self._step_profiler.begin()
        total = torch.zeros((), device=self._rank_group.device)
        with self._signals.tolerate_ending_peers():
            for piece, part in zip(share.slices, batch.parts, strict=True):
                self.model.set_requires_gradient_sync(piece is share.slices[-1])
                self._step_profiler.enter(FORWARD)
                inputs, targets = moved(part, self._rank_group.device)
                loss = self._loss_fn(self.model(inputs), targets)
                summed = loss.sum() if loss.dim() else loss * len(piece.span)
                self._step_profiler.enter(BACKWARD)
                (summed if piece.counts else summed * 0.0).backward()
                if piece.counts:
                    total += summed.detach()
            self._step_profiler.enter(SYNC)
            sums = torch.stack([total, *total.new_tensor(requested).unbind()])
            torch.distributed.all_reduce(sums)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                # FSDP2 has taken the mean over the ranks, who may have unequal shares.
                parameter.grad.to_local().mul_(self._rank_group.size / share.count)
        found = sums.tolist()
        self._step_profiler.staged(len(share.slices))
        return found[0] / share.count, StrategySettings(*found[1:])

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            self._rank_group.broadcast(changed)

    def close(self) -> None:
        """See `ParallelStrategy`."""


def _cut(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank_group: RankGroup) -> Any:
    """Shard each layer, then what is left; the optimizer follows."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

    names = {id(p): name for name, p in model.named_parameters()}
    mesh = init_device_mesh(rank_group.device.type, (rank_group.size,))
    # Layers with a parameter in common have to be put together at once.
    layers = [] if ties(model) else [module for _, module in layers_of(model)]
    for module in [*layers, model]:
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[id(p)]] for p in group["params"]]
    return model
