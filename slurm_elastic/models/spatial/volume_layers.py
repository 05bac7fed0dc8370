"""Layers of a network on volumes, and the planes that the ranks of a group send for them.

The surface terms are exact: they count what `slurm_elastic.training.spatial` sends. A rank of a
group of p ranks along one dimension computes 1/p of a layer, but sends as many planes as with two.

>>> from slurm_elastic.core.slab_grid import SlidingWindow
>>> layer = VolumeLayer(
...     "conv", "convolution", channels=(4, 16), extents=((64, 64, 64), (64, 64, 64)),
...     windows=(SlidingWindow(3, 1, 1),) * 3)
>>> layer.halo_values(SlabGrid((2, 1, 1))), layer.halo_values(SlabGrid((4, 1, 1), 1))
(16384, 32768)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from slurm_elastic.core.slab_grid import SlabGrid, SlidingWindow, TransposedWindow, slab_bounds


@dataclass(frozen=True, slots=True)
class VolumeLayer:
    """One layer.

    Attributes:
        name: in the model.
        kind: "convolution", "transposed", "pooling", "normalization", "elementwise", "dense".
        channels: of input and output.
        extents: of input and output; () where there is no volume.
        windows: of convolutions and pooling, for each dimension; () for others.
        parameters: their number.
        operations: floating-point operations of a forward pass of a sample, over the group.
    """

    name: str
    kind: str
    channels: tuple[int, int]
    extents: tuple[tuple[int, ...], tuple[int, ...]]
    windows: tuple[SlidingWindow | TransposedWindow, ...] = ()
    parameters: int = 0
    operations: int = 0

    def halo_values(self, grid: SlabGrid) -> int:
        """Return the number of values of a sample that the rank sends before a forward pass.

        In the backward pass it sends as many gradients as it has received values, none for the
        first layer.
        """
        return sum(self._exchanges(grid, sent=True))

    def returned_values(self, grid: SlabGrid) -> int:
        """Return the number of gradients of a sample that the rank sends in the backward pass."""
        return sum(self._exchanges(grid, sent=False))

    def messages(self, grid: SlabGrid) -> int:
        """Return the messages that the rank sends before a forward pass, for any batch."""
        return len(self._exchanges(grid, sent=True))

    def share(self, grid: SlabGrid) -> float:
        """Return the part of the layer's work that the rank does; 1 where all do the same."""
        outputs = self.extents[1]
        if not self._cut(grid, outputs):
            return 1.0
        slab = grid.slab(outputs)
        own = math.prod(int(part.stop - part.start) for part in slab)
        return own / math.prod(outputs)

    def gathers(self, grid: SlabGrid) -> bool:
        """Return whether the layer takes a volume that is cut and gives a whole one."""
        inputs, outputs = self.extents
        return self._cut(grid, inputs) and not self._cut(grid, outputs)

    def _exchanges(self, grid: SlabGrid, *, sent: bool) -> list[int]:
        """Return the values of each message to or from another rank."""
        inputs = self.extents[0]
        if not self._cut(grid, inputs) or not (self.windows or self.gathers(grid)):
            return []
        sizes = [int(part.stop - part.start) for part in grid.slab(inputs)]
        values = []
        if self.kind == "pooling" and not self.gathers(grid):
            # Dimensions behind the last one that is cut are pooled before.
            behind = grid.cut_axes[-1] + 1 if grid.cut_axes else len(sizes)
            sizes[behind:] = self.extents[1][behind:]
        for axis in grid.cut_axes:
            bounds = slab_bounds(inputs[axis], grid.parts[axis])
            place = grid.coordinates[axis]
            needed = self._needed(grid, axis)
            cross = self.channels[0] * math.prod(sizes) // sizes[axis]
            for other in range(grid.parts[axis]):
                holder, reader = (place, other) if sent else (other, place)
                low = max(bounds[holder], needed[reader][0])
                high = min(bounds[holder + 1], needed[reader][1])
                if other != place and high > low:
                    values.append(cross * (high - low))
            low, high = needed[place]
            sizes[axis] = max(0, min(high, inputs[axis]) - max(low, 0))
        return values

    def _needed(self, grid: SlabGrid, axis: int) -> list[tuple[int, int]]:
        inputs, outputs = self.extents
        if self.gathers(grid):
            return [(0, inputs[axis])] * grid.parts[axis]
        bounds = slab_bounds(outputs[axis], grid.parts[axis])
        window = self.windows[axis]
        spans = pairwise(bounds)
        if isinstance(window, TransposedWindow):
            return [window.needed(first, end, inputs[axis]) for first, end in spans]
        return [window.needed(first, end) for first, end in spans]

    @staticmethod
    def _cut(grid: SlabGrid, extents: Sequence[int]) -> bool:
        return len(extents) == len(grid.parts) and grid.divides(extents)


@dataclass(frozen=True, slots=True)
class KeptVolume:
    """A tensor that is kept from the forward to the backward pass.

    Attributes:
        channels: of it; where there is no volume, its values.
        extents: spatial ones; () where there is no volume.
    """

    channels: int
    extents: tuple[int, ...] = ()

    def values(self, grid: SlabGrid) -> int:
        """Return the number of values of a sample that the rank keeps."""
        if len(self.extents) != len(grid.parts) or not grid.divides(self.extents):
            return self.channels * math.prod(self.extents)
        slab = grid.slab(self.extents)
        return self.channels * math.prod(int(part.stop - part.start) for part in slab)


@dataclass(frozen=True, slots=True)
class VolumeNetwork:
    """Layers of a model on volumes, in the order of its forward pass.

    Attributes:
        layers: all.
        kept: tensors that the backward pass needs, each once.
    """

    layers: tuple[VolumeLayer, ...]
    kept: tuple[KeptVolume, ...]

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return sum(layer.parameters for layer in self.layers)

    @property
    def operations(self) -> int:
        """Floating-point operations of a forward pass of a sample."""
        return sum(layer.operations for layer in self.layers)

    def sent_bytes(self, grid: SlabGrid, *, batch: int = 1, item: int = 4) -> tuple[int, int]:
        """Return the bytes that the rank sends in forward and backward passes of a batch.

        Args:
            grid: place of the rank.
            batch: samples of the group.
            item: bytes of a value.
        """
        forward = sum(layer.halo_values(grid) for layer in self.layers)
        # The input itself needs no gradient.
        backward = sum(layer.returned_values(grid) for layer in self.layers[1:])
        return forward * batch * item, backward * batch * item
