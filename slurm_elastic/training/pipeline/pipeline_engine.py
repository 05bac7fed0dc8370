"""A model in stages, on one rank or many: the engine that drives micro-batches through.

    stages = cut(layers, [3, 2])                    # (name, module) pairs, 2 stages
    layout = Layout.of(2, 1)                        # the first on ranks 0 and 1
    engine = PipelineEngine({s: stages[s] for s in layout.held_by(rank)}, layout,
                            loss=lambda out, targets: cross_entropy(out, targets))
    optimizer = AdamW(engine.parameters())
    for batch in batches:                           # 8 pairs (inputs, targets)
        loss = engine.step(batch)
        optimizer.step()

"gpipe" and "1f1b" compute what one rank would, up to rounding. "pipedream" does not
wait for the pipeline to drain between updates: faster, with other numerics (stashing.py,
docs/pipeline_runtime.md). It has `run` instead of `step`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

from slurm_elastic.training.pipeline.schedules import MicroBatchStep, PassKind, in_flight, order
from slurm_elastic.training.pipeline.shared_parameters import SharedParameters
from slurm_elastic.training.pipeline.stage_groups import RankDescription, StageGroups
from slurm_elastic.training.pipeline.stage_layout import LayoutError, StageLayout
from slurm_elastic.training.pipeline.stages import Loss, PlainStage, Stage
from slurm_elastic.training.pipeline.weight_stashing import StashedStage, newest, synchronised

#: How long a rank waits for another before it gives up.
TIMEOUT_S = 600.0


class PipelineEngine:
    """This rank's part of a pipeline. Making one is collective, and so are its methods.

    All ranks pass the same arguments, except for `stage_modules`. Parameters of replicas and
    tied ones begin equal: they take the values of the first rank that holds them.

    Args:
        stage_modules: the stages that this rank holds, by number; each takes one value (a
            tensor or a tuple of tensors) and gives one. No two share a parameter's name.
        layout: which ranks hold which stage.
        schedule: "gpipe", "1f1b" or "pipedream" (schedules.py).
        micro_batches: of a step, over all replicas; None: as many as each batch has.
        loss: of (last stage's output, targets): a scalar. A step's loss is the sum over its
            micro-batches, divided by `divisor`.
        ties: sets of names of parameters that are one, whichever stages they are in.
        vertical_sync: pipedream's option (stashing.py).
        enter: is told what begins: "forward", "backward", "optimizer", or "sync" for whatever
            lies between them: waiting, sending, reducing.
        device: where modules and data are.
        timeout_s: how long a rank waits for another.

    Raises:
        LayoutError: arguments that cannot be, or that differ between ranks; on all ranks.
        LinkError: another rank is gone.
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
    ) -> None:
        self._device = torch.device(device)
        self._groups = StageGroups(layout, device=self._device, timeout_s=timeout_s)
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
                complaint=self._complaint(stage_modules, ties, vertical_sync=vertical_sync),
            )
        )
        self._modules = {stage: stage_modules[stage] for stage in self._held}
        self._next, self._previous = self._groups.links()
        self._shared = SharedParameters(
            self._modules, self._groups, ties=ties, holdings=holdings, device=self._device
        )
        self._stages: dict[int, Stage] = {
            stage: self._stage(stage, vertical_sync=vertical_sync) for stage in self._held
        }
        # Nobody works, and perhaps fails, while another still waits for a group to form.
        self._groups.total([0.0])

    @property
    def rank(self) -> int:
        """This one."""
        return self._groups.rank

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages held here."""
        return self._held

    @property
    def reduced_bytes(self) -> int:
        """What the reduction of a batch's gradients carries from this rank."""
        return self._shared.bytes

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The parameters held here, by global name."""
        return {n: p for module in self._modules.values() for n, p in module.named_parameters()}

    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters held here, for an optimizer."""
        return list(self.named_parameters().values())

    def step(
        self,
        batch: Sequence[Any],
        *,
        sizes: Sequence[Hashable] | None = None,
        divisor: float | None = None,
    ) -> float:
        """Take a batch forward and backward; the gradients are then those of the whole batch.

        Args:
            batch: of each micro-batch (inputs, targets); a rank reads only those it takes,
                inputs on the first stage, targets on the last.
            sizes: of each micro-batch, equal where shapes are; None: all have the same shapes.
            divisor: of loss and gradients; None: the number of micro-batches.

        Returns:
            The loss, on all ranks.

        Raises:
            LayoutError: another number of micro-batches than promised, or sizes do not fit.
            LinkError: another rank is gone, or shapes differ within a size.
        """
        if self._asynchronous:
            raise LayoutError("schedule pipedream has no steps: use run")
        if self._count is not None and len(batch) != self._count:
            raise LayoutError(f"a batch of {len(batch)} micro-batches, not of {self._count}")
        losses = self._drive(batch, sizes, update=None)
        divisor = float(len(batch)) if divisor is None else divisor
        self._shared.add_up(divisor)
        return self._groups.total([sum(losses)])[0] / divisor

    def run(
        self,
        minibatches: Sequence[Any],
        update: Callable[[], object],
        *,
        sizes: Sequence[Hashable] | None = None,
    ) -> list[float]:
        """PipeDream: take minibatches through, each an update of its own, and drain.

        Args:
            minibatches: as `batch` of `step`; longer rows drain less often.
            update: changes the parameters held here by their gradients (optimizer.step, the
                learning rate's schedule, ...). A stage with r replicas updates once for every
                r minibatches, by the mean of their gradients; fewer in the last round.
            sizes: as in `step`.

        Returns:
            The loss of each minibatch, on all ranks.

        Raises:
            LayoutError: another schedule; or sizes do not fit.
            LinkError: as in `step`.
        """
        if not self._asynchronous:
            raise LayoutError(f"schedule {self._schedule} has steps: use step")
        return self._groups.total(self._drive(minibatches, sizes, update=update))

    def clip_gradients(self, most: float) -> float:
        """Scale the gradients of a step so that their norm over all stages is at most this.

        Returns:
            The norm before, on all ranks.

        Raises:
            LayoutError: schedule pipedream, whose stages update at different times.
            LinkError: another rank is gone.
        """
        if self._asynchronous:
            raise LayoutError("schedule pipedream has no gradient of the whole model to clip")
        norm = self._shared.norm()
        if norm > most:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(most / norm)
        return norm

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks.

        Raises:
            LinkError: another rank is gone.
        """
        return self._groups.total(values)

    def close(self) -> None:
        """End the engine's groups, on all ranks; torch's default group stays."""
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
            raise LayoutError(f"{len(sizes)} sizes for {count} micro-batches; give each its own")
        for link in self._links():
            link.begin(sizes)
        for stage in self._stages.values():
            stage.begin()
        losses: list[torch.Tensor | float] = [0.0] * count
        for action in order(self._layout, self._schedule, rank=self.rank, count=count):
            match action.kind:
                case PassKind.FORWARD:
                    self._forward(action, batch, losses)
                case PassKind.BACKWARD:
                    self._backward(action)
                case PassKind.UPDATE:
                    assert update is not None
                    self._update(action, count, update)
        for link in self._links():
            # What was sent has to have arrived before its memory is used again.
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
            # That it came means that the peer has done what comes before in its order.
            replicas = len(self._layout.stages[stage - 1])
            before = in_flight(self._layout, stage - 1) * replicas
            if self._asynchronous:
                link.settle(micro - before)
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
            mine=lambda index: ranks.index(self.rank) + index * len(ranks),
            version=lambda micro: rule(layout, stage, micro),
            copies=vertical_sync or in_flight(layout, stage) > 1,
        )

    def _links(self) -> list[Any]:
        following = [link for peers in self._next.values() for link in peers.values()]
        former = [link for peers in self._previous.values() for link in peers.values()]
        return [*following, *former]

    def _complaint(
        self,
        modules: Mapping[int, torch.nn.Module],
        ties: Sequence[Sequence[str]],
        *,
        vertical_sync: bool,
    ) -> str:
        """Why this rank cannot take part; "" if it can."""
        if set(modules) != set(self._held):
            return (
                f"has modules for stages {sorted(modules)}, the layout puts {[*self._held]} there"
            )
        try:
            order(self._layout, self._schedule, rank=self.rank, count=1)
        except LayoutError as error:
            return str(error)
        if self._count is not None and self._count < 1:
            return f"{self._count} micro-batches; a step needs at least one"
        if self._asynchronous and ties:
            return (
                f"{' and '.join(ties[0])} are tied, which pipedream cannot keep equal, as stages "
                "update at different times; use 1f1b"
            )
        if vertical_sync and not self._asynchronous:
            return f"vertical sync belongs to pipedream, not to {self._schedule}"
        return ""


def _described(module: torch.nn.Module) -> dict[str, tuple[str, tuple[int, ...], bool]]:
    return {
        name: (str(p.dtype)[6:], tuple(p.shape), bool(p.requires_grad))
        for name, p in module.named_parameters(remove_duplicate=False)
    }
