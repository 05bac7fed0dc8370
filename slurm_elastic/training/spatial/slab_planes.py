"""Operations on the planes that a rank needs: on all at once, or on interior and borders of a slab.

If one dimension is cut, the outputs of the interior need no plane of another rank: they are
computed while the planes for the borders are on their way. In the backward pass the borders come
first: the gradients of other ranks' planes travel while the interior's are computed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurm_elastic.core.slab_grid import SlidingWindow, TransposedWindow
from slurm_elastic.training.spatial.halo import Halo, Operation, Pieces


class PlanesAtOnce:
    """All planes that a rank needs, at once.

    Args:
        halo: the planes.
        padding_value: outside the volume.
    """

    def __init__(self, halo: Halo, padding_value: float) -> None:
        self._halo, self._padding_value = halo, padding_value

    def outputs(
        self, slab: torch.Tensor, operation: Operation, reduction: Operation | None = None
    ) -> tuple[torch.Tensor, list[Pieces]]:
        """Return the outputs of this rank, and the planes that came from others.

        Args:
            slab: of this rank.
            operation: from planes, with padding, to outputs.
            reduction: of each plane by itself, before `operation`.
        """
        extended, received = self._halo.fetch(slab if reduction is None else reduction(slab))
        return operation(self._halo.pad(extended, self._padding_value)), received

    def slab_gradient(
        self,
        gradient: torch.Tensor,
        slab: torch.Tensor,
        received: Sequence[Pieces],
        operation: Operation,
        reduction: Operation | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the slab, from that of the outputs of this rank."""
        reduced = _Result(reduction, slab)
        extended = self._halo.rebuild(reduced.value, received)
        result = _Result(operation, self._halo.pad(extended, self._padding_value))
        of_extended = self._halo.unpad(result.input_gradient(gradient))
        return reduced.input_gradient(self._halo.return_gradient(of_extended).wait())


class InteriorAndBorders:
    """Planes that sliding windows need: those of the interior, then those of the borders.

    Args:
        halo: the planes that this rank needs; one dimension is cut.
        window: of that dimension.
        outputs: of this rank in it: the first one, and the end.
        padding_value: outside the volume.
    """

    def __init__(
        self, halo: Halo, window: SlidingWindow, outputs: tuple[int, int], padding_value: float
    ) -> None:
        (self._exchange,) = halo.axes
        self._halo, self._window, self._padding_value = halo, window, padding_value
        self._first, self._end = outputs
        low, high = window.complete(
            self._first, self._end, self._exchange.held, self._exchange.bounds[-1]
        )
        self._interior = (low, high)
        borders = [(self._first, low), (high, self._end)] if high > low else [outputs]
        self._borders = [border for border in borders if border[1] > border[0]]

    def outputs(
        self, slab: torch.Tensor, operation: Operation, reduction: Operation | None = None
    ) -> tuple[torch.Tensor, list[Pieces]]:
        """Return the outputs of this rank, and the planes that came from others.

        Args:
            slab: of this rank.
            operation: from planes, with padding, to the outputs whose windows they hold.
            reduction: of each plane by itself, before `operation`.
        """
        started = self._halo.start(self._exchange, slab, reduction)
        if reduction is not None:
            slab = reduction(slab)
        parts = {}
        if self._has_interior:
            parts[self._interior] = operation(self._padded(self._interior, slab, []))
        received = started.wait()
        for border in self._borders:
            parts[border] = operation(self._padded(border, slab, received))
        ordered = [parts[outputs] for outputs in sorted(parts)]
        whole = ordered[0] if len(ordered) == 1 else torch.cat(ordered, self._exchange.axis)
        return whole, [received]

    def slab_gradient(
        self,
        gradient: torch.Tensor,
        slab: torch.Tensor,
        received: Sequence[Pieces],
        operation: Operation,
        reduction: Operation | None = None,
    ) -> torch.Tensor:
        """Return the gradient of the slab, from that of the outputs of this rank."""
        axis = self._exchange.axis
        reduced = _Result(reduction, slab)
        first, end = self._planes(self._first, self._end)
        shape = list(reduced.value.shape)
        shape[axis] = end - first
        total = slab.new_zeros(shape)

        def add(outputs: tuple[int, int], pieces: Pieces) -> None:
            result = _Result(operation, self._padded(outputs, reduced.value, pieces))
            part = gradient.narrow(axis, outputs[0] - self._first, outputs[1] - outputs[0])
            of_planes = self._halo.unpad(result.input_gradient(part), self._window.needed(*outputs))
            low, high = self._planes(*outputs)
            total.narrow(axis, low - first, high - low).add_(of_planes)

        for border in self._borders:
            add(border, received[0])
        returned = self._halo.start_return(self._exchange, total)
        if self._has_interior:
            add(self._interior, [])
        of_slab = reduced.input_gradient(self._exchange.held_gradient(total))
        for position, piece in returned.wait():
            near = _Result(reduction, self._exchange.held_planes(slab, position, piece))
            self._exchange.held_planes(of_slab, position, piece).add_(near.input_gradient(piece))
        return of_slab

    @property
    def _has_interior(self) -> bool:
        return self._interior[1] > self._interior[0]

    def _planes(self, first: int, end: int) -> tuple[int, int]:
        """Return the input planes of outputs, without those outside the volume."""
        low, high = self._window.needed(first, end)
        low = max(0, low)
        return low, max(low, min(high, self._exchange.bounds[-1]))

    def _padded(self, outputs: tuple[int, int], slab: torch.Tensor, pieces: Pieces) -> torch.Tensor:
        span = self._window.needed(*outputs)
        planes = self._exchange.assemble(slab, pieces, span)
        return self._halo.pad(planes, self._padding_value, span)


SlabPlanes = PlanesAtOnce | InteriorAndBorders


def planes_of_windows(
    halo: Halo,
    windows: Sequence[SlidingWindow | TransposedWindow],
    outputs: Sequence[slice],
    padding_value: float,
) -> SlabPlanes:
    """Return the planes of a layer: with one dimension cut, interior and borders by themselves.

    Args:
        halo: the planes that this rank needs.
        windows: of each spatial dimension.
        outputs: of this rank, likewise; not used if no dimension is cut.
        padding_value: outside the volume.
    """
    if len(halo.axes) == 1:
        axis = halo.axes[0].axis
        window, own = windows[axis], outputs[axis]
        if isinstance(window, SlidingWindow):
            return InteriorAndBorders(halo, window, (own.start, own.stop), padding_value)
    return PlanesAtOnce(halo, padding_value)


class _Result:
    """The result of an operation, computed again in the backward pass; of none: its input."""

    def __init__(self, operation: Operation | None, planes: torch.Tensor) -> None:
        self._operation, self._input = operation, planes.detach()
        self.value = self._input
        if operation is not None:
            self._input.requires_grad_()
            with torch.enable_grad():
                self._output = operation(self._input)
            self.value = self._output.detach()

    def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input, from that of the result."""
        if self._operation is None:
            return gradient
        (of_input,) = torch.autograd.grad(self._output, self._input, gradient)
        return of_input
