"""Pipeline and hybrid parallelism: layers in stages, each on some ranks (`training.pipeline`).

The global batch is the same as without stages. It is divided into micro-batches, of
which replica r of a stage with n replicas takes every nth; the ranks of the first stage
load their inputs, those of the last their targets. Each replica of a stage is one rank, or
consecutive ranks that share its weights. Replicas of a stage may divide the state of the optimizer
(`exchange.sliced_exchange`).
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from slurm_elastic.training.exchange.sliced_exchange import keep_owned
from slurm_elastic.training.init_arguments import loss_of, pair
from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import LayerProfiler, MeasuredLayers, merge
from slurm_elastic.training.measure.step_profiler import SYNC, StepProfiler
from slurm_elastic.training.parallel.layout_choice import LayoutChoice
from slurm_elastic.training.parallel.parallel_strategy import LossFunction, moved
from slurm_elastic.training.parallel.shared_layers import SharedLayers
from slurm_elastic.training.pipeline import PipelineEngine, StageLayout, cut
from slurm_elastic.training.pipeline.schedules import in_flight
from slurm_elastic.training.pipeline.shared_parameters import tied_ids
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import Subgroup
from slurm_elastic.training.sampler import BatchSplit, MicroBatchSlice
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests
from slurm_elastic.training.tensor.chunk_choice import ChunkChoice

#: Micro-batches of a step, by how many the pipeline holds at once: GPipe (NeurIPS'19, section
#: 3.3) finds the time lost to filling and draining negligible from 4 on.
_FULL = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchSplit:
    """Micro-batches of a step, as a layout assigns them to ranks.

    Attributes:
        layout: of the ranks.
        rank: this one, as the layout counts.
        micro: most samples of one; None: as large as keeps the pipeline full.
        counts: this rank is the first of those that share weights.
    """

    layout: StageLayout
    rank: int
    micro: int | None = None
    counts: bool = True

    def spans(self, count: int) -> list[range]:
        """Return the samples of each micro-batch of a step; sizes differ by one at most."""
        replicas = max(map(len, self.layout.stages))
        filling = _FULL * replicas * in_flight(self.layout, 0)
        least = -(-count // self.micro) if self.micro else min(count, filling)
        number = min(count, -(-least // replicas) * replicas)
        return [range(count * m // number, count * (m + 1) // number) for m in range(number)]

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        last = self.layout.last
        slices = []
        for number, span in enumerate(self.spans(count)):
            ends = self.layout.owner(0, number), self.layout.owner(last, number)
            if self.rank in ends:
                counts = self.counts and ends[1] == self.rank
                slices.append(MicroBatchSlice(number, span, counts=counts))
        return slices


class PipelineParallel:
    """Stages with replicas; see `ParallelStrategy`.

    Args:
        layers: of the whole model, in order. Those that this rank does not hold are emptied.
        choice: layers and ranks of each stage.
        loss_fn: of (output, targets).
        schedule: "1f1b", "gpipe" or "pipedream".
        ties: sets of names of parameters that are one.
        micro_batch: most samples through a stage at once.
        rank_group: all ranks.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps.
        earlier: an earlier profile of the layers.
        optimizer: of the parameters of all layers; afterwards of those that this rank holds.
        styles: of the script, for layers that ranks share.
        overlap: "none", "buckets" or "auto": whether sums over ranks that share weights travel in
            chunks.
        sliced: replicas of a stage divide the state of the optimizer.
        log: takes one line for the job's log, on rank 0.

    Raises:
        InvalidInputError: styles that do not fit the model, or an optimizer that cannot update
            shared layers.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, torch.nn.Module]],
        choice: LayoutChoice,
        loss_fn: LossFunction,
        *,
        schedule: str,
        ties: Sequence[Sequence[str]],
        micro_batch: int | None,
        rank_group: RankGroup,
        signals: Signals,
        step_profiler: StepProfiler,
        optimizer: torch.optim.Optimizer,
        earlier: MeasuredLayers | None = None,
        styles: Mapping[str, str] | None = None,
        overlap: str = "none",
        sliced: bool = False,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        layout, lengths = choice.layout, choice.lengths or (len(layers),)
        rank, part = divmod(rank_group.rank, choice.tensor)
        self._micro_batch_split = MicroBatchSplit(
            layout=layout, rank=rank, micro=micro_batch, counts=part == 0
        )
        self.split: BatchSplit = self._micro_batch_split
        self.layout = str(choice.text)
        writing = {0, *(ranks[0] for ranks in layout.stages)}
        if sliced:
            writing = set(range(layout.world_size))
        self.writers = tuple(
            rank * choice.tensor + part for rank in sorted(writing) for part in range(choice.tensor)
        )
        self._rank = rank
        self.updates_itself = schedule == "pipedream"
        self._pipeline, self._loss_fn, self._schedule, self._ties = layout, loss_fn, schedule, ties
        self._rank_group, self._signals, self._step_profiler = rank_group, signals, step_profiler
        stages = cut(layers, lengths)
        held = layout.held_by(rank)
        self._stages = {stage: stages[stage] for stage in held}
        ends = [sum(lengths[:stage]) for stage in range(len(lengths) + 1)]
        own_layers = [layer for stage in held for layer in layers[ends[stage] : ends[stage + 1]]]
        self.model: torch.nn.Module = torch.nn.Sequential(OrderedDict(own_layers)).to(
            rank_group.device
        )
        self._emptied = _empty([module for _, module in layers], keep=self.model)
        _remove_others(optimizer, self.model)
        self._shared: SharedLayers | None = None
        overlap = overlap if choice.tensor > 1 else "none"
        self._chunks = ChunkChoice(overlap, leads=rank_group.rank == 0, log=log)
        if choice.tensor > 1:
            self._shared = SharedLayers(
                stages,
                held,
                optimizer,
                size=choice.tensor,
                styles=styles or {},
                tied=[name for names in ties for name in names],
                rank_group=rank_group,
                chunking=self._chunks.chunking,
                log=log,
            )
        self._sliced = sliced
        self._hooks: list[Any] = []
        if sliced:
            self._divide_optimizer(optimizer)
        self._engine: PipelineEngine | None = None
        self._names = [name for name, _ in layers]
        self.measured = earlier
        # Only consecutive layers can be measured by the tensors that pass between them, and only if
        # they do not wait for weights.
        can_profile = len(held) == 1 and earlier is None and self._shared is None and not sliced
        self._profiler = LayerProfiler(own_layers if can_profile else [], device=rank_group.device)
        self._profile_sent = False

    @property
    def reduced_bytes(self) -> int:
        """See `ParallelStrategy`."""
        return self._engine.reduced_bytes if self._engine else 0

    @property
    def crossing_bytes(self) -> int | None:
        """See `ParallelStrategy`: not known, as stages also send activations."""
        return None

    def report_fields(self, batch: int) -> dict[str, int]:
        """See `ParallelStrategy`."""
        replicas = max(map(len, self._pipeline.stages))
        number = len(self._micro_batch_split.spans(batch))
        return {
            "micro_batch": -(-batch // replicas),
            "accumulation": 0,
            "micro_batches": -(-number // replicas),
        }

    def join(self, *, fresh: bool) -> None:
        """See `ParallelStrategy`."""
        del fresh  # the engine gives replicas the values of the first in any case
        self._start()

    def step(
        self, batch: Batch, requested: StepRequests, update: Callable[[], None]
    ) -> tuple[float, StepRequests]:
        """See `ParallelStrategy`."""
        count = batch.share.count
        sizes = [len(span) for span in self._micro_batch_split.spans(count)]
        loaded: list[Any] = [(None, (None, size)) for size in sizes]
        for micro_batch, part in zip(batch.share.slices, batch.parts, strict=True):
            inputs, targets = pair(moved(part, self._rank_group.device))
            loaded[micro_batch.number] = inputs, (targets, sizes[micro_batch.number])
        self._profile()
        if self._chunks.begin():
            self._step_profiler.schedule_changed()
        self._step_profiler.begin()
        self._step_profiler.enter(SYNC)
        with self._signals.tolerate_ending_peers():
            engine = self._started()
            if self.updates_itself:
                means = engine.run(loaded, update, sizes=sizes)
                loss = sum(m * size for m, size in zip(means, sizes, strict=True)) / count
            else:
                loss = engine.step(loaded, sizes=sizes, divisor=count)
            requested = requested._replace(exchange=self._chunks.requested)
            agreed = StepRequests(*engine.total(requested))
        self._chunks.end()
        self._chunks.agree(agreed.exchange)
        self._step_profiler.exchanged(self._chunks.name)
        held = self._pipeline.held_by(self._rank)
        shares = (self._pipeline.share(stage, self._rank, len(sizes)) for stage in held)
        self._step_profiler.passed(sum(map(len, shares)), pipeline=True)
        return loss, agreed

    def clip(self, most: float) -> None:
        """See `ParallelStrategy`."""
        with self._signals.tolerate_ending_peers():
            self._started().clip_gradients(most)

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """See `ParallelStrategy`."""
        del changed  # a new engine gives replicas the buffers of the first
        self.close()
        with self._signals.tolerate_ending_peers():
            self._start()

    def close(self) -> None:
        """See `ParallelStrategy`."""
        if self._engine is not None:
            with self._signals.tolerate_ending_peers():
                self._engine.close()
            self._engine = None

    def dissolve(self) -> None:
        """See `ParallelStrategy`."""
        for hook in self._hooks:
            hook.remove()
        if self._shared is not None:
            self._shared.undo()
        for parameter in self.model.parameters():
            parameter.grad = None
        for tensor, shape in self._emptied:
            tensor.data = tensor.data.new_empty(shape)

    def _divide_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Leave to the optimizer what this rank owns of each stage that has several replicas."""
        tied = tied_ids(self._stages, self._ties)
        for number, stage in self._stages.items():
            ranks = sorted(self._pipeline.stages[number])
            rank = ranks.index(self._rank)
            keep_owned(optimizer, stage, rank=rank, ranks=len(ranks), excluded=tied)
        self._hooks = [
            optimizer.register_step_post_hook(lambda *_: self._started().send_weights()),
            self.model.register_state_dict_pre_hook(self._receive_weights),
        ]

    def _receive_weights(self, *_: Any) -> None:
        if self._engine is not None:
            with self._signals.tolerate_ending_peers():
                self._engine.receive_weights()

    def _profile(self) -> None:
        """Measure the layers held here; rank 0 merges the profiles of all ranks."""
        self._profiler.begin()
        key = (self._rank_group.prefix + "profile/{}").format
        if self._profiler.done and not self._profile_sent and (profile := self._profiler.measured):
            self._profile_sent = True
            self._rank_group.publish(key(self._rank_group.rank), json.dumps(profile.state()))
        if self._rank_group.rank == 0 and self._profile_sent and self.measured is None:
            messages = [
                self._rank_group.wait_for(key(rank), 0.0) for rank in range(self._rank_group.size)
            ]
            parts = [MeasuredLayers.restored(json.loads(text)) for text in messages if text]
            self.measured = merge([part for part in parts if part], self._names)

    def _start(self) -> None:
        self._engine = PipelineEngine(
            self._stages,
            self._pipeline,
            schedule=self._schedule,
            loss=self._mean if self.updates_itself else self._sum,
            ties=self._ties,
            enter=self._step_profiler.enter,
            device=self._rank_group.device,
            tensor_group=self._shared.group if self._shared else None,
            make_subgroup=partial(Subgroup, self._rank_group) if self._sliced else None,
        )

    def _started(self) -> PipelineEngine:
        if self._engine is None:
            raise RuntimeError("PipelineParallel: step before join is invalid; call join first")
        return self._engine

    def _sum(self, output: Any, targets: Any) -> torch.Tensor:
        targets, size = targets
        loss = loss_of(self._loss_fn, output, targets)
        return loss.sum() if loss.dim() else loss * size

    def _mean(self, output: Any, targets: Any) -> torch.Tensor:
        return loss_of(self._loss_fn, output, targets[0]).mean()


def _remove_others(optimizer: torch.optim.Optimizer, held: torch.nn.Module) -> None:
    """Remove parameters from the optimizer that this rank does not hold."""
    held_ids = {id(p) for p in held.parameters()}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in held_ids]


def _empty(
    modules: Sequence[torch.nn.Module], *, keep: torch.nn.Module
) -> list[tuple[torch.Tensor, torch.Size]]:
    """Free the memory of the tensors that this rank does not hold; return them and their shapes.

    Buffers that are in no checkpoint stay: another rank may need their values later.
    """
    kept_ids = {id(t) for t in (*keep.parameters(), *keep.buffers())}
    emptied = []
    for module in modules:
        for tensor in module.state_dict(keep_vars=True).values():
            if isinstance(tensor, torch.Tensor) and id(tensor) not in kept_ids:
                kept_ids.add(id(tensor))
                emptied.append((tensor, tensor.shape))
                tensor.data = tensor.data.new_empty(0)
    return emptied
