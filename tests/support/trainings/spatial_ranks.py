"""Ranks that share samples, for the tests of spatial groups."""

from __future__ import annotations

import copy
import math
from typing import Any

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
#: Layer for other extents than `EXTENTS`.
SKIP = "skip"
EXTENTS = (9, 7, 5)


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
        "nearest, factors": nn.Upsample(scale_factor=(3.0, 2.0, 1.0)),
        "nearest, size": nn.Upsample((9, 14, 15)),
        "activations": nn.Sequential(
            nn.Conv3d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU(inplace=True), nn.LeakyReLU(0.3)
        ),
        "to dense layers": nn.Sequential(nn.MaxPool3d(2), nn.Flatten(), nn.LazyLinear(3)),
        "mean of all": nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(CHANNELS, 3)),
        SKIP: Skip(
            nn.Conv3d(CHANNELS, 3, 3, stride=4, padding=1), nn.ConvTranspose3d(3, 2, 4, stride=4)
        ),
        "skip of odd extents": Skip(
            nn.Conv3d(CHANNELS, 3, 3, stride=2, padding=1),
            nn.ConvTranspose3d(3, 2, 3, stride=2, padding=1),
        ),
    }


def few_layers() -> dict[str, nn.Module]:
    """Return layers for groups of many ranks, by a name, equal in every process."""
    torch.manual_seed(3)
    return {
        "convolution": nn.Conv3d(CHANNELS, 2, 3, padding=1),
        "convolution, two planes": nn.Conv3d(CHANNELS, 2, 5, padding=2),
        "convolution, stride": nn.Conv3d(CHANNELS, 2, 3, 2, 1),
        "convolution, dilation": nn.Conv3d(CHANNELS, 2, 3, padding=2, dilation=2),
        "transposed convolution": nn.ConvTranspose3d(CHANNELS, 2, 3, 2, 1, 1),
        "largest": nn.MaxPool3d(3, 2, 1),
        "mean": nn.AvgPool3d(3, 2, 1),
        "batch norm": nn.BatchNorm3d(CHANNELS),
        "to dense layers": nn.Sequential(nn.MaxPool3d(2), nn.Flatten(), nn.LazyLinear(3)),
    }


def layers_of(dimensions: int) -> dict[str, nn.Module]:
    """Return layers for samples of one or two dimensions, by a name, equal in every process."""
    torch.manual_seed(3)

    def of(kind: str) -> Any:
        return getattr(nn, f"{kind}{dimensions}d")

    return {
        "convolution": of("Conv")(CHANNELS, 2, 3, padding=1),
        "convolution, stride": of("Conv")(CHANNELS, 2, 5, 2, 2),
        "convolution, dilation": of("Conv")(CHANNELS, 2, 3, padding=2, dilation=2),
        "transposed convolution": of("ConvTranspose")(CHANNELS, 2, 3, 2, 1, 1),
        "largest": of("MaxPool")(3, 2, 1),
        f"{OF_EQUAL}: largest": of("MaxPool")(3, 2, 1),
        "mean": of("AvgPool")(3, 2, 1),
        "mean, padding not counted": of("AvgPool")(2, 2, 1, count_include_pad=False),
        "batch norm": of("BatchNorm")(CHANNELS),
        "instance norm": of("InstanceNorm")(CHANNELS, affine=True),
        "nearest": nn.Upsample(scale_factor=2),
        "dropped": of("Dropout")(0.0) if dimensions > 1 else nn.Dropout(0.0),
        "to dense layers": nn.Sequential(of("MaxPool")(2), nn.Flatten(), nn.LazyLinear(3)),
        "mean of all": nn.Sequential(
            of("AdaptiveAvgPool")(1), nn.Flatten(), nn.Linear(CHANNELS, 3)
        ),
    }


class Skip(nn.Module):
    """A U-Net of two levels.

    Args:
        down: to the lower level. With a stride of 4 that has fewer planes than some groups have
            ranks.
        up: back from it.
    """

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.up = down, up
        self.last = nn.Conv3d(2 + CHANNELS, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(torch.tanh(self.down(x)))
        return self.last(torch.cat([x, up], dim=1))


def largest_differences(
    rank: int, cuts: list[tuple[int, ...]]
) -> list[tuple[bool, dict[str, float]]]:
    """Return the largest differences from one rank: of results, gradients and statistics.

    Args:
        rank: of this process.
        cuts: of groups of all ranks.

    Returns:
        For each cut and type whether it is float32, and the differences by layer.
    """
    results = []
    for cut in cuts:
        group, ranks = spatial_group(rank, cut), math.prod(cut)
        # Every layer once in float32, too, and where three dimensions are cut.
        for dtype in (torch.float64, torch.float32) if ranks in {2, 8} else (torch.float64,):
            named = layers_of(len(cut)) if len(cut) < 3 else layers() if ranks < 8 else few_layers()
            differences = {
                name: _difference(group, name, layer, dtype) for name, layer in named.items()
            }
            results.append((dtype == torch.float32, differences))
    return results


def _difference(group: SpatialGroup, name: str, layer: nn.Module, dtype: torch.dtype) -> float:
    extents = (8, 8, 4) if name == SKIP else EXTENTS[: len(group.grid.parts)]
    layer = layer.to(dtype)
    torch.manual_seed(4)
    volume = torch.randn(2, CHANNELS, *extents, dtype=dtype)
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
    sizes = expected.abs()
    if expected.dtype == torch.float32:  # small sums of large terms are rounded as the large ones
        sizes = sizes.max()
    return float(((actual - expected).abs() / (1.0 + sizes)).max())
