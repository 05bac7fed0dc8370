"""Training steps of a model in stages, on one rank or several.

    stages = cut(layers, [3, 2])                    # (name, module) pairs, 2 stages
    layout = StageLayout.of(2, 1)                   # the first on ranks 0 and 1
    engine = PipelineEngine({s: stages[s] for s in layout.held_by(rank)}, layout,
                            loss=lambda out, targets: cross_entropy(out, targets))
    optimizer = AdamW(engine.parameters())
    for batch in batches:                           # 8 pairs (inputs, targets)
        loss = engine.step(batch)
        optimizer.step()

"gpipe" and "1f1b" give the result of a single rank, up to rounding. "pipedream" does not
drain the pipeline between updates: it is faster, with other numerics (weight_stashing.py,
docs/pipeline_runtime.md). It has `run` instead of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from slurm_elastic.training.pipeline.schedules import MicroBatchStep, PassKind, in_flight, order
from slurm_elastic.training.pipeline.shared_parameters import MakeSubgroup, SharedParameters
from slurm_elastic.training.pipeline.stage_groups import RankDescription, StageGroups
from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout
from slurm_elastic.training.pipeline.stages import Loss, PlainStage, Stage
from slurm_elastic.training.pipeline.weight_stashing import StashedStage, newest, synchronised
from slurm_elastic.training.ranks.subgroup import Subgroup

#: Seconds for which a rank waits for another before it gives up.
TIMEOUT_S = 600.0


class PipelineEngine:
    """This rank's part of a pipeline; the constructor and all methods are collective.

    All ranks pass the same arguments, except for `stage_modules`. Parameters of replicas and
    tied ones begin equal: they take the values of the first rank that holds them.

    Args:
        stage_modules: the stages that this rank holds, by number; each takes one value (a
            tensor or a tuple of tensors) and returns one. Parameter names are unique.
        layout: the ranks of each stage.
        schedule: "gpipe", "1f1b" or "pipedream" (schedules.py).
        micro_batches: of a step, over all replicas; None: as many as each batch has.
        loss: of (last stage's output, targets): a scalar. A step's loss is the sum over its
            micro-batches, divided by `divisor`.
        ties: sets of names of parameters that are one, in any stages.
        vertical_sync: pipedream's option (weight_stashing.py).
        enter: called with what begins: "forward", "backward", "optimizer", "sync" for waiting
            and sending, or "reduce" for the reduction of gradients.
        device: of modules and data.
        timeout_s: how long a rank waits for another.
        tensor_group: ranks that share the weights of this stage, as of `StageGroups`.
        make_subgroup: as of `SharedParameters`. Where replicas divide the state of the optimizer,
            `send_weights` follows each update. Not with pipedream.

    Raises:
        LayoutError: invalid arguments, or such that differ between ranks; on all ranks.
        LinkError: another rank has ended.
    """

    def __init__(
        self,
        stage_modules: Mapping[int, torch.nn.Module],
        layout: StageLayout,
        *,
        schedule: str = "1f1b",
        micro_batches: int | None = None,
        loss: Loss,
        ties: Iterable[Sequence[str]] = (),
        vertical_sync: bool = False,
        enter: Callable[[str], None] = lambda _: None,
        device: torch.device | str = "cpu",
        timeout_s: float = TIMEOUT_S,
        tensor_group: Subgroup | None = None,
        make_subgroup: MakeSubgroup | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._groups = StageGroups(
            layout, device=self._device, timeout_s=timeout_s, tensor_group=tensor_group
        )
        self._layout, self._schedule = layout, schedule
        self._count, self._loss, self._enter = micro_batches, loss, enter
        self._asynchronous = schedule == "pipedream"
        self._held = layout.held_by(self.rank)
        ties = tuple(tuple(names) for names in ties)
        holdings = self._groups.compare(
            RankDescription(
                agreed={
                    "layout": str(layout.stages),
                    "schedule": schedule,
                    "micro_batches": str(micro_batches),
                    "ties": str(ties),
                    "vertical_sync": str(vertical_sync),
                },
                parameters={s: _described(m) for s, m in stage_modules.items()},
                error=self._argument_error(stage_modules, ties, vertical_sync=vertical_sync),
            )
        )
        self._modules = {stage: stage_modules[stage] for stage in self._held}
        self._next, self._previous = self._groups.links()
        self._shared = SharedParameters(
            self._modules,
            self._groups,
            ties=ties,
            holdings=holdings,
            device=self._device,
            make_subgroup=make_subgroup,
        )
        self._stages: dict[int, Stage] = {
            stage: self._stage(stage, vertical_sync=vertical_sync) for stage in self._held
        }
        # No rank starts, and perhaps fails, while another still waits for a group to form.
        self._groups.total([0.0])

    @property
    def rank(self) -> int:
        """This one."""
        return self._groups.rank

    @property
    def stages(self) -> tuple[int, ...]:
        """Stages held here."""
        return self._held

    @property
    def reduced_bytes(self) -> int:
        """Bytes that this rank contributes to the reduction of a batch's gradients."""
        return self._shared.bytes

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters held here, by global name."""
        return {n: p for module in self._modules.values() for n, p in module.named_parameters()}

    def parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters held here, for an optimizer."""
        return list(self.named_parameters().values())

    def step(
        self,
        batch: Sequence[Any],
        *,
        sizes: Sequence[Hashable] | None = None,
        divisor: float | None = None,
    ) -> float:
        """Compute loss and gradients of a whole batch.

        Args:
            batch: (inputs, targets) of each micro-batch; only its own ones are read by a rank,
                inputs on the first stage, targets on the last.
            sizes: of each micro-batch, equal where shapes are; None: all have the same shapes.
            divisor: of loss and gradients; None: the number of micro-batches.

        Returns:
            The loss, on all ranks.

        Raises:
            LayoutError: another number of micro-batches than `micro_batches`, or of sizes.
            LinkError: another rank has ended, or shapes differ within a size.
        """
        if self._asynchronous:
            raise LayoutError(
                "step: schedule pipedream is invalid: expected a synchronous one; use run"
            )
        if self._count is not None and len(batch) != self._count:
            raise LayoutError(
                f"batch: {len(batch)} micro-batches is invalid: expected {self._count}"
            )
        losses = self._drive(batch, sizes, update=None)
        divisor = float(len(batch)) if divisor is None else divisor
        self._enter("reduce")
        self._shared.add_up(divisor)
        own = sum(losses) if self._groups.counts else 0.0
        total = self._groups.total([own])[0]  # waits for the reductions of all stages
        self._enter("sync")
        return total / divisor

    def run(
        self,
        minibatches: Sequence[Any],
        update: Callable[[], object],
        *,
        sizes: Sequence[Hashable] | None = None,
    ) -> list[float]:
        """Train on minibatches by PipeDream's schedule, one update for each, then drain.

        Args:
            minibatches: as `batch` of `step`; longer sequences drain less often.
            update: changes the parameters held here by their gradients (optimizer.step, the
                learning rate's schedule, ...). A stage with r replicas updates once for every
                r minibatches, by the mean of their gradients; fewer in the last round.
            sizes: as in `step`.

        Returns:
            The loss of each minibatch, on all ranks.

        Raises:
            LayoutError: another schedule, or another number of sizes.
            LinkError: as in `step`.
        """
        if not self._asynchronous:
            raise LayoutError(
                f"run: schedule {self._schedule} is invalid: expected pipedream; use step"
            )
        return self._groups.total(self._drive(minibatches, sizes, update=update))

    def clip_gradients(self, most: float) -> float:
        """Scale the gradients of a step so that their norm over all stages is at most this.

        Returns:
            The norm before, on all ranks.

        Raises:
            LayoutError: schedule pipedream, whose stages update at different times.
            LinkError: another rank has ended.
        """
        if self._asynchronous:
            raise LayoutError(
                "clip_gradients: schedule pipedream is invalid: it has no gradient of the whole"
                " model; use 1f1b, or do not clip"
            )
        norm = self._shared.norm()
        if norm > most:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(most / norm)
        return norm

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of the values over all ranks.

        Raises:
            LinkError: another rank has ended.
        """
        return self._groups.total(values)

    def send_weights(self) -> None:
        """Begin to send what this rank has updated to the replicas that do not."""
        self._shared.send_weights()

    def receive_weights(self) -> None:
        """Wait for all weights that other replicas have updated.

        Raises:
            LinkError: another rank has ended.
        """
        self._shared.receive_weights()

    def close(self) -> None:
        """End the engine's process groups; torch's default group stays."""
        self._shared.close()
        self._groups.leave()

    def _drive(
        self,
        batch: Sequence[Any],
        sizes: Sequence[Hashable] | None,
        *,
        update: Callable[[], object] | None,
    ) -> list[float]:
        count = len(batch)
        sizes = [None] * count if sizes is None else sizes
        if len(sizes) != count:
            raise LayoutError(
                f"sizes: {len(sizes)} values is invalid: expected {count}, one per micro-batch"
            )
        for link in self._links():
            link.begin(sizes)
        for stage in self._stages.values():
            stage.begin()
        losses: list[torch.Tensor | float] = [0.0] * count
        actions = list(order(self._layout, self._schedule, rank=self.rank, count=count))
        last = {a.stage: a for a in actions if a.kind is PassKind.BACKWARD}
        for action in actions:
            match action.kind:
                case PassKind.FORWARD:
                    self._forward(action, batch, losses)
                case PassKind.BACKWARD:
                    if action is last[action.stage]:
                        self._shared.begin_last_pass(action.stage)
                    self._backward(action)
                case PassKind.UPDATE:
                    assert update is not None
                    self._update(action, count, update)
        for link in self._links():
            # Sent tensors must have arrived before their memory is used again.
            link.begin(())
        for stage in self._stages.values():
            stage.end()
        return [float(loss) for loss in losses]

    def _forward(
        self, action: MicroBatchStep, batch: Sequence[Any], losses: list[torch.Tensor | float]
    ) -> None:
        _, stage, micro = action
        if stage == 0:
            value = batch[micro][0]
        else:
            peer = self._layout.owner(stage - 1, micro)
            link = self._previous[stage][peer]
            value = link.receive(micro)
            # The peer has sent this, so it has received the gradients that precede it in its order.
            replicas = len(self._layout.stages[stage - 1])
            offset = in_flight(self._layout, stage - 1) * replicas
            if self._asynchronous:
                link.settle(micro - offset)
        last = stage == self._layout.last
        self._enter("forward")
        output = self._stages[stage].forward(micro, value, batch[micro][1] if last else None)
        self._enter("sync")
        if last:
            losses[micro] = output.detach()
        else:
            self._next[stage][self._layout.owner(stage + 1, micro)].send(micro, output)

    def _backward(self, action: MicroBatchStep) -> None:
        _, stage, micro = action
        gradients: list[torch.Tensor] = []
        if stage < self._layout.last:
            gradients = self._next[stage][self._layout.owner(stage + 1, micro)].gradients(micro)
        self._enter("backward")
        back = self._stages[stage].backward(micro, gradients)
        self._enter("sync")
        if stage > 0:
            self._previous[stage][self._layout.owner(stage - 1, micro)].send_back(micro, back)

    def _update(self, action: MicroBatchStep, count: int, update: Callable[[], object]) -> None:
        stage = self._stages[action.stage]
        assert isinstance(stage, StashedStage)
        replicas = len(self._layout.stages[action.stage])
        members = min(replicas, count - action.micro * replicas)
        if self.rank not in self._layout.stages[action.stage][:members]:
            stage.clear()
        self._enter("reduce")
        self._shared.add_up_stage(action.stage, members)
        self._enter("optimizer")
        update()
        self._enter("sync")
        stage.updated()

    def _stage(self, stage: int, *, vertical_sync: bool) -> Stage:
        loss = self._loss if stage == self._layout.last else None
        if not self._asynchronous:
            return PlainStage(self._modules[stage], loss)
        layout, rule = self._layout, synchronised if vertical_sync else newest
        ranks = layout.stages[stage]
        return StashedStage(
            self._modules[stage],
            loss,
            own_micro_batch=lambda index: ranks.index(self.rank) + index * len(ranks),
            version=lambda micro: rule(layout, stage, micro),
            copies=vertical_sync or in_flight(layout, stage) > 1,
        )

    def _links(self) -> list[Any]:
        following = [link for peers in self._next.values() for link in peers.values()]
        former = [link for peers in self._previous.values() for link in peers.values()]
        return [*following, *former]

    def _argument_error(
        self,
        modules: Mapping[int, torch.nn.Module],
        ties: Sequence[Sequence[str]],
        *,
        vertical_sync: bool,
    ) -> str:
        """Return an error about this rank's arguments; "": they are valid."""
        if set(modules) != set(self._held):
            return (
                f"stage_modules: stages {sorted(modules)} is invalid: expected {[*self._held]}, as "
                "the layout says"
            )
        try:
            order(self._layout, self._schedule, rank=self.rank, count=1)
        except LayoutError as error:
            return str(error)
        if self._count is not None and self._count < 1:
            return f"micro_batches: {self._count} is invalid: expected at least 1"
        if self._asynchronous and ties:
            return (
                f"ties: {' and '.join(ties[0])} is invalid: expected none with pipedream, whose "
                "stages update at different times; use 1f1b"
            )
        if vertical_sync and not self._asynchronous:
            return (
                f"vertical_sync: True is invalid: expected False with schedule {self._schedule}; "
                "only pipedream has it"
            )
        return ""


def _described(module: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...], bool]]:
    return {
        name: (str(p.dtype)[6:], tuple(p.shape), bool(p.requires_grad))
        for name, p in module.named_parameters(remove_duplicate=False)
    }
