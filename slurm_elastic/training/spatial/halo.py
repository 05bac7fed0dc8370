"""Planes that a layer needs beyond the slab of a rank: their exchange, and that of their gradients.

Dimensions that are cut are handled one after the other; the second exchange includes the planes
that the first one has brought, and so the corners.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from slurm_elastic.core.slab_grid import slab_bounds
from slurm_elastic.training.spatial.spatial_group import PlaneMessages, SpatialGroup


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

    @property
    def margins(self) -> tuple[int, int]:
        """Planes of padding before and after the planes that this rank needs."""
        return outside(self.windows[self.place], self.bounds[-1])


class Halo:
    """Exchanges of all dimensions that are cut, for one layer and extent.

    Args:
        group: of the sample.
        extents: of the whole input.
        windows: by spatial dimension that is cut: the planes that each rank along it needs.
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
        ]

    def start(self, exchange: AxisExchange, slab: torch.Tensor) -> StartedExchange:
        """Start to send planes of a slab and to receive those of others, along one dimension."""
        offset = exchange.held[0]
        sends, receives, pieces = [], [], []
        for other, index in enumerate(exchange.line):
            if other == exchange.place:
                continue
            low, high = exchange.overlap(exchange.place, other)
            if high > low:
                sends.append((index, slab.narrow(exchange.axis, low - offset, high - low)))
            low, high = exchange.overlap(other, exchange.place)
            if high > low:
                shape = list(slab.shape)
                shape[exchange.axis] = high - low
                pieces.append((low, slab.new_empty(shape)))
                receives.append((index, pieces[-1][1]))
        return StartedExchange(self._group.start(sends, receives), pieces)

    def fetch(self, slab: torch.Tensor) -> tuple[torch.Tensor, list[Pieces]]:
        """Return the planes that this rank needs, unpadded, and those of others by dimension."""
        received: list[Pieces] = []
        for exchange in self.axes:
            received.append(self.start(exchange, slab).wait())
            slab = assemble(exchange, slab, received[-1])
        return slab, received

    def rebuild(self, slab: torch.Tensor, received: Sequence[Pieces]) -> torch.Tensor:
        """Return the result of `fetch` again, from the planes of others that it received."""
        for exchange, pieces in zip(self.axes, received, strict=True):
            slab = assemble(exchange, slab, pieces)
        return slab

    def start_return(self, gradient: torch.Tensor) -> ReturnedGradient:
        """Start to give the gradients of planes of others back to these.

        Args:
            gradient: of the result of `fetch`.
        """
        return ReturnedGradient(self._group, self.axes, gradient)

    def pad(self, extended: torch.Tensor, value: float) -> torch.Tensor:
        """Return the result of `fetch` with the padding at the faces of the volume."""
        pads = [0, 0] * extended.dim()
        for exchange in self.axes:
            at = 2 * (-exchange.axis - 1)
            pads[at : at + 2] = exchange.margins
        if not any(pads):
            return extended
        return torch.nn.functional.pad(extended, pads, value=value)

    def unpad(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient without that of the padding."""
        for exchange in self.axes:
            before, after = exchange.margins
            size = gradient.shape[exchange.axis] - before - after
            gradient = gradient.narrow(exchange.axis, before, size)
        return gradient


#: Planes of other ranks: the first one's position, and the tensor.
Pieces = list[tuple[int, torch.Tensor]]


class StartedExchange:
    """An exchange along one dimension that is under way."""

    def __init__(self, messages: PlaneMessages, pieces: Pieces) -> None:
        self._messages, self._pieces = messages, pieces

    def wait(self) -> Pieces:
        """Return the planes of others, in the order of their places."""
        self._messages.wait()
        return self._pieces


def assemble(
    exchange: AxisExchange,
    slab: torch.Tensor,
    pieces: Pieces,
    span: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Return consecutive planes, from a slab and the planes of others.

    Args:
        exchange: along the dimension.
        slab: of this rank.
        pieces: of others.
        span: the planes; None: all that this rank needs.
    """
    axis, extent = exchange.axis, exchange.bounds[-1]
    low, high = span or exchange.windows[exchange.place]
    low, high = max(0, low), min(extent, high)
    parts = []
    for first, tensor in sorted([*pieces, (exchange.held[0], slab)], key=lambda part: part[0]):
        begin, end = max(low, first), min(high, first + tensor.shape[axis])
        if end > begin:
            parts.append(tensor.narrow(axis, begin - first, end - begin))
    if not parts:  # windows that lie in the padding
        return slab.narrow(axis, 0, 0)
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def outside(span: tuple[int, int], extent: int) -> tuple[int, int]:
    """Return how many planes of a span lie before the volume, and behind it."""
    low, high = span
    return max(0, min(high, 0) - low), max(0, high - max(low, extent))


class ReturnedGradient:
    """Gradients of planes on the way to the ranks that hold them.

    The exchange along the last dimension is started at once, so that other work may follow before
    `wait`.
    """

    def __init__(
        self, group: SpatialGroup, axes: Sequence[AxisExchange], gradient: torch.Tensor
    ) -> None:
        self._group, self._axes, self._gradient = group, list(axes), gradient
        self._started = self._start() if self._axes else None

    def wait(self) -> torch.Tensor:
        """Return the gradient of this rank's slab."""
        while self._axes:
            if self._started is None:
                self._started = self._start()
            self._gradient = self._finish(self._axes.pop())
            self._started = None
        return self._gradient

    def _start(self) -> tuple[PlaneMessages, Pieces]:
        exchange, gradient = self._axes[-1], self._gradient
        offset = max(0, exchange.windows[exchange.place][0])
        sends, receives, pieces = [], [], []
        for other, index in enumerate(exchange.line):
            if other == exchange.place:
                continue
            low, high = exchange.overlap(other, exchange.place)
            if high > low:
                sends.append((index, gradient.narrow(exchange.axis, low - offset, high - low)))
            low, high = exchange.overlap(exchange.place, other)
            if high > low:
                shape = list(gradient.shape)
                shape[exchange.axis] = high - low
                pieces.append((low, gradient.new_empty(shape)))
                receives.append((index, pieces[-1][1]))
        return self._group.start(sends, receives), pieces

    def _finish(self, exchange: AxisExchange) -> torch.Tensor:
        messages, pieces = self._started or (None, [])
        low, high = exchange.overlap(exchange.place, exchange.place)
        first, end = exchange.held
        offset = max(0, exchange.windows[exchange.place][0])
        if (low, high) == (first, end):
            # A copy, as the gradient may be one that autograd still uses.
            own = self._gradient.narrow(exchange.axis, low - offset, high - low).clone()
        else:
            shape = list(self._gradient.shape)
            shape[exchange.axis] = end - first
            own = self._gradient.new_zeros(shape)
            if high > low:
                own.narrow(exchange.axis, low - first, high - low).copy_(
                    self._gradient.narrow(exchange.axis, low - offset, high - low)
                )
        if messages is not None:
            messages.wait()
        for begin, piece in pieces:
            own.narrow(exchange.axis, begin - first, piece.shape[exchange.axis]).add_(piece)
        return own
