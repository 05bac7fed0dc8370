"""Spatial groups as a way to share a step: each sample is cut over the ranks of a group.

Ranks 0 to N-1 are the first group, the next N the second one, and so on; groups are replicas. The
loss of a sample is the same on all ranks of its group, each of which counts 1/N of it. So the sum
of the gradients over all ranks, divided by the samples of the batch, is the mean that replicas
have, and the same exchange serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from slurm_elastic.core.slab_grid import SlabGrid, SpatialCutError
from slurm_elastic.training.exchange.gradient_exchange import GradientExchange
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.data_parallel import run_passes
from slurm_elastic.training.parallel.layout_choice import LayoutChoice
from slurm_elastic.training.parallel.parallel_strategy import LossFunction
from slurm_elastic.training.parallel.replica_strategy import ReplicaStrategy
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import subgroup
from slurm_elastic.training.sampler import BatchSplit, GroupSplit
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.spatial import slab_rules  # noqa: F401 - registers the rules
from slurm_elastic.training.spatial.slab_dataset import SlabDataset, sample_extents
from slurm_elastic.training.spatial.slab_layers import spatial_whole
from slurm_elastic.training.spatial.slab_tensor import SlabTensor, slab_tensor
from slurm_elastic.training.spatial.spatial_group import SpatialGroup
from slurm_elastic.training.step_requests import StepRequests


class SpatialParallel(ReplicaStrategy[GradientExchange]):
    """Replicas, each of which is a spatial group; see `ParallelStrategy`.

    Args:
        model: whole.
        loss_fn: of (output, targets).
        grid: place of this rank in its group.
        extents: spatial extents of all samples.
        layout: as text.
        micro_batch: most samples through the model at once.
        rank_group: all ranks.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps.
        overlap: as of `DataParallel`.
        log: takes one line for the job's log, on rank 0.
    """

    writers: tuple[int, ...] = (0,)
    #: Layers also wait for planes of other ranks, so their own times are not measured.
    measured: MeasuredLayers | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        *,
        grid: SlabGrid,
        extents: tuple[int, ...],
        layout: str,
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
        self.layout = layout
        self.split: BatchSplit = GroupSplit(
            group_size=grid.size,
            rank=rank_group.rank,
            world_size=rank_group.size,
            micro=micro_batch,
        )
        self._grid, self._extents = grid, extents
        self._overlap, self._log = overlap, log
        self._group: SpatialGroup | None = None

    def step(
        self, batch: Batch, requested: StepRequests, update: Callable[[], None]
    ) -> tuple[float, StepRequests]:
        """See `ParallelStrategy`."""
        del update
        exchange, profiler = self._joined(), self._step_profiler
        count = batch.share.count
        with self._signals.tolerate_ending_peers():
            if exchange.begin():
                profiler.schedule_changed()
            profiler.begin()
            total = run_passes(
                self._forward,
                self._loss,
                batch,
                device=self._rank_group.device,
                step_profiler=profiler,
                before_last=exchange.begin_last_pass,
            )
            # The gradient of one group's samples is on no single rank: its noise is not measured.
            profiler.reducing()
            requested = requested._replace(exchange=exchange.requested)
            control = total.new_tensor([0.0, 0.0, *requested])
            sums = exchange.reduce(torch.cat([total.reshape(1), control]), count)
        profiler.passed(len(batch.share.slices), pipeline=False)
        profiler.exchanged(exchange.name, exchange.exposed, exchange.alone_s)
        agreed = StepRequests(*sums[3:])
        exchange.agree(agreed.exchange)
        return sums[0] / count, agreed

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), most)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            self._rank_group.broadcast(changed)
        self._joined().rebuild()

    def _forward(self, inputs: Any) -> Any:
        if not isinstance(inputs, torch.Tensor):
            raise SpatialCutError(
                f"dataset: inputs of type {type(inputs).__name__} are invalid for a sample that is"
                " cut in space: expected one tensor"
            )
        return self.model(slab_tensor(inputs, self._joined_group(), self._extents))

    def _loss(self, output: Any, targets: Any) -> torch.Tensor:
        """Return this rank's part of the loss of a micro-batch, or of each of its samples."""
        slab = tuple(part.stop - part.start for part in self._grid.slab(self._extents))
        if isinstance(targets, torch.Tensor) and tuple(targets.shape[-len(slab) :]) == slab:
            targets = slab_tensor(targets, self._joined_group(), self._extents)
            if not isinstance(output, SlabTensor):
                targets = spatial_whole(targets)
        loss = self._loss_fn(output, targets)
        if isinstance(loss, SlabTensor):
            raise SpatialCutError(
                "loss_fn: one value for each voxel is invalid: expected the mean over the samples,"
                " or one value for each sample"
            )
        return loss / self._grid.size

    def _joined_group(self) -> SpatialGroup:
        if self._group is None:
            raise RuntimeError("SpatialParallel: step before join is invalid; call join first")
        return self._group

    def _new_exchange(self) -> GradientExchange:
        """See `ReplicaStrategy`."""
        self._group = _own_group(self._grid, self._rank_group)
        return GradientExchange(
            self.model.parameters(), self._rank_group, overlap=self._overlap, log=self._log
        )


def _own_group(grid: SlabGrid, rank_group: RankGroup) -> SpatialGroup:
    """Return the group of this rank; collective, as all ranks make all groups."""
    world = range(rank_group.size)
    if len(world) % grid.size:
        raise SpatialCutError(
            f"spatial: {rank_group.size} ranks are invalid: expected a multiple of {grid.size}"
        )
    own = subgroup(rank_group, [world[i : i + grid.size] for i in world[:: grid.size]])
    return SpatialGroup(grid, own.ranks, own.process_group)


def slabs_of(
    dataset: Any, spatial: Sequence[int] | None, choice: LayoutChoice, *, keep: bool, rank: int
) -> SlabDataset | None:
    """Return the slabs of the samples, or None where ranks take whole samples.

    Args:
        dataset: of whole samples.
        spatial: ranks along each dimension that the script asks for, or None.
        choice: the layout.
        keep: keep what was read in memory.
        rank: of this process.

    Raises:
        SpatialCutError: the samples cannot be cut so.
    """
    if not choice.spatial:
        return None
    extents, count = sample_extents(dataset), choice.text.space
    remark = ""
    parts = tuple(spatial or ())
    if math.prod(parts) != count or len(parts) != len(extents):
        if parts and count > 1:
            remark = (
                f"spatial: {parts} is not for groups of {count} ranks and samples of"
                f" {'x'.join(map(str, extents))}; they are cut along the first dimension"
            )
        parts = (count, *[1] * (len(extents) - 1))
    slabs = SlabDataset(dataset, SlabGrid(parts, rank % count), extents, keep)
    if count > 1 and not slabs.reads_slabs:
        remark = remark or (
            "dataset: each rank reads whole samples and keeps its slab; with extents and"
            " read(index, slab) it would read the slab alone"
        )
    if remark and rank == 0:
        log_line(remark)
    return slabs
