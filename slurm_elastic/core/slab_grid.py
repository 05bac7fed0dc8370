"""Division of spatial extents among the ranks of a group, as arithmetic.

The slab of a rank follows from the extent of the whole alone, so that tensors of equal extents are
cut alike.

>>> slab_bounds(5, 2)
[0, 2, 5]
>>> window = SlidingWindow(kernel=3, stride=2, padding=1, dilation=1)
>>> window.output_extent(5), window.needed(0, 1), window.needed(1, 3)
(3, (-1, 2), (1, 6))

Code inside jobs imports this module: standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.errors import InvalidInputError


class SpatialCutError(InvalidInputError, ValueError):
    """A cut in space that is impossible, or an operation that cannot be done on slabs."""


def slab_bounds(extent: int, parts: int) -> list[int]:
    """Return the planes at which slabs begin, and the end; sizes differ by one at most."""
    return [extent * i // parts for i in range(parts + 1)]


def in_space(slab: Sequence[slice]) -> Any:
    """Return the index of a slab in a tensor whose last dimensions are the spatial ones."""
    return (Ellipsis, *slab)  # as a subscript it would need Python 3.11


@dataclass(frozen=True, slots=True)
class SlabGrid:
    """Place of one rank in a grid of ranks that share a sample.

    Attributes:
        parts: of each spatial dimension.
        index: of this rank in the group, row by row.
    """

    parts: tuple[int, ...]
    index: int = 0

    def __post_init__(self) -> None:
        if not self.parts or min(self.parts) < 1:
            shown = "x".join(map(str, self.parts))
            raise SpatialCutError(
                f"spatial: {shown or '()'} is invalid: expected ranks of at least 1 for each"
                " spatial dimension, e.g. (2, 1, 1)"
            )

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return math.prod(self.parts)

    @property
    def cut_axes(self) -> tuple[int, ...]:
        """Spatial dimensions that are cut, counted from the first one."""
        return tuple(axis for axis, parts in enumerate(self.parts) if parts > 1)

    @property
    def coordinates(self) -> tuple[int, ...]:
        """Place of this rank in each dimension."""
        rest, places = self.index, []
        for parts in reversed(self.parts):
            rest, place = divmod(rest, parts)
            places.append(place)
        return tuple(reversed(places))

    def line(self, axis: int) -> list[int]:
        """Return the indices of the ranks that differ from this one in that dimension only."""
        stride = math.prod(self.parts[axis + 1 :])
        first = self.index - self.coordinates[axis] * stride
        return [first + i * stride for i in range(self.parts[axis])]

    def slab(self, extents: Sequence[int]) -> tuple[slice, ...]:
        """Return this rank's part of a volume.

        Raises:
            SpatialCutError: another number of dimensions, or fewer planes than ranks.
        """
        self.check(extents)
        parts = []
        for extent, count, place in zip(extents, self.parts, self.coordinates, strict=True):
            bounds = slab_bounds(extent, count)
            parts.append(slice(bounds[place], bounds[place + 1]))
        return tuple(parts)

    def check(self, extents: Sequence[int]) -> None:
        """Check that a volume can be cut.

        Raises:
            SpatialCutError: see `slab`.
        """
        shown = "x".join(map(str, extents))
        grid = "x".join(map(str, self.parts))
        if len(extents) != len(self.parts):
            raise SpatialCutError(
                f"spatial: a cut of {grid} is invalid for a volume of {shown}: expected one number"
                " for each spatial dimension"
            )
        if not self.divides(extents):
            raise SpatialCutError(
                f"spatial: a volume of {shown} is invalid for a cut of {grid}: expected at least"
                " one plane for each rank; use fewer ranks for a sample"
            )

    def divides(self, extents: Sequence[int]) -> bool:
        """Return whether each rank has at least one plane."""
        return all(extent >= parts for extent, parts in zip(extents, self.parts, strict=True))


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Input planes of the outputs of a convolution or pooling, in one dimension.

    Attributes:
        kernel, stride, padding, dilation: as of the layer.
        ceil_mode: whether a last, incomplete window counts.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    ceil_mode: bool = False

    @property
    def reach(self) -> int:
        """Planes from the first to the last of a window."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int) -> int:
        """Return the planes of the output."""
        room = extent + 2 * self.padding - self.reach
        if not self.ceil_mode:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        # As torch: the last window must begin inside the input or its left padding.
        return count - ((count - 1) * self.stride >= extent + self.padding)

    def needed(self, first: int, end: int) -> tuple[int, int]:
        """Return the input planes of outputs [first, end), those of the padding included."""
        low = first * self.stride - self.padding
        return low, (end - 1) * self.stride - self.padding + self.reach

    def complete(self, first: int, end: int, held: tuple[int, int], extent: int) -> tuple[int, int]:
        """Return the outputs of [first, end) that need no plane of another rank.

        Args:
            first: of this rank's outputs.
            end: of them, exclusive.
            held: input planes of this rank.
            extent: of the whole input.
        """
        low, high = held
        inner_first, inner_end = first, end
        while inner_first < inner_end and low > max(
            0, self.needed(inner_first, inner_first + 1)[0]
        ):
            inner_first += 1
        while inner_end > inner_first and high < min(
            extent, self.needed(inner_end - 1, inner_end)[1]
        ):
            inner_end -= 1
        return inner_first, inner_end


@dataclass(frozen=True, slots=True)
class TransposedWindow:
    """Input planes of the outputs of a transposed convolution, in one dimension.

    Attributes:
        kernel, stride, padding, dilation, output_padding: as of the layer.
    """

    kernel: int
    stride: int
    padding: int
    dilation: int = 1
    output_padding: int = 0

    @property
    def reach(self) -> int:
        """Output planes from the first to the last that an input plane contributes to."""
        return self.dilation * (self.kernel - 1) + 1

    def output_extent(self, extent: int) -> int:
        """Return the planes of the output."""
        full = (extent - 1) * self.stride + self.reach
        return full - 2 * self.padding + self.output_padding

    def needed(self, first: int, end: int, extent: int) -> tuple[int, int]:
        """Return the input planes of outputs [first, end), at least one."""
        low = -((self.reach - 1 - self.padding - first) // self.stride)
        # At or before the first output, also where no input plane contributes to it.
        low = min(max(0, low), (first + self.padding) // self.stride, extent - 1)
        high = min((end - 1 + self.padding) // self.stride + 1, extent)
        return low, max(high, low + 1)
