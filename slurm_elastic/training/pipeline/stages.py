"""One stage of a pipeline: its layers, and the state of micro-batches in flight.

A stage is called as a part of nn.Sequential is: it takes one value, a tensor or a
tuple of tensors, and returns one. Gradients flow through those tensors that require
them.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from slurm_elastic.training.pipeline.stage_layout import LayoutError

#: Function of (output, targets): a micro-batch's part of the loss, which is their sum; a scalar.
Loss = Callable[[Any, Any], torch.Tensor]


class Stage(Protocol):
    """Passes through the layers of one stage."""

    module: torch.nn.Module

    def begin(self) -> None:
        """Prepare for a sequence of micro-batches."""

    def forward(self, micro: int, value: Any, targets: Any) -> Any:
        """Return the output; on the last stage, the loss."""

    def backward(self, micro: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the gradients of the input, given those of the output; keep the parameters'."""

    def end(self) -> None:
        """Free the memory of the sequence: no micro-batch is in flight."""


def cut(
    layers: Sequence[tuple[str, torch.nn.Module]], lengths: Sequence[int]
) -> list[torch.nn.Sequential]:
    """Return stages of consecutive layers; parameters keep the names of the whole model.

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
            f"lengths: {list(lengths)} is invalid: expected numbers of at least 1 that add up to "
            f"{len(layers)} layers"
        )
    stages, first = [], 0
    for length in lengths:
        stages.append(torch.nn.Sequential(OrderedDict(layers[first : first + length])))
        first += length
    return stages


def differentiable(value: Any) -> list[torch.Tensor]:
    """Return the tensors of a value that require gradients."""
    tensors = value if isinstance(value, tuple) else (value,)
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]


def scalar(loss: Any) -> torch.Tensor:
    """Return the loss as a tensor of shape ().

    Raises:
        LayoutError: it is no tensor, or one of several numbers.
    """
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss.reshape(())
    form = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
    raise LayoutError(
        f"loss of a micro-batch: a value of {form} is invalid: expected one number; return the sum"
        " or the mean"
    )


@contextlib.contextmanager
def layer_errors(module: torch.nn.Module, value: Any) -> Iterator[None]:
    """Replace errors of `module(value)` by one that names the layer which rejects its input.

    Raises:
        LayoutError: in place of the layer's own error.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError):
        source = "the input"
        for name, layer in module.named_children():
            try:
                value = layer(value)
            except (RuntimeError, TypeError, ValueError) as error:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                raise LayoutError(f"layer {name} does not accept {source}: {reason}") from error
            source = f"the output of layer {name}"
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
        self._in_flight: dict[int, tuple[Any, Any]] = {}

    def begin(self) -> None:
        """See `Stage`."""
        self._in_flight.clear()
        for parameter in self.module.parameters():
            parameter.grad = None

    def forward(self, micro: int, value: Any, targets: Any) -> Any:
        """See `Stage`."""
        with layer_errors(self.module, value):
            output = self.module(value)
        if self._loss is not None:
            output = scalar(self._loss(output, targets))
        self._in_flight[micro] = (value, output)
        return output

    def backward(self, micro: int, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """See `Stage`."""
        value, output = self._in_flight.pop(micro)
        outputs = differentiable(output)
        if outputs:
            torch.autograd.backward(outputs, None if self._loss else list(gradients))
        inputs = differentiable(value)
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in inputs]

    def end(self) -> None:
        """See `Stage`."""
