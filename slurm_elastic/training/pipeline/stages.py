"""One stage of a pipeline: its layers, and what it keeps of micro-batches in flight.

A stage is called as a part of nn.Sequential is: with one value, a tensor or a tuple
of tensors, and gives one. Of those tensors gradients flow through the ones that ask
for it.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from slurm_elastic.training.pipeline.stage_layout import LayoutError

#: Of (output, targets): a micro-batch's part of the sum that the loss is, a scalar.
Loss = Callable[[Any, Any], torch.Tensor]


class Stage(Protocol):
    """What the engine drives."""

    module: torch.nn.Module

    def begin(self) -> None:
        """Before the first of a row of micro-batches."""

    def forward(self, micro: int, value: Any, targets: Any) -> Any:
        """The output; on the last stage, the loss."""

    def backward(self, micro: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From gradients of the output to those of the input; parameters keep theirs."""

    def end(self) -> None:
        """After the last: nothing is in flight."""


def cut(
    layers: Sequence[tuple[str, torch.nn.Module]], lengths: Sequence[int]
) -> list[torch.nn.Sequential]:
    """Consecutive layers become stages; parameters keep the names of the whole model.

    Args:
        layers: (name, module) in their order.
        lengths: layers of each stage.

    Raises:
        LayoutError: the lengths do not add up to the layers, or one is below 1.

    >>> linear = torch.nn.Linear(1, 1)
    >>> [list(s.state_dict()) for s in cut([("a", linear), ("b", linear)], [1, 1])]
    [['a.weight', 'a.bias'], ['b.weight', 'b.bias']]
    """
    if sum(lengths) != len(layers) or min(lengths, default=0) < 1:
        raise LayoutError(
            f"stages of {list(lengths)} layers do not make {len(layers)}; each layer belongs to "
            "one stage, each stage has one at least"
        )
    stages, first = [], 0
    for length in lengths:
        stages.append(torch.nn.Sequential(OrderedDict(layers[first : first + length])))
        first += length
    return stages


def differentiable(value: Any) -> list[torch.Tensor]:
    """The tensors of a value through which gradients flow."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]


def scalar(loss: Any) -> torch.Tensor:
    """The loss, if it is one.

    Raises:
        LayoutError: it is no tensor, or one of several numbers.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    what = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise LayoutError(f"the loss of a micro-batch is of {what}; give one number, such as its sum")


@contextlib.contextmanager
def layer_errors(module: torch.nn.Module, value: Any) -> Iterator[None]:
    """Around `module(value)`: says which layer does not take what the one before it gives.

    Raises:
        LayoutError: in place of the layer's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):
        before = "the input"
        for name, layer in module.named_children():
            try:
                value = layer(value)
            except (RuntimeError, TypeError, ValueError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise LayoutError(f"layer {name} does not take {before}: {reason}") from error
            before = f"what layer {name} gives"
        raise


class PlainStage:
    """A stage whose weights do not change between forward and backward.

    Gradients of all micro-batches since they were cleared add up in `Parameter.grad`.

    Args:
        module: the layers.
        loss: on the last stage.
    """

    def __init__(self, module: torch.nn.Module, loss: Loss | None) -> None:
        self.module = module
        self._loss = loss
        self._kept: dict[int, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """See `Stage`."""
        self._kept.clear()
        for parameter in self.module.parameters():
            parameter.grad = None

    def forward(self, micro: int, value: Any, targets: Any) -> Any:
        """See `Stage`."""
        with layer_errors(self.module, value):
            output = self.module(value)
        if self._loss is not None:
            output = scalar(self._loss(output, targets))
        self._kept[micro] = (value, output)
        return output

    def backward(self, micro: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Stage`."""
        value, output = self._kept.pop(micro)
        outputs = differentiable(output)
        if outputs:
            torch.autograd.backward(outputs, None if self._loss else list(gradients))
        inputs = differentiable(value)
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]

    def end(self) -> None:
        """See `Stage`."""
