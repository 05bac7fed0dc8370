"""Time of a step of a spatial group: layers on a rank's slab, and the planes that it exchanges.

    layer    its passes on the slab of one rank: the interior, the borders, and the copies that join
             them with planes of others; measured without the other ranks
    planes   messages x latency + bytes / bandwidth
    step     all layers and planes, forward and backward

Layers are measured on the slab itself and not scaled by its share of the volume: libraries choose
another kernel for another shape, so that halves of a convolution are not half as long. Our
definition, after the parts that the paper's model has. Planes are added, as seconds of processors
are compared, which those of messages take, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.models.spatial.volume_layers import VolumeNetwork


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds of messages between the ranks of a group.

    Attributes:
        latency_s: of a message.
        per_byte_s: of a byte.
    """

    latency_s: float
    per_byte_s: float

    def seconds(self, messages: int, count: int) -> float:
        """Return the seconds of so many messages with so many bytes together."""
        return messages * self.latency_s + count * self.per_byte_s


def plane_seconds(
    network: VolumeNetwork, grid: SlabGrid, link: LinkTime, *, item: int = 4
) -> float:
    """Return the predicted time of a rank's messages in a step with one sample.

    Args:
        network: layers.
        grid: place of the rank.
        link: between the ranks.
        item: bytes of a value.
    """
    total = 0.0
    for position, layer in enumerate(network.layers):
        values = layer.halo_values(grid) + (layer.returned_values(grid) if position else 0)
        # The input of the network needs no gradient.
        total += link.seconds(layer.messages(grid) * (2 if position else 1), values * item)
        if layer.kind == "normalization" and grid.size > 1:
            # One message in each pass, from each rank to all others.
            total += 2 * (grid.size - 1) * link.latency_s
    return total


def step_seconds(
    network: VolumeNetwork, grid: SlabGrid, layer_seconds: Sequence[float], link: LinkTime
) -> float:
    """Return the predicted time of a step with one sample.

    Args:
        network: layers.
        grid: place of the rank, one that has neighbours on both sides if any has.
        layer_seconds: of each layer on the slab of that rank.
        link: between the ranks.
    """
    return sum(layer_seconds) + plane_seconds(network, grid, link)
