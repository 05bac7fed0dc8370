"""Parameters of which this rank may have a part only, for collectives of plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class OwnParameter:
    """A parameter of this rank, and its gradient, as plain tensors.

    Args:
        parameter: plain, or a DTensor.

    Attributes:
        divided: whether other ranks of the group have other parts.
        tensor: its values here.
        requires_grad, dtype, shape: as those of `tensor`.
    """

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter
        self.divided = hasattr(parameter, "to_local")
        detached = parameter.detach()
        self.tensor: torch.Tensor = detached.to_local() if self.divided else detached
        self.dtype, self.shape = self.tensor.dtype, self.tensor.shape

    @property
    def requires_grad(self) -> bool:
        """Whether it trains."""
        return bool(self._parameter.requires_grad)

    def numel(self) -> int:
        """Return the number of elements."""
        return int(self.shape.numel())

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self.tensor.element_size())

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """Call a function whenever the gradient is complete; return a handle to remove it."""
        return self._parameter.register_post_accumulate_grad_hook(hook)

    @property
    def grad(self) -> Any:
        """The gradient of the part, or None."""
        gradient = self._parameter.grad
        return gradient if gradient is None or not self.divided else gradient.to_local()

    @grad.setter
    def grad(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None and self.divided:
            gradient = type(self._parameter).from_local(
                gradient,
                self._parameter.device_mesh,
                self._parameter.placements,
                run_check=False,
                shape=self._parameter.shape,
                stride=self._parameter.stride(),
            )
        self._parameter.grad = gradient
