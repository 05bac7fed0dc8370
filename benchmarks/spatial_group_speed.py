"""Time of a step of a spatial group: work falls with the ranks, surfaces do not.

    layer    max(interior, planes) + borders, where planes travel while the interior is computed
    planes   messages x latency + bytes / bandwidth
    step     all layers, forward and backward, then the exchange of the weights' gradients

The times of layers come from measurements of the whole layer and of a part of it: a constant and a
slope for the share of the work. Our definition, after the parts that the paper's model has.

Its error is large (docs/spatial.md); `benchmarks.spatial` prints it beside the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.models.spatial.volume_layers import VolumeNetwork


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds of a layer's forward and backward pass, by the share of its work.

    Attributes:
        fixed_s: for no work at all.
        whole_s: further seconds for the whole layer.
    """

    fixed_s: float
    whole_s: float

    @classmethod
    def of(cls, whole_s: float, part_s: float, share: float) -> LayerTime:
        """Return the line through a measurement of the whole and one of a part of it."""
        slope = max(0.0, (whole_s - part_s) / (1.0 - share))
        return cls(max(0.0, whole_s - slope), min(slope, whole_s))

    def at(self, share: float) -> float:
        """Return the seconds for a share of the work."""
        return self.fixed_s + self.whole_s * share


@dataclass(frozen=True, slots=True)
class LinkTime:
    """Seconds of messages between the ranks of a group.

    Attributes:
        latency_s: of a message.
        per_byte_s: of a byte.
        overlapped: whether messages travel while the interior is computed; False: they take the
            same processor.
    """

    latency_s: float
    per_byte_s: float
    overlapped: bool = True

    def seconds(self, messages: int, count: int) -> float:
        """Return the seconds of so many messages with so many bytes together."""
        return messages * self.latency_s + count * self.per_byte_s


def step_seconds(
    network: VolumeNetwork,
    parts: tuple[int, ...],
    times: Mapping[str, LayerTime],
    link: LinkTime,
    *,
    batch: int = 1,
    item: int = 4,
    exchange_s: float = 0.0,
) -> float:
    """Return the predicted time of a step on the rank that takes longest.

    Args:
        network: layers.
        parts: ranks of a group along each dimension.
        times: of the layers, for the same batch, by name.
        link: between the ranks.
        batch: samples of the group.
        item: bytes of a value.
        exchange_s: of the weights' gradients, as far as it lengthens a step.
    """
    size = SlabGrid(parts).size
    return exchange_s + max(
        _seconds(network, SlabGrid(parts, index), times, link, batch * item)
        for index in range(size)
    )


def _seconds(
    network: VolumeNetwork,
    grid: SlabGrid,
    times: Mapping[str, LayerTime],
    link: LinkTime,
    per_value: int,
) -> float:
    total = 0.0
    for position, layer in enumerate(network.layers):
        compute_s = times[layer.name].at(layer.share(grid)) if layer.name in times else 0.0
        forward = layer.halo_values(grid) * per_value
        backward = layer.returned_values(grid) * per_value if position else 0
        messages = layer.messages(grid)
        planes_s = link.seconds(messages * (2 if position else 1), forward + backward)
        if layer.kind == "normalization" and grid.size > 1:
            # One message in each pass, from each rank to all others.
            planes_s += 2 * (grid.size - 1) * link.latency_s
        hidden = link.overlapped and bool(layer.windows) and len(grid.cut_axes) == 1
        total += max(compute_s, planes_s) if hidden else compute_s + planes_s
    return total
