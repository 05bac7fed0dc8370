"""Ranks that share samples, for the tests of spatial groups."""

from __future__ import annotations

import copy
import math

import torch
from torch import distributed, nn

from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.training.spatial import slab_rules  # noqa: F401 - registers the rules
from slurm_elastic.training.spatial.slab_layers import spatial_whole
from slurm_elastic.training.spatial.slab_tensor import slab_tensor
from slurm_elastic.training.spatial.spatial_group import SpatialGroup

CHANNELS = 4
#: Begin of the name of layers whose input has many equal values.
OF_EQUAL = "of equal values"


def spatial_group(rank: int, parts: tuple[int, ...]) -> SpatialGroup:
    """Return the group of all ranks."""
    return SpatialGroup(SlabGrid(parts, rank), range(math.prod(parts)))


def layers() -> dict[str, nn.Module]:
    """Return one layer of each kind and shape, by a name, equal in every process."""
    torch.manual_seed(3)
    convolutions = [
        (1, 1, 0, 1),
        (3, 1, 1, 1),
        (3, 2, 1, 1),
        (3, 1, 2, 2),
        (3, 2, 0, 2),
        (5, 1, 2, 1),
        (2, 2, 0, 1),
        (2, 3, 1, 1),
    ]
    cases: dict[str, nn.Module] = {
        f"convolution {k=} {s=} {p=} {d=}": nn.Conv3d(CHANNELS, 2, k, s, p, d)
        for k, s, p, d in convolutions
    }
    cases["convolution with groups, no bias"] = nn.Conv3d(
        CHANNELS, CHANNELS, 3, padding="same", groups=2, bias=False
    )
    for k, s, p, o in ((2, 2, 0, 0), (3, 2, 1, 1), (3, 1, 1, 0), (3, 3, 0, 2), (1, 2, 0, 1)):
        cases[f"transposed convolution {k=} {s=} {p=} {o=}"] = nn.ConvTranspose3d(
            CHANNELS, 2, k, s, p, o
        )
    for k, s, p, ceil in ((2, 2, 0, False), (3, 2, 1, False), (3, 2, 1, True), (2, 3, 0, True)):
        largest = nn.MaxPool3d(k, s, p, ceil_mode=ceil)
        cases[f"largest {k=} {s=} {p=} {ceil=}"] = largest
        cases[f"{OF_EQUAL}: largest {k=} {s=} {p=} {ceil=}"] = largest
        for counted in (False, True):
            cases[f"mean {k=} {s=} {p=} {ceil=} {counted=}"] = nn.AvgPool3d(
                k, s, p, ceil_mode=ceil, count_include_pad=counted
            )
    return cases | {
        "mean, own divisor": nn.AvgPool3d(3, 2, 1, divisor_override=5),
        "batch norm": nn.BatchNorm3d(CHANNELS),
        "batch norm, evaluating": nn.BatchNorm3d(CHANNELS).eval(),
        "instance norm": nn.InstanceNorm3d(CHANNELS, affine=True),
        "group norm": nn.GroupNorm(2, CHANNELS),
        "nearest": nn.Upsample(scale_factor=2),
        "activations": nn.Sequential(
            nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(inplace=True), nn.LeakyReLU(0.3)
        ),
        "to dense layers": nn.Sequential(nn.MaxPool3d(2), nn.Flatten(), nn.LazyLinear(3)),
        "mean of all": nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(CHANNELS, 3)),
        "skip": Skip(),
    }


class Skip(nn.Module):
    """A U-Net of two levels, whose lower one has fewer planes than some groups have ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(CHANNELS, 3, 3, stride=4, padding=1)
        self.up = nn.ConvTranspose3d(3, 2, 4, stride=4)
        self.last = nn.Conv3d(2 + CHANNELS, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(torch.tanh(self.down(x)))
        return self.last(torch.cat([x, up], dim=1))


def largest_differences(rank: int, parts: tuple[int, ...]) -> dict[str, float]:
    """Return by layer the largest difference from one rank: results, gradients, statistics."""
    group = spatial_group(rank, parts)
    return {name: _difference(group, name, layer) for name, layer in layers().items()}


def _difference(group: SpatialGroup, name: str, layer: nn.Module) -> float:
    extents = (8, 8, 4) if name == "skip" else (9, 7, 5)
    layer = layer.double()
    torch.manual_seed(4)
    volume = torch.randn(2, CHANNELS, *extents, dtype=torch.float64)
    if name.startswith(OF_EQUAL):
        volume = volume.round()
    layer(volume)  # for layers that learn their shape from it
    alone = copy.deepcopy(layer)
    whole = volume.clone().requires_grad_()
    expected = alone(whole)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    slab = group.grid.slab(extents)
    own = volume[(..., *slab)].clone().requires_grad_()
    output = layer(slab_tensor(own, group, extents))
    assert output.shape == expected.shape
    ((output * weights).sum() / group.size).backward()
    differences = [
        _largest(spatial_whole(output.detach()), expected),
        _largest(own.grad, whole.grad[(..., *slab)]),
    ]
    for parameter, other in zip(layer.parameters(), alone.parameters(), strict=True):
        distributed.all_reduce(parameter.grad)
        differences.append(_largest(parameter.grad, other.grad))
    for buffer, other in zip(layer.buffers(), alone.buffers(), strict=True):
        differences.append(_largest(buffer, other))
    return max(differences)


def _largest(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((actual - expected).abs() / (1.0 + expected.abs())).max())
