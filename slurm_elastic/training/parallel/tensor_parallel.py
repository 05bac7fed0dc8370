"""Tensor parallelism as a way to share a step: replicas, each of which is a group of ranks.

Ranks 0 to N-1 are the first group, the next N the second one, and so on. The ranks of a group
compute the same samples; gradients are added up over the ranks that have the same part of the
weights, one of each group. These ranks may divide the state of the optimizer, too
(`exchange.sliced_exchange`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.exchange.own_parameter import OwnParameter
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange, keep_owned
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.gradient_noise import squared_norm
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.measure.step_profiler import SYNC, StepProfiler
from slurm_elastic.training.parallel.data_parallel import run_passes
from slurm_elastic.training.parallel.parallel_strategy import CLIP_EPSILON, LossFunction
from slurm_elastic.training.parallel.shared_layers import SharedLayers, weights_used_by_layers
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import subgroup
from slurm_elastic.training.sampler import BatchSplit, GroupSplit
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests
from slurm_elastic.training.tensor.chunk_choice import ChunkChoice


class TensorParallel:
    """Replicas whose ranks share the weights of layers; see `ParallelStrategy`.

    The constructor is collective, and replaces the parameters of divided layers.

    Args:
        model: whole, the same on all ranks.
        optimizer: of its parameters; afterwards of this rank's.
        loss_fn: of (output, targets).
        size: ranks of a group, more than one.
        styles: of the script, by name or pattern of layers.
        micro_batch: most samples through the model at once.
        rank_group: all ranks, connected.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps.
        overlap: "none", "buckets" or "auto": whether sums over a group travel in chunks.
        sliced: ranks with the same parts divide the state of the optimizer; there are several.
        log: takes one line for the job's log, on rank 0.

    Raises:
        InvalidInputError: styles that do not fit the model, or an optimizer that cannot update it.
    """

    updates_itself = False
    #: Layers also wait for other ranks, so their own times are not measured.
    measured: MeasuredLayers | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: LossFunction,
        *,
        size: int,
        styles: Mapping[str, str],
        micro_batch: int | None,
        rank_group: RankGroup,
        signals: Signals,
        step_profiler: StepProfiler,
        overlap: str = "none",
        sliced: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.model = model
        self.layout = f"{rank_group.size // size}x1"
        self.split: BatchSplit = GroupSplit(
            group_size=size, rank=rank_group.rank, world_size=rank_group.size, micro=micro_batch
        )
        self.writers = tuple(range(rank_group.size if sliced else size))
        self._loss_fn, self._rank_group, self._signals = loss_fn, rank_group, signals
        self._step_profiler = step_profiler
        self._chunks = ChunkChoice(overlap, leads=rank_group.rank == 0, log=log)
        self._shared = SharedLayers(
            [model],
            [0],
            optimizer,
            size=size,
            styles=styles,
            rank_group=rank_group,
            chunking=self._chunks.chunking,
            log=log,
        )
        self._group = self._shared.group
        world = range(rank_group.size)
        self._replicas = subgroup(rank_group, [world[i::size] for i in range(size)])
        self._parameters = [OwnParameter(p) for p in model.parameters()]
        self._sliced: SlicedExchange | None = None
        self._hook: Any = None
        if sliced:
            keep_owned(optimizer, model, rank=self._replicas.rank, ranks=self._replicas.size)
            self._hook = optimizer.register_step_post_hook(self._updated)
        self._reducer = self._new_reducer()

    @property
    def reduced_bytes(self) -> int:
        """See `ParallelStrategy`."""
        return self._reducer.bytes

    @property
    def crossing_bytes(self) -> int | None:
        """See `ParallelStrategy`: activations, too, whose way is not known."""
        return None

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
        profiler, count = self._step_profiler, batch.share.count
        self._reducer.clear()
        if self._chunks.begin():
            profiler.schedule_changed()
        profiler.begin()
        with self._signals.tolerate_ending_peers():
            total = self._passes(batch)
            profiler.enter(SYNC)
            # Of the sliced exchange each gradient is at its owner now, and nowhere else.
            self._reducer.reduce(total.new_zeros(CONTROL), count)
            requested = requested._replace(exchange=self._chunks.requested)
            # Each rank of a group has the loss of the same samples.
            sums = torch.stack([total / self._group.size, *total.new_tensor(requested).unbind()])
            self._rank_group.add_up([sums], "adding up the values of a step")
        self._chunks.end()
        profiler.passed(len(batch.share.slices), pipeline=False)
        profiler.exchanged(self._chunks.name)
        summed_loss, *agreed = sums.tolist()
        requests = StepRequests(*agreed)
        self._chunks.agree(requests.exchange)
        return summed_loss / count, requests

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        with_gradient = [p for p in self._parameters if p.grad is not None]
        parts = squared_norm([p.grad for p in with_gradient if p.divided])
        whole = squared_norm([p.grad for p in with_gradient if not p.divided])
        device = self._rank_group.device
        # What the ranks of a group do not share, each of them has.
        square = parts.to(device) + whole.to(device) / self._group.size
        sharers = self._rank_group if self._sliced else self._group
        with self._signals.tolerate_ending_peers():
            sharers.add_up([square], "adding up the norm of the gradient")
        factor = min(1.0, most / (float(square) ** 0.5 + CLIP_EPSILON))
        for parameter in with_gradient:
            parameter.grad.mul_(factor)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            self.close()
            self._rank_group.broadcast(changed)
        self._reducer = self._new_reducer()

    def close(self) -> None:
        """See `ParallelStrategy`."""
        if self._sliced:
            with self._signals.tolerate_ending_peers():
                self._sliced.close()

    def dissolve(self) -> None:
        """See `ParallelStrategy`."""
        if self._hook is not None:
            self._hook.remove()
        for parameter in self.model.parameters():
            parameter.grad = None
        self._shared.undo()

    def _new_reducer(self) -> Reducer | SlicedExchange:
        """Return the exchange that adds up gradients over the replicas."""
        if self._hook is None:
            return Reducer(self._parameters, self._replicas)
        self._sliced = SlicedExchange(self.model, self._replicas)
        return self._sliced

    def _updated(self, *_: Any) -> None:
        if self._sliced:
            self._sliced.send_weights()

    def _passes(self, batch: Batch) -> torch.Tensor:
        """Run the passes of this rank's micro-batches; return the sum of the losses."""
        with weights_used_by_layers():
            return run_passes(
                self.model,
                self._loss_fn,
                batch,
                device=self._rank_group.device,
                step_profiler=self._step_profiler,
                before_last=self._sliced.begin_last_pass if self._sliced else lambda: None,
            )
