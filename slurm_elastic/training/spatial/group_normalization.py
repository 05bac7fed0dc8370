"""Normalisation over all slabs of a sample: batch, instance and group normalisation.

Statistics are combined from counts, means and squared deviations of the ranks, which keeps their
precision; one message in each pass. Kept for the backward pass are the slab itself and the
statistics.
"""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.training.spatial.spatial_group import SpatialGroup


class GroupNormalization(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """Normalisation of a slab, then scale and shift of each channel."""

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes no keywords
        ctx: Any,
        slab: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        group: SpatialGroup,
        parts: int,
        over_batch: bool,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the result; mean, variance and count are not differentiable.

        Args:
            ctx: of autograd.
            slab: of this rank.
            weight: of each channel, or None.
            bias: of each channel, or None.
            group: of the sample.
            parts: into which the channels are divided; each has statistics of its own.
            over_batch: statistics of all samples together, else of each.
            epsilon: added to the variance.
        """
        view = _by_parts(_wide(slab), parts)
        axes = (0, 2, 3) if over_batch else (2, 3)
        count = view.numel() // view.shape[1] // (1 if over_batch else view.shape[0])
        mean = view.mean(axes, keepdim=True)
        deviation = (view - mean).square_().sum(axes, keepdim=True)
        stacked = torch.stack([torch.full_like(mean, count), mean, deviation])
        counts, means, deviations = group.collect(stacked).unbind(1)
        total = counts.sum(0)
        mean = (means * counts).sum(0) / total
        deviation = deviations.sum(0) + (counts * (means - mean).square()).sum(0)
        variance = deviation / total
        inverse = (variance + epsilon).rsqrt()
        result = ((view - mean).mul_(inverse)).reshape(slab.shape)
        shape = (1, -1, *[1] * (slab.dim() - 2))
        if weight is not None:
            result.mul_(weight.reshape(shape))
        if bias is not None:
            result.add_(bias.reshape(shape))
        ctx.group, ctx.parts, ctx.axes, ctx.has_bias = group, parts, axes, bias is not None
        ctx.save_for_backward(slab, weight, mean, inverse, total)
        ctx.mark_non_differentiable(mean, variance, total)
        return result.to(slab.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, *_: Any) -> Any:
        """Return the gradients of slab, weight and bias."""
        slab, weight, mean, inverse, total = ctx.saved_tensors
        gradient = _wide(gradient)
        normalized = (_by_parts(_wide(slab), ctx.parts) - mean).mul_(inverse)
        channel_axes = [0, *range(2, slab.dim())]
        of_weight = of_bias = None
        if weight is not None:
            of_weight = (gradient * normalized.reshape(slab.shape)).sum(channel_axes)
        if ctx.has_bias:
            of_bias = gradient.sum(channel_axes)
        if weight is not None:
            gradient = gradient * weight.reshape(1, -1, *[1] * (slab.dim() - 2))
        view = _by_parts(gradient, ctx.parts)
        sums = torch.stack(
            [view.sum(ctx.axes, keepdim=True), (view * normalized).sum(ctx.axes, keepdim=True)]
        )
        first, second = ctx.group.add_up(sums) / total
        of_slab = (view - first).sub_(normalized.mul_(second)).mul_(inverse)
        return (
            of_slab.reshape(slab.shape).to(slab.dtype),
            of_weight,
            of_bias,
            None,
            None,
            None,
            None,
        )


def _by_parts(tensor: torch.Tensor, parts: int) -> torch.Tensor:
    """Return the tensor in the shape (samples, parts, channels of each, voxels)."""
    samples, channels = tensor.shape[:2]
    return tensor.reshape(samples, parts, channels // parts, -1)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor in a type in which sums are precise."""
    return tensor.float() if tensor.dtype in {torch.float16, torch.bfloat16} else tensor
