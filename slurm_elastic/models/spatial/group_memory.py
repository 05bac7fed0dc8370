"""Memory of a rank of a spatial group, and the smallest group whose ranks have enough.

Counted are kept activations and the planes of others beside them, the largest activation with
its gradient once more (as a layer's backward pass holds both), and weights, gradients and optimizer
state, which every rank holds whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.models.spatial.volume_layers import VolumeNetwork


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Bytes of the rank that needs most.

    Attributes:
        activations: kept for the backward pass.
        planes: of other ranks, kept beside them.
        working: of the layer that needs most in its backward pass.
        weights: with gradients and optimizer state.
    """

    activations: int
    planes: int
    working: int
    weights: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.activations + self.planes + self.working + self.weights


def group_memory(
    network: VolumeNetwork,
    parts: Sequence[int],
    *,
    batch: int = 1,
    item: int = 4,
    parameter_bytes: int = 16,
) -> GroupMemory:
    """Return the memory of the rank that needs most.

    Args:
        network: layers.
        parts: ranks of a group along each dimension.
        batch: samples that go through a group at once.
        item: bytes of a value of an activation.
        parameter_bytes: of a parameter with gradient and optimizer state; 16: AdamW in float32.
    """
    per_value = batch * item
    ranks = [SlabGrid(tuple(parts), index) for index in range(math.prod(parts))]

    def of_rank(grid: SlabGrid) -> GroupMemory:
        return GroupMemory(
            activations=per_value * sum(volume.values(grid) for volume in network.kept),
            # What a rank receives in the forward pass is what it returns gradients of.
            planes=per_value
            * sum(layer.returned_values(grid) for layer in network.layers if layer.windows),
            working=2 * per_value * max(volume.values(grid) for volume in network.kept),
            weights=parameter_bytes * network.parameters,
        )

    return max((of_rank(grid) for grid in ranks), key=lambda memory: memory.total)


def least_group(
    network: VolumeNetwork, memory_bytes: int, *, most: int = 64, batch: int = 1, item: int = 4
) -> tuple[int, ...] | None:
    """Return the smallest cut along the first dimension that fits into a GPU's memory.

    This is the `unit`, and the least MIN, of a directive. None: none of at most `most` ranks does.

    Args:
        network: layers.
        memory_bytes: of a GPU, as far as the training may use it.
        most: ranks of a group.
        batch: samples that go through a group at once.
        item: bytes of a value of an activation.
    """
    extents = network.layers[0].extents[0]
    rest = (1,) * (len(extents) - 1)
    for count in range(1, min(most, extents[0]) + 1):
        parts = (count, *rest)
        if group_memory(network, parts, batch=batch, item=item).total <= memory_bytes:
            return parts
    return None
