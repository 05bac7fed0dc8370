"""Sharded data parallelism: each rank holds a part of every parameter (FSDP2).

`torch.distributed.fsdp.fully_shard` cuts parameters, gradients and optimizer state
along their first dimension. A layer is gathered for its passes and freed afterwards. The
results are those of replicas, each rank's memory is divided by the number of ranks.
Gradients are summed and divided by the true number of samples.

All ranks take part in every pass of every layer, so each has the same number of
micro-batches in a step: a rank with fewer passes one sample with weight 0 instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.training.init_arguments import loss_of, pair
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers, layers_of
from slurm_elastic.training.measure.step_profiler import (
    BACKWARD,
    FORWARD,
    REDUCING_BACKWARD,
    SYNC,
    StepProfiler,
)
from slurm_elastic.training.parallel import unsharding
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, moved
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.torch_compat import release
from slurm_elastic.training.sampler import BatchSplit, EvenSplit, MicroBatchSlice
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests
from slurm_elastic.training.tied_parameters import ties

#: Debian's 2.6 fails on CPU in `fully_shard` itself; 2.13 works.
_BROKEN = (2, 6)


def unsupported() -> str:
    """Return why this torch does not support FSDP2, or ""."""
    if release() > _BROKEN:
        return ""
    return f"shard=True: torch {torch.__version__} is too old: expected 2.7 or newer"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedSplit:
    """As `EvenSplit`, with the same number of micro-batches on all ranks."""

    rank: int
    world_size: int
    micro: int | None = None

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        slices_by_rank = [
            EvenSplit(rank=rank, world_size=self.world_size, micro=self.micro).slices(count)
            for rank in range(self.world_size)
        ]
        own = slices_by_rank[self.rank]
        missing = max(map(len, slices_by_rank)) - len(own)
        return own + [MicroBatchSlice(len(own) + i, range(1), counts=False) for i in range(missing)]


class FullyShardedParallel:
    """Parts of every parameter on each rank; see `ParallelStrategy`.

    The constructor is collective, and replaces the model's parameters.

    Args:
        model: whole, the same on all ranks.
        optimizer: of its parameters; afterwards of their parts.
        loss_fn: of (output, targets).
        micro_batch: most samples through the model at once.
        rank_group: all ranks, connected.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps.
    """

    updates_itself = False
    #: Layers are gathered between two passes, so their own times are not measured.
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
        self._whole = unsharding.WholeModel(model)
        self.model: Any
        self.model, self._mesh = _cut(model, optimizer, rank_group)
        self._whole.free()
        self._passes = 0

    @property
    def reduced_bytes(self) -> int:
        """See `ParallelStrategy`."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)

    @property
    def crossing_bytes(self) -> int | None:
        """See `ParallelStrategy`: parts are gathered for each pass, and reduced once."""
        size, passes = self._rank_group.size, self._passes
        whole = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return (2 * passes * whole + self.reduced_bytes) * (size - 1) // size if passes else None

    def report_fields(self, batch: int) -> dict[str, int]:
        """See `ParallelStrategy`."""
        del batch
        return {}

    def join(self, *, fresh: bool) -> None:
        """See `ParallelStrategy`."""

    def step(
        self, batch: Batch, requested: StepRequests, update: Callable[[], None]
    ) -> tuple[float, StepRequests]:
        """See `ParallelStrategy`."""
        del update
        share = batch.share
        self._passes = len(share.slices)
        for parameter in self.model.parameters():
            parameter.grad = None
        self._step_profiler.begin()
        total = torch.zeros((), device=self._rank_group.device)
        with self._signals.tolerate_ending_peers():
            for piece, part in zip(share.slices, batch.parts, strict=True):
                last = piece is share.slices[-1]
                self.model.set_requires_gradient_sync(last)
                self._step_profiler.enter(FORWARD)
                inputs, targets = pair(moved(part, self._rank_group.device))
                loss = loss_of(self._loss_fn, self.model(inputs), targets)
                summed = loss.sum() if loss.dim() else loss * len(piece.span)
                reduces = last and len(share.slices) > 1
                self._step_profiler.enter(REDUCING_BACKWARD if reduces else BACKWARD)
                (summed if piece.counts else summed * 0.0).backward()
                if piece.counts:
                    total += summed.detach()
            self._step_profiler.enter(SYNC)
            sums = torch.stack([total, *total.new_tensor(requested).unbind()])
            torch.distributed.all_reduce(sums)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                # FSDP2 has taken the mean over the ranks, whose shares may be unequal.
                parameter.grad.to_local().mul_(self._rank_group.size / share.count)
        summed_loss, *agreed = sums.tolist()
        self._step_profiler.passed(len(share.slices), pipeline=False)
        return summed_loss / share.count, StepRequests(*agreed)

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

    def dissolve(self) -> None:
        """See `ParallelStrategy`."""
        self._whole.restore()
        # torch keeps meshes for good, with results of theirs, but needs their groups no more.
        getattr(self._mesh, "_pg_registry", {}).clear()


def _cut(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, rank_group: RankGroup
) -> tuple[Any, Any]:
    """Shard each layer, then the rest; replace the optimizer's parameters by their parts.

    Returns:
        The model, and the mesh of its ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

    names = {id(p): name for name, p in model.named_parameters()}
    # The name tells the mesh of one group of ranks from that of another with as many: torch keeps
    # results for each mesh.
    name = f"ranks{rank_group.prefix}"
    mesh = init_device_mesh(rank_group.device.type, (rank_group.size,), mesh_dim_names=(name,))
    # Layers with a parameter in common have to be gathered at once.
    layers = [] if ties(model) else [module for _, module in layers_of(model)]
    for module in [*layers, model]:
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[id(p)]] for p in group["params"]]
    return model, mesh
