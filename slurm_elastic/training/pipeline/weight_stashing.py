"""PipeDream's weight stashing: backward passes use the weights of their forward passes.

In an asynchronous pipeline weights change between the forward and the backward pass of
a micro-batch. A stage therefore keeps the versions that micro-batches in flight were
computed with (PipeDream, SOSP'19, section 3.3):

    w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t))

With vertical sync a micro-batch uses, on every stage, the version that the first stage
had when it entered:

    w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t-n+1))

Which version that is follows from the schedule, so each rank computes it and nothing
is sent. With unequal replicas, whose updates contain unequal numbers of micro-batches,
it is the newest one that contains only those of the first stage's version (our
definition). Only parameters are kept: buffers, such as BatchNorm's running statistics,
are the newest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slurm_elastic.training.pipeline.schedules import in_flight
from slurm_elastic.training.pipeline.stage_layout import StageLayout
from slurm_elastic.training.pipeline.stages import Loss, differentiable, layer_errors, scalar


def newest(layout: StageLayout, stage: int, micro: int) -> int:
    """Return the version of a stage's weights at this micro-batch's forward pass.

    >>> [newest(StageLayout.of(1, 1, 1), 0, micro) for micro in range(5)]
    [0, 0, 0, 1, 2]
    >>> [newest(StageLayout.of(1, 1, 1), 2, micro) for micro in range(5)]
    [0, 1, 2, 3, 4]
    """
    round_ = micro // len(layout.stages[stage])
    return max(0, round_ - in_flight(layout, stage) + 1)


def synchronised(layout: StageLayout, stage: int, micro: int) -> int:
    """Return the version of a stage's weights for this micro-batch with vertical sync.

    >>> [synchronised(StageLayout.of(1, 1, 1), 2, micro) for micro in range(5)]
    [0, 0, 0, 1, 2]
    >>> [synchronised(StageLayout.of(2, 1), 1, micro) for micro in range(7)]
    [0, 0, 0, 0, 2, 2, 4]
    """
    contained = newest(layout, 0, micro) * len(layout.stages[0])
    return contained // len(layout.stages[stage])


class StashedStage:
    """A stage whose weights change while micro-batches are in flight.

    Its optimizer updates the module's parameters; passes go through copies of them.

    Args:
        module: the layers.
        loss: on the last stage.
        own_micro_batch: returns the nth micro-batch of this replica.
        version: returns the version of the weights that a micro-batch uses.
        copies: False where no version is needed after an update; passes then use the
            parameters themselves.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Loss | None,
        *,
        own_micro_batch: Callable[[int], int],
        version: Callable[[int], int],
        copies: bool,
    ) -> None:
        self.module = module
        self._loss = loss
        self._own_micro_batch, self._version, self._copies = own_micro_batch, version, copies
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        self._in_flight: dict[int, tuple[Any, Any]] = {}
        self._newest = self._begun = 0

    @property
    def versions(self) -> tuple[int, ...]:
        """Versions that are kept."""
        return tuple(self._versions)

    def begin(self) -> None:
        """See `Stage`: the present weights become version 0."""
        self._in_flight.clear()
        self._versions.clear()
        self._newest = self._begun = 0
        self._versions[0] = self._snapshot()

    def forward(self, micro: int, value: Any, targets: Any) -> Any:
        """See `Stage`."""
        self._begun += 1
        weights = self._versions[self._version(micro)]
        with layer_errors(self.module, value):
            output = torch.func.functional_call(self.module, weights, (value,))
        if self._loss is not None:
            output = scalar(self._loss(output, targets))
        self._in_flight[micro] = (value, output)
        return output

    def backward(self, micro: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Stage`: the gradients of this micro-batch, at the weights of its forward pass."""
        value, output = self._in_flight.pop(micro)
        inputs, outputs = differentiable(value), differentiable(output)
        weights = self._versions[self._version(micro)]
        names = [name for name, weight in weights.items() if weight.requires_grad]
        computed: Sequence[Any] = [None] * (len(names) + len(inputs))
        if outputs and computed:
            computed = torch.autograd.grad(
                outputs,
                [weights[name] for name in names] + inputs,
                None if self._loss else list(gradients),
                allow_unused=True,
            )
        self.clear()
        parameters = dict(self.module.named_parameters())
        for name, gradient in zip(names, computed[: len(names)], strict=True):
            parameters[name].grad = gradient
        back = computed[len(names) :]
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, back, strict=True)]

    def clear(self) -> None:
        """Delete the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def updated(self) -> None:
        """Keep the changed parameters as a new version, and drop those that are not needed."""
        self._newest += 1
        self._versions[self._newest] = self._snapshot()
        oldest = min(
            [
                self._version(self._own_micro_batch(self._begun)),
                *map(self._version, self._in_flight),
            ]
        )
        for version in [v for v in self._versions if v < oldest]:
            del self._versions[version]

    def end(self) -> None:
        """See `Stage`: no version is needed."""
        self._versions.clear()

    def _snapshot(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, parameter in self.module.named_parameters():
            # `data`: the same memory, but autograd does not check for changes in place.
            weight = parameter.detach().clone() if self._copies else parameter.data
            weights[name] = weight.requires_grad_(parameter.requires_grad)
        return weights
