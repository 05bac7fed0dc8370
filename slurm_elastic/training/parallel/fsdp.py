"""Sharded data parallelism: each rank holds a part of every parameter (FSDP2).

`torch.distributed.fsdp.fully_shard` cuts parameters, gradients and optimizer state
along their first dimension. A layer is gathered for its passes and freed afterwards. The
results are those of replicas, each rank's memory is divided by the number of ranks.
Gradients are summed and divided by the true number of samples.

All ranks take part in every pass of every layer, so each has the same number of
micro-batches in a step: a rank with fewer passes one sample with weight 0 instead.

With a tensor degree, replicas are groups of ranks that share the weights of layers
(`parallel.shared_layers`), and each of these ranks divides its part with the ranks that
have the same part in other replicas: a mesh of two dimensions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.training.init_arguments import loss_of, pair
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.gradient_noise import squared_norm
from slurm_elastic.training.measure.layer_profile import MeasuredLayers, layers_of
from slurm_elastic.training.measure.step_profiler import (
    BACKWARD,
    FORWARD,
    REDUCING_BACKWARD,
    SYNC,
    StepProfiler,
)
from slurm_elastic.training.parallel import unsharding
from slurm_elastic.training.parallel.parallel_strategy import CLIP_EPSILON, LossFunction, moved
from slurm_elastic.training.parallel.rank_mesh import RankMesh
from slurm_elastic.training.parallel.shared_layers import SharedLayers, weights_used_by_layers
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.torch_compat import forget_groups, release
from slurm_elastic.training.sampler import BatchSplit, GroupSplit, MicroBatchSlice
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests
from slurm_elastic.training.tensor.chunk_choice import ChunkChoice
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
    """As `GroupSplit`, with the same number of micro-batches on all ranks."""

    rank: int
    world_size: int
    micro: int | None = None
    group_size: int = 1

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        own = self._without_padding(self.rank, count)
        firsts = range(0, self.world_size, self.group_size)
        most = max(len(self._without_padding(rank, count)) for rank in firsts)
        return own + [
            MicroBatchSlice(number, range(1), counts=False, padding=True)
            for number in range(len(own), most)
        ]

    def _without_padding(self, rank: int, count: int) -> list[MicroBatchSlice]:
        return GroupSplit(
            group_size=self.group_size, rank=rank, world_size=self.world_size, micro=self.micro
        ).slices(count)


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
        tensor: ranks of a replica, which share the weights of layers; there are several replicas.
        styles: of the script, by name or pattern of these layers.
        overlap: "none", "buckets" or "auto": whether sums over a replica's ranks travel in chunks.
        log: takes one line for the job's log, on rank 0.

    Raises:
        InvalidInputError: styles that do not fit the model, or an optimizer that cannot update
            layers that ranks share.
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
        tensor: int = 1,
        styles: Mapping[str, str] | None = None,
        overlap: str = "none",
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._tensor, self._replicas = tensor, rank_group.size // tensor
        self.layout = f"{self._replicas}x1"
        self.split: BatchSplit = PaddedSplit(
            rank=rank_group.rank,
            world_size=rank_group.size,
            micro=micro_batch,
            group_size=tensor,
        )
        self.writers = tuple(range(rank_group.size))
        self._loss_fn, self._rank_group, self._signals = loss_fn, rank_group, signals
        self._step_profiler = step_profiler
        self._whole = unsharding.WholeModel(model)
        leads = tensor > 1 and rank_group.rank == 0
        self._chunks = ChunkChoice(overlap if tensor > 1 else "none", leads=leads, log=log)
        self._rank_mesh = RankMesh(rank_group, tensor) if tensor > 1 else None
        self._shared: SharedLayers | None = None
        if self._rank_mesh:
            self._shared = SharedLayers(
                [model],
                [0],
                optimizer,
                size=tensor,
                styles=styles or {},
                rank_group=rank_group,
                chunking=self._chunks.chunking,
                mesh=self._rank_mesh,
                log=log,
            )
        self._mesh = self._rank_mesh.replicas_mesh if self._rank_mesh else _mesh(rank_group)
        self.model: Any = model
        _cut(model, optimizer, self._mesh)
        self._whole.free()
        self._passes = 0

    @property
    def reduced_bytes(self) -> int:
        """See `ParallelStrategy`."""
        trained = (p for p in self.model.parameters() if p.requires_grad)
        return sum(p.numel() * p.element_size() // self._sharers(p) for p in trained)

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
        if self._chunks.begin():
            self._step_profiler.schedule_changed()
        self._step_profiler.begin()
        total = torch.zeros((), device=self._rank_group.device)
        one_line = weights_used_by_layers() if self._shared else contextlib.nullcontext()
        with self._signals.tolerate_ending_peers(), one_line:
            for piece, part in zip(share.slices, batch.parts, strict=True):
                last = piece is share.slices[-1]
                self.model.set_requires_gradient_sync(last)
                self._step_profiler.enter(FORWARD)
                inputs, targets = pair(moved(part, self._rank_group.device))
                loss = loss_of(self._loss_fn, self.model(inputs), targets)
                summed = loss.sum() if loss.dim() else loss * len(piece.span)
                reduces = last and len(share.slices) > 1
                self._step_profiler.enter(REDUCING_BACKWARD if reduces else BACKWARD)
                (summed * 0.0 if piece.padding else summed).backward()
                if not piece.padding:
                    total += summed.detach()
            self._step_profiler.enter(SYNC)
            requested = requested._replace(exchange=self._chunks.requested)
            # Each rank of a replica has the loss of the same samples.
            sums = torch.stack([total / self._tensor, *total.new_tensor(requested).unbind()])
            torch.distributed.all_reduce(sums)
        for gradient in self._gradients():
            # FSDP2 has taken the mean over the replicas, whose shares may be unequal.
            gradient.to_local().mul_(self._replicas / share.count)
        self._chunks.end()
        self._step_profiler.passed(len(share.slices), pipeline=False)
        if self._shared:
            self._step_profiler.exchanged(self._chunks.name)
        summed_loss, *agreed = sums.tolist()
        requests = StepRequests(*agreed)
        self._chunks.agree(requests.exchange)
        return summed_loss / share.count, requests

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        if not self._shared:
            with self._signals.tolerate_ending_peers():
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)
            return
        # Torch adds up no norms of two meshes: what a replica's ranks do not share, all have.
        shared: list[torch.Tensor] = []
        own: list[torch.Tensor] = []
        for gradient in self._gradients():
            (shared if self._sharers(gradient) > 1 else own).append(gradient.to_local())
        device = self._rank_group.device
        square = squared_norm(shared).to(device) + squared_norm(own).to(device) / self._tensor
        with self._signals.tolerate_ending_peers():
            self._rank_group.add_up([square], "adding up the norm of the gradient")
        factor = min(1.0, most / (float(square) ** 0.5 + CLIP_EPSILON))
        for gradient in self._gradients():
            gradient.to_local().mul_(factor)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            self._rank_group.broadcast(changed)

    def close(self) -> None:
        """See `ParallelStrategy`."""

    def dissolve(self) -> None:
        """See `ParallelStrategy`."""
        if self._shared:
            self._shared.undo()
        self._whole.restore()
        if self._rank_mesh:
            self._rank_mesh.forget_groups()
        forget_groups(self._mesh)

    def _sharers(self, part: Any) -> int:
        """Return the number of ranks of a replica that share the tensor of this part."""
        return self._tensor if part.device_mesh.ndim > 1 else 1

    def _gradients(self) -> list[Any]:
        """Return the gradients of this rank's parts, DTensors."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]


def _mesh(rank_group: RankGroup) -> Any:
    """Return a mesh of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415 - slow

    # The name tells the mesh of one group of ranks from that of another with as many: torch keeps
    # results for each mesh.
    name = f"ranks{rank_group.prefix}"
    return init_device_mesh(rank_group.device.type, (rank_group.size,), mesh_dim_names=(name,))


def _cut(model: torch.nn.Module, optimizer: torch.optim.Optimizer, mesh: Any) -> None:
    """Shard each layer, then the rest; replace the optimizer's parameters by their parts."""
    from torch.distributed.fsdp import fully_shard  # noqa: PLC0415 - slow

    names = {id(p): name for name, p in model.named_parameters()}
    # Layers with a parameter in common have to be gathered at once.
    layers = [] if ties(model) else [module for _, module in layers_of(model)]
    for module in [*layers, model]:
        if any(True for _ in module.parameters()):
            fully_shard(module, mesh=mesh)
    parts = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [parts[names[id(p)]] for p in group["params"]]
