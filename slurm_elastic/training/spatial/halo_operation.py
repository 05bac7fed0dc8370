"""Operations without parameters on slabs and the planes around them: pooling, resizing, gathering.

The result is computed again in the backward pass, so that the planes of other ranks are all that is
kept beside the slab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slurm_elastic.training.spatial.halo import Halo

#: Function from the planes that a rank needs, with padding, to its outputs.
Operation = Callable[[torch.Tensor], torch.Tensor]


class HaloOperation(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """An operation on a slab and planes of others."""

    @staticmethod
    def forward(
        ctx: Any, slab: torch.Tensor, halo: Halo, operation: Operation, padding_value: float
    ) -> torch.Tensor:
        """Return the operation's result.

        Args:
            ctx: of autograd.
            slab: of this rank.
            halo: the planes that it needs.
            operation: of these planes.
            padding_value: outside the volume.
        """
        extended, received = halo.fetch(slab)
        ctx.halo, ctx.operation, ctx.padding_value = halo, operation, padding_value
        ctx.firsts = [[first for first, _ in pieces] for pieces in received]
        ctx.save_for_backward(slab, *[t for pieces in received for _, t in pieces])
        result = operation(halo.pad(extended, padding_value))
        return result.clone() if result is slab else result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the slab."""
        slab, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        received = [[(first, next(remaining)) for first in firsts] for firsts in ctx.firsts]
        extended = ctx.halo.pad(ctx.halo.rebuild(slab, received), ctx.padding_value)
        with torch.enable_grad():
            extended = extended.detach().requires_grad_()
            result = ctx.operation(extended)
        (of_extended,) = torch.autograd.grad(result, extended, gradient)
        returned = ctx.halo.start_return(ctx.halo.unpad(of_extended))
        return returned.wait(), None, None, None


class Gathering(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """The whole volume on every rank, from the slabs of all."""

    @staticmethod
    def forward(ctx: Any, slab: torch.Tensor, halo: Halo) -> torch.Tensor:
        """Return the volume.

        Args:
            ctx: of autograd.
            slab: of this rank.
            halo: the exchange, which needs all planes.
        """
        ctx.halo = halo
        whole, _ = halo.fetch(slab)
        return whole.clone() if whole is slab else whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the slab: the sum of those of all ranks."""
        return ctx.halo.start_return(gradient).wait(), None


class GroupSum(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """The sum of the tensors of all ranks of a group, on each of them."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: Any) -> torch.Tensor:
        """Return the sum.

        Args:
            ctx: of autograd.
            part: of this rank.
            group: of the sample.
        """
        ctx.group = group
        summed: torch.Tensor = group.add_up(part.detach().clone())
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of this rank's part: each rank's loss depends on it."""
        return ctx.group.add_up(gradient.clone()), None
