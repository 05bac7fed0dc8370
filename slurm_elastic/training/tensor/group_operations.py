"""Differentiable operations over the ranks of a tensor-parallel group.

The gradient of a value that is the same on all ranks is the same on all ranks, too.
"""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.training.ranks.subgroup import Subgroup

_SUM = "adding up activations of a tensor-parallel group"
_COLLECT = "collecting activations of a tensor-parallel group"
_WEIGHTS = "collecting weights of a tensor-parallel group"


def _part(tensor: torch.Tensor, dim: int, group: Subgroup) -> torch.Tensor:
    """Return this rank's part of a tensor, one of equal parts."""
    return tensor.chunk(group.size, dim)[group.rank].contiguous()


class SharedUse(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """A value of which each rank uses a part, or in a part of the layer: its gradients add up."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Subgroup) -> torch.Tensor:
        """Return the value.

        Args:
            ctx: of autograd.
            tensor: the same on all ranks.
            group: of this rank.
        """
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the sum of the gradients."""
        whole = gradient.clone(memory_format=torch.contiguous_format)
        ctx.group.add_up([whole], _SUM)
        return whole, None


class GroupTotal(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """The sum of the tensors of all ranks, on each of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Subgroup) -> torch.Tensor:
        """Return the sum.

        Args:
            ctx: of autograd.
            part: of this rank.
            group: of this rank.
        """
        del ctx
        total = part.clone(memory_format=torch.contiguous_format)
        group.add_up([total], _SUM)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient, which is that of each part."""
        del ctx
        return gradient, None


class WholeActivation(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """The activation of which each rank has a part, on each of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, dim: int, group: Subgroup) -> torch.Tensor:
        """Return the whole.

        Args:
            ctx: of autograd.
            part: of this rank.
            dim: along which it is one of equal parts.
            group: of this rank.
        """
        ctx.dim, ctx.group = dim, group
        return torch.cat(group.collect(part, _COLLECT), dim)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return this rank's part of the gradient."""
        return _part(gradient, ctx.dim, ctx.group), None, None


class OwnPart(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """This rank's part of an activation that all ranks have."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, dim: int, group: Subgroup) -> torch.Tensor:
        """Return the part.

        Args:
            ctx: of autograd.
            whole: the same on all ranks.
            dim: along which it is cut into equal parts.
            group: of this rank.
        """
        ctx.dim, ctx.group = dim, group
        return _part(whole, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the whole."""
        return torch.cat(ctx.group.collect(gradient, _COLLECT), ctx.dim), None, None


class WholeWeight(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """The weight of which each rank keeps a part of the rows, on each of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Subgroup) -> torch.Tensor:
        """Return the whole.

        Args:
            ctx: of autograd.
            part: rows of this rank, as many as others have.
            group: of this rank.
        """
        ctx.group = group
        return torch.cat(group.collect(part, _WEIGHTS))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return this rank's rows of the sum of the gradients."""
        whole = gradient.clone(memory_format=torch.contiguous_format)
        ctx.group.add_up([whole], _SUM)
        return _part(whole, 0, ctx.group), None
