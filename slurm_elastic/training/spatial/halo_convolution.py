"""Convolutions of slabs, ordinary and transposed, as operations of autograd.

The planes of other ranks are kept for the backward pass beside the slab itself, which the layer
before usually keeps anyway, and not a copy of both. With one dimension cut, the outputs that need
no plane of another rank are computed while the planes are on their way, and in the backward pass
the gradients of the weights while those of the planes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from slurm_elastic.core.slab_grid import SlidingWindow, TransposedWindow, slab_bounds
from slurm_elastic.training.spatial.halo import Halo, Pieces
from slurm_elastic.training.spatial.slab_planes import planes_of_windows
from slurm_elastic.training.spatial.spatial_group import SpatialGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionSettings:
    """Settings of a convolution, one number for each spatial dimension.

    Attributes:
        stride, padding, dilation, output_padding, groups: as of the layer.
        transposed: whether it is a transposed one.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool

    def windows(self, kernel: torch.Size) -> list[SlidingWindow | TransposedWindow]:
        """Return the windows of each spatial dimension."""
        spatial = zip(
            kernel, self.stride, self.padding, self.dilation, self.output_padding, strict=True
        )
        return [
            TransposedWindow(k, s, p, d, o) if self.transposed else SlidingWindow(k, s, p, d)
            for k, s, p, d, o in spatial
        ]


class SlabConvolution:
    """A convolution of one shape on one rank.

    Args:
        group: of the sample.
        extents: of the whole input.
        kernel: of each spatial dimension.
        settings: of the layer.

    Attributes:
        extents: of the whole output.
    """

    def __init__(
        self,
        group: SpatialGroup,
        extents: tuple[int, ...],
        kernel: torch.Size,
        settings: ConvolutionSettings,
    ) -> None:
        self.settings = settings
        self._grid = grid = group.grid
        self._windows = settings.windows(kernel)
        self.extents = tuple(
            w.output_extent(n) for w, n in zip(self._windows, extents, strict=True)
        )
        self._inputs = extents
        self._outputs = [
            slab_bounds(extent, parts)
            for extent, parts in zip(self.extents, grid.parts, strict=True)
        ]
        needed: dict[int, list[tuple[int, int]]] = {}
        for axis in grid.cut_axes if grid.divides(self.extents) else ():
            bounds = self._outputs[axis]
            needed[axis] = [
                self._needed(axis, bounds[i], bounds[i + 1]) for i in range(grid.parts[axis])
            ]
        self.halo = Halo(group, extents, needed)
        own = grid.slab(self.extents) if needed else ()
        self._planes = planes_of_windows(self.halo, self._windows, own, 0.0)
        # Padding of the dimensions that are cut is added by `Halo`, only where the volume ends.
        self._padding = [
            0 if axis in needed else padding for axis, padding in enumerate(settings.padding)
        ]

    def _needed(self, axis: int, first: int, end: int) -> tuple[int, int]:
        window = self._windows[axis]
        if isinstance(window, TransposedWindow):
            return window.needed(first, end, self._inputs[axis])
        return window.needed(first, end)

    def forward(
        self, slab: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Pieces]]:
        """Return the outputs of this rank, and the planes that came from others."""
        if self.settings.transposed:
            extended, received = self.halo.fetch(slab)
            return self._cropped(self._run(extended, weight, None), bias), received
        return self._planes.outputs(slab, lambda padded: self._run(padded, weight, bias))

    def backward(
        self,
        gradient: torch.Tensor,
        slab: torch.Tensor,
        received: list[Pieces],
        weight: torch.Tensor,
        *,
        bias: bool,
        wanted: tuple[bool, bool, bool],
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return the gradients of slab, weight and bias, as far as they are wanted."""
        extended = self.halo.rebuild(slab, received)
        if self.settings.transposed:
            bias_gradient = gradient.sum([0, *range(2, gradient.dim())]) if wanted[2] else None
            gradient = self._spread(gradient, extended)
        else:
            bias_gradient, extended = None, self.halo.pad(extended, 0.0)
        kernel_bias = bias and not self.settings.transposed

        def run(mask: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(
                gradient,
                extended,
                weight,
                [weight.shape[0]] if kernel_bias else None,
                self.settings.stride,
                self._padding_of_run,
                self.settings.dilation,
                self.settings.transposed,
                [0] * len(self._windows),
                self.settings.groups,
                mask,
            )

        returned = None
        if wanted[0]:
            of_slab = run([True, False, False])[0]
            if not self.settings.transposed:
                of_slab = self.halo.unpad(of_slab)
            returned = self.halo.return_gradient(of_slab)
        _, of_weight, of_bias = run([False, wanted[1], wanted[2] and kernel_bias])
        if not self.settings.transposed:
            bias_gradient = of_bias if wanted[2] else None
        return (
            returned.wait() if returned else None,
            of_weight if wanted[1] else None,
            bias_gradient,
        )

    @property
    def _padding_of_run(self) -> list[int]:
        return [0] * len(self._windows) if self.settings.transposed else self._padding

    def _run(
        self, part: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return torch.convolution(
            part,
            weight,
            bias,
            self.settings.stride,
            self._padding_of_run,
            self.settings.dilation,
            self.settings.transposed,
            [0] * len(self._windows),
            self.settings.groups,
        )

    def _spans(self) -> list[tuple[int, int]]:
        """Return, for a transposed convolution, where this rank's outputs begin, and their number.

        Positions are those in the result of the planes that this rank has; they end beyond it
        where `output_padding` adds planes to which no input contributes.
        """
        cut = {exchange.axis + len(self._windows): exchange for exchange in self.halo.axes}
        spans = []
        for axis, window in enumerate(self._windows):
            if axis in cut:
                exchange = cut[axis]
                first, end = self._outputs[axis][exchange.place : exchange.place + 2]
                low = exchange.windows[exchange.place][0]
            else:
                first, end, low = 0, self.extents[axis], 0
            spans.append((first + window.padding - low * window.stride, end - first))
        return spans

    def _cropped(self, full: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        for axis, (begin, count) in enumerate(self._spans(), start=2):
            missing = begin + count - full.shape[axis]
            if missing > 0:
                pads = [0, 0] * full.dim()
                pads[2 * (full.dim() - 1 - axis) + 1] = missing
                full = torch.nn.functional.pad(full, pads)
            full = full.narrow(axis, begin, count)
        if bias is not None:
            return full + bias.reshape(-1, *[1] * len(self._windows))
        return full.contiguous()

    def _spread(self, gradient: torch.Tensor, extended: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the uncropped result."""
        pads: list[int] = []
        for axis, (begin, count) in enumerate(self._spans()):
            window = self._windows[axis]
            size = (extended.shape[axis + 2] - 1) * window.stride + window.reach
            pads[:0] = [-begin if begin < 0 else begin, size - begin - count]
        return torch.nn.functional.pad(gradient, pads)


class HaloConvolution(torch.autograd.Function):  # type: ignore[misc] # torch is untyped here
    """The operation of `SlabConvolution` in autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        slab: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        convolution: SlabConvolution,
    ) -> torch.Tensor:
        """See `SlabConvolution.forward`."""
        output, received = convolution.forward(slab, weight, bias)
        ctx.convolution, ctx.has_bias = convolution, bias is not None
        ctx.firsts = [[first for first, _ in pieces] for pieces in received]
        ctx.save_for_backward(slab, weight, *[t for pieces in received for _, t in pieces])
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """See `SlabConvolution.backward`."""
        slab, weight, *tensors = ctx.saved_tensors
        remaining = iter(tensors)
        received = [[(first, next(remaining)) for first in firsts] for firsts in ctx.firsts]
        wanted = ctx.needs_input_grad
        gradients = ctx.convolution.backward(
            gradient,
            slab,
            received,
            weight,
            bias=ctx.has_bias,
            wanted=(wanted[0], wanted[1], ctx.has_bias and wanted[2]),
        )
        return (*gradients, None)
