"""Operations without parameters on slabs and the planes around them: pooling, resizing, gathering.

The result is computed again in the backward pass, so that the planes of other ranks are all that is
kept beside the slab.
"""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.training.spatial.halo import Halo, Operation
from slurm_elastic.training.spatial.slab_planes import SlabPlanes


class HaloOperation(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """An operation on a slab and planes of others."""

    @staticmethod
    def forward(
        ctx: Any,
        slab: torch.Tensor,
        planes: SlabPlanes,
        operation: Operation,
        reduction: Operation | None,
    ) -> torch.Tensor:
        """Return the operation's result.

        Args:
            ctx: of autograd.
            slab: of this rank.
            planes: that it needs.
            operation: of these planes.
            reduction: of each plane by itself, before `operation`.
        """
        result, received = planes.outputs(slab, operation, reduction)
        ctx.planes, ctx.operation, ctx.reduction = planes, operation, reduction
        ctx.firsts = [[first for first, _ in pieces] for pieces in received]
        ctx.save_for_backward(slab, *[t for pieces in received for _, t in pieces])
        return result.clone() if result is slab else result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradient of the slab."""
        slab, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        received = [[(first, next(remaining)) for first in firsts] for firsts in ctx.firsts]
        total = ctx.planes.slab_gradient(gradient, slab, received, ctx.operation, ctx.reduction)
        return total, None, None, None


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
        return ctx.halo.return_gradient(gradient).wait(), None


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
