"""PipeDream's weight stashing: each micro-batch goes back through the weights it came by.

In an asynchronous pipeline weights change between the forward and the backward pass of
a micro-batch. A stage therefore keeps the versions that micro-batches in flight were
computed with (PipeDream, SOSP'19, section 3.3):

    w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t))

With vertical sync a micro-batch uses, on every stage, the version that the first stage
had when it entered:

    w(t+1) = w(t) - lr * grad f(w_1(t-n+1), ..., w_n(t-n+1))

Which version that is follows from the schedule, so it is worked out on each rank and
does not travel. With unequal replicas, whose updates take in unequal numbers of
micro-batches, it is the newest one that has taken in none that the first stage's has
not (our definition). Only parameters are kept: buffers, such as BatchNorm's running
statistics, are the newest ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from slurm_elastic.training.pipeline.schedules import in_flight
from slurm_elastic.training.pipeline.stage_layout import StageLayout
from slurm_elastic.training.pipeline.stages import Loss, differentiable, layer_errors, scalar


def newest(layout: StageLayout, stage: int, micro: int) -> int:
    """Updates a stage has made when this micro-batch comes forward.

    >>> [newest(StageLayout.of(1, 1, 1), 0, micro) for micro in range(5)]
    [0, 0, 0, 1, 2]
    >>> [newest(StageLayout.of(1, 1, 1), 2, micro) for micro in range(5)]
    [0, 1, 2, 3, 4]
    """
    mine = micro // len(layout.stages[stage])
    return max(0, mine - in_flight(layout, stage) + 1)


def synchronised(layout: StageLayout, stage: int, micro: int) -> int:
    """The version with vertical sync.

    >>> [synchronised(StageLayout.of(1, 1, 1), 2, micro) for micro in range(5)]
    [0, 0, 0, 1, 2]
    >>> [synchronised(StageLayout.of(2, 1), 1, micro) for micro in range(7)]
    [0, 0, 0, 0, 2, 2, 4]
    """
    taken_in = newest(layout, 0, micro) * len(layout.stages[0])
    return taken_in // len(layout.stages[stage])


class StashedStage:
    """A stage whose weights change while micro-batches are in flight.

    Its optimizer updates the module's parameters; passes go through copies of them.

    Args:
        module: the layers.
        loss: on the last stage.
        mine: the micro-batches of this replica, without end.
        version: of the weights that a micro-batch uses.
        copies: False where no version is ever needed after an update; passes then go
            through the parameters themselves.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        loss: Loss | None,
        *,
        mine: Callable[[int], int],
        version: Callable[[int], int],
        copies: bool,
    ) -> None:
        self.module = module
        self._loss = loss
        self._mine, self._version, self._copies = mine, version, copies
        self._versions: dict[int, dict[str, torch.Tensor]] = {}
        self._kept: dict[int, tuple[Any, Any]] = {}
        self._newest = self._begun = 0

    @property
    def versions(self) -> tuple[int, ...]:
        """The versions kept now."""
        return tuple(self._versions)

    def begin(self) -> None:
        """See `Stage`: the weights as they are become version 0."""
        self._kept.clear()
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
        self._kept[micro] = (value, output)
        return output

    def backward(self, micro: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Stage`: gradients of this micro-batch alone, at the weights of its forward pass."""
        value, output = self._kept.pop(micro)
        inputs, outputs = differentiable(value), differentiable(output)
        weights = self._versions[self._version(micro)]
        names = [name for name, weight in weights.items() if weight.requires_grad]
        found: Sequence[Any] = [None] * (len(names) + len(inputs))
        if outputs and found:
            found = torch.autograd.grad(
                outputs,
                [weights[name] for name in names] + inputs,
                None if self._loss else list(gradients),
                allow_unused=True,
            )
        self.clear()
        parameters = dict(self.module.named_parameters())
        for name, gradient in zip(names, found[: len(names)], strict=True):
            parameters[name].grad = gradient
        back = found[len(names) :]
        return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, back, strict=True)]

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter in self.module.parameters():
            parameter.grad = None

    def updated(self) -> None:
        """The parameters have changed: a new version; those that nobody needs go."""
        self._newest += 1
        self._versions[self._newest] = self._snapshot()
        oldest = min([self._version(self._mine(self._begun)), *map(self._version, self._kept)])
        for version in [v for v in self._versions if v < oldest]:
            del self._versions[version]

    def end(self) -> None:
        """See `Stage`: no version is needed."""
        self._versions.clear()

    def _snapshot(self) -> dict[str, torch.Tensor]:
        weights = {}
        for name, parameter in self.module.named_parameters():
            # `data`: the same memory, but changes in place are not held against the graph.
            same = parameter.detach().clone() if self._copies else parameter.data
            weights[name] = same.requires_grad_(parameter.requires_grad)
        return weights
