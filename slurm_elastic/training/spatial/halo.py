"""Planes that a layer needs beyond the slab of a rank: their exchange, and that of their gradients.

Dimensions that are cut are handled one after the other; the second exchange includes the planes
that the first one has brought, and so the corners.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from slurm_elastic.core.slab_grid import slab_bounds
from slurm_elastic.training.spatial.spatial_group import PlaneMessages, SpatialGroup

#: Function of planes.
Operation = Callable[[torch.Tensor], torch.Tensor]
#: Planes of other ranks: the first one's position, and the tensor.
Pieces = list[tuple[int, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class AxisExchange:
    """Exchange of planes along one dimension, seen from one rank.

    Attributes:
        axis: the dimension, counted from the last one: -1 is the last.
        line: indices in the group of the ranks along it.
        place: of this rank among them.
        bounds: planes at which the slabs begin, and the end.
        windows: planes that each rank needs; outside the volume stands padding.
    """

    axis: int
    line: tuple[int, ...]
    place: int
    bounds: tuple[int, ...]
    windows: tuple[tuple[int, int], ...]

    def overlap(self, holder: int, reader: int) -> tuple[int, int]:
        """Return the planes of one rank that another one needs; empty ones as (n, n)."""
        low = max(self.bounds[holder], self.windows[reader][0])
        high = min(self.bounds[holder + 1], self.windows[reader][1])
        return low, max(low, high)

    @property
    def held(self) -> tuple[int, int]:
        """Planes of this rank."""
        return self.bounds[self.place], self.bounds[self.place + 1]

    def held_planes(self, slab: torch.Tensor, first: int, piece: torch.Tensor) -> torch.Tensor:
        """Return the part of this rank's slab to which a piece with that first plane belongs."""
        return slab.narrow(self.axis, first - self.held[0], piece.shape[self.axis])

    def held_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a copy of the gradient of this rank's planes, from that of all that it needs."""
        low, high = self.overlap(self.place, self.place)
        first, end = self.held
        offset = max(0, self.windows[self.place][0])
        if (low, high) == (first, end):
            return gradient.narrow(self.axis, low - offset, high - low).clone()
        shape = list(gradient.shape)
        shape[self.axis] = end - first
        held = gradient.new_zeros(shape)
        if high > low:
            held.narrow(self.axis, low - first, high - low).copy_(
                gradient.narrow(self.axis, low - offset, high - low)
            )
        return held

    def assemble(
        self, slab: torch.Tensor, pieces: Pieces, span: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return consecutive planes.

        Args:
            slab: of this rank.
            pieces: planes of others.
            span: the planes, of which those outside the volume are left out; None: all that this
                rank needs.
        """
        low, high = span or self.windows[self.place]
        low, high = max(0, low), min(self.bounds[-1], high)
        parts = []
        for first, tensor in sorted([*pieces, (self.held[0], slab)], key=lambda part: part[0]):
            begin, end = max(low, first), min(high, first + tensor.shape[self.axis])
            if end > begin:
                parts.append(tensor.narrow(self.axis, begin - first, end - begin))
        if not parts:  # windows that lie in the padding
            return slab.narrow(self.axis, 0, 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.axis)


class Halo:
    """Exchanges of all dimensions that are cut, for one layer and extent.

    Args:
        group: of the sample.
        extents: of the whole input.
        windows: by spatial dimension: the planes that each rank along it needs. Dimensions that are
            not cut may be left out if they are not to be padded.

    Attributes:
        axes: the exchange of each dimension that is cut.
    """

    def __init__(
        self,
        group: SpatialGroup,
        extents: Sequence[int],
        windows: Mapping[int, Sequence[tuple[int, int]]],
    ) -> None:
        self._group = group
        grid = group.grid
        self.axes = [
            AxisExchange(
                axis=axis - len(extents),
                line=tuple(grid.line(axis)),
                place=grid.coordinates[axis],
                bounds=tuple(slab_bounds(extents[axis], grid.parts[axis])),
                windows=tuple(needed),
            )
            for axis, needed in sorted(windows.items())
            if grid.parts[axis] > 1
        ]
        # By dimension, counted from the last one: planes of padding before and after.
        self._margins = {
            axis - len(extents): outside(needed[grid.coordinates[axis]], extents[axis])
            for axis, needed in windows.items()
        }

    def start(
        self, exchange: AxisExchange, slab: torch.Tensor, reduction: Operation | None = None
    ) -> StartedExchange:
        """Start to send planes of a slab and to receive those of others, along one dimension.

        Args:
            exchange: of that dimension.
            slab: of this rank.
            reduction: of each plane by itself, before it is sent.
        """
        offset = exchange.held[0]

        def reduced(low: int, high: int) -> torch.Tensor:
            planes = slab.narrow(exchange.axis, low - offset, high - low)
            return planes if reduction is None else reduction(planes)

        return self._start(exchange, reduced, lambda: reduced(offset, offset + 1), back=False)

    def fetch(self, slab: torch.Tensor) -> tuple[torch.Tensor, list[Pieces]]:
        """Return the planes that this rank needs, unpadded, and those of others by dimension."""
        received: list[Pieces] = []
        for exchange in self.axes:
            received.append(self.start(exchange, slab).wait())
            slab = exchange.assemble(slab, received[-1])
        return slab, received

    def rebuild(self, slab: torch.Tensor, received: Sequence[Pieces]) -> torch.Tensor:
        """Return the result of `fetch` again, from the planes of others that it received."""
        for exchange, pieces in zip(self.axes, received, strict=True):
            slab = exchange.assemble(slab, pieces)
        return slab

    def start_return(self, exchange: AxisExchange, gradient: torch.Tensor) -> StartedExchange:
        """Start to give gradients of planes of others back, and to receive those of own planes.

        Args:
            exchange: of the dimension.
            gradient: of the planes that this rank needs, those of others included.
        """
        offset = max(0, exchange.windows[exchange.place][0])

        def part(low: int, high: int) -> torch.Tensor:
            return gradient.narrow(exchange.axis, low - offset, high - low)

        return self._start(exchange, part, lambda: gradient, back=True)

    def _start(
        self,
        exchange: AxisExchange,
        part: Callable[[int, int], torch.Tensor],
        like: Callable[[], torch.Tensor],
        *,
        back: bool,
    ) -> StartedExchange:
        """Start messages along one dimension.

        Args:
            exchange: of that dimension.
            part: returns the planes from one position to another, as they are sent.
            like: returns a tensor that has the shape of what arrives, but for the planes.
            back: from the ranks that need planes to those that hold them, instead of the reverse.
        """
        sends, receives, pieces = [], [], []
        alike: torch.Tensor | None = None
        for other, index in enumerate(exchange.line):
            if other == exchange.place:
                continue
            ours, theirs = (exchange.place, other), (other, exchange.place)
            low, high = exchange.overlap(*(theirs if back else ours))
            first, end = exchange.overlap(*(ours if back else theirs))
            if high > low:
                sends.append((index, part(low, high)))
            if end > first:
                alike = like() if alike is None else alike
                shape = list(alike.shape)
                shape[exchange.axis] = end - first
                pieces.append((first, alike.new_empty(shape)))
                receives.append((index, pieces[-1][1]))
        return StartedExchange(self._group.start(sends, receives), pieces)

    def return_gradient(self, gradient: torch.Tensor) -> ReturnedGradient:
        """Start to give the gradients of planes of others back to these.

        Args:
            gradient: of the result of `fetch`.
        """
        return ReturnedGradient(self, gradient)

    def pad(
        self, extended: torch.Tensor, value: float, span: tuple[int, int] | None = None
    ) -> torch.Tensor:
        """Return planes with the padding at the faces of the volume.

        Args:
            extended: the result of `fetch`.
            value: of the padding.
            span: if only one dimension is cut: the planes in it that `extended` has, with those
                outside the volume; None: all that this rank needs.
        """
        pads = [0, 0] * extended.dim()
        for axis, margins in self._margins_of(span).items():
            at = 2 * (-axis - 1)
            pads[at : at + 2] = margins
        if not any(pads):
            return extended
        return torch.nn.functional.pad(extended, pads, value=value)

    def unpad(self, gradient: torch.Tensor, span: tuple[int, int] | None = None) -> torch.Tensor:
        """Return the gradient of the planes before `pad`, from that of its result."""
        for axis, (before, after) in self._margins_of(span).items():
            gradient = gradient.narrow(axis, before, gradient.shape[axis] - before - after)
        return gradient

    def _margins_of(self, span: tuple[int, int] | None) -> dict[int, tuple[int, int]]:
        if span is None:
            return self._margins
        (cut,) = self.axes
        return self._margins | {cut.axis: outside(span, cut.bounds[-1])}


class StartedExchange:
    """An exchange along one dimension that is under way."""

    def __init__(self, messages: PlaneMessages, pieces: Pieces) -> None:
        self._messages, self._pieces = messages, pieces

    def wait(self) -> Pieces:
        """Return the planes of others, in the order of their places."""
        self._messages.wait()
        return self._pieces


def outside(span: tuple[int, int], extent: int) -> tuple[int, int]:
    """Return the numbers of planes of a span before the volume and behind it."""
    low, high = span
    return max(0, min(high, 0) - low), max(0, high - max(low, extent))


class ReturnedGradient:
    """Gradients of planes on the way to the ranks that hold them.

    The exchange along the last dimension is started at once, so that other work may follow before
    `wait`.
    """

    def __init__(self, halo: Halo, gradient: torch.Tensor) -> None:
        self._halo, self._gradient = halo, gradient
        self._started = halo.start_return(halo.axes[-1], gradient) if halo.axes else None

    def wait(self) -> torch.Tensor:
        """Return the gradient of this rank's slab."""
        for exchange in reversed(self._halo.axes):
            started = self._started or self._halo.start_return(exchange, self._gradient)
            self._started = None
            self._gradient = exchange.held_gradient(self._gradient)
            for first, piece in started.wait():
                exchange.held_planes(self._gradient, first, piece).add_(piece)
        return self._gradient
