"""Layers on slabs: convolution, pooling, resizing, normalisation, gathering and dropout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional

from slurm_elastic.core.slab_grid import (
    SlidingWindow,
    SpatialCutError,
    in_space,
    slab_bounds,
)
from slurm_elastic.training.spatial.group_normalization import GroupNormalization
from slurm_elastic.training.spatial.halo import Halo
from slurm_elastic.training.spatial.halo_convolution import (
    ConvolutionSettings,
    HaloConvolution,
    SlabConvolution,
)
from slurm_elastic.training.spatial.halo_operation import Gathering, GroupSum, HaloOperation
from slurm_elastic.training.spatial.slab_planes import PlanesAtOnce, planes_of_windows
from slurm_elastic.training.spatial.slab_tensor import SlabTensor, plain, wrapped


def spatial_whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole volume, on every rank; tensors that are not cut as they are."""
    if not isinstance(tensor, SlabTensor):
        return tensor
    group, extents = tensor.group, tensor.extents
    windows = {axis: [(0, extents[axis])] * group.grid.parts[axis] for axis in group.grid.cut_axes}
    slab = plain(tensor)
    return Gathering.apply(slab, Halo(group, extents, windows)) if windows else slab


def slab_of(tensor: torch.Tensor, like: SlabTensor) -> torch.Tensor:
    """Return this rank's part of a plain tensor of a whole volume."""
    parts = like.group.grid.slab(like.extents)
    return tensor[in_space(parts)]


def group_sum(part: torch.Tensor, like: SlabTensor) -> torch.Tensor:
    """Return the sum of a value over the ranks of the group."""
    return GroupSum.apply(part, like.group) if like.group.size > 1 else part


def convolve(
    tensor: SlabTensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
    transposed: bool = False,
    output_padding: Any = 0,
) -> torch.Tensor:
    """Convolve a tensor; arguments as of torch's functions."""
    count = len(tensor.extents)
    kernel = weight.shape[2:]
    settings = ConvolutionSettings(
        stride=_each(stride, count),
        padding=_padding(padding, kernel, stride, dilation),
        dilation=_each(dilation, count),
        output_padding=_each(output_padding, count),
        groups=groups,
        transposed=transposed,
    )
    convolution = SlabConvolution(tensor.group, tensor.extents, kernel, settings)
    slab, weight, bias = _autocast(plain(tensor), weight, bias)
    if tensor.group.grid.divides(convolution.extents):
        output = HaloConvolution.apply(slab, weight, bias, convolution)
        return wrapped(output, tensor.group, convolution.extents)
    return torch.convolution(
        spatial_whole(wrapped(slab, tensor.group, tensor.extents)),
        weight,
        bias,
        settings.stride,
        settings.padding,
        settings.dilation,
        transposed,
        settings.output_padding,
        groups,
    )


def pool_largest(
    tensor: SlabTensor, kernel: Any, stride: Any, padding: Any, dilation: Any, *, ceil_mode: bool
) -> torch.Tensor:
    """Return the largest values of windows."""
    count = len(tensor.extents)
    pool: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)[count - 1]
    windows = _windows(count, kernel, stride, padding, dilation, ceil_mode=ceil_mode)
    extents = tuple(w.output_extent(n) for w, n in zip(windows, tensor.extents, strict=True))
    if not tensor.group.grid.divides(extents):
        whole: torch.Tensor = pool(
            spatial_whole(tensor), kernel, stride, padding, dilation, ceil_mode=ceil_mode
        )
        return whole

    def largest(padded: torch.Tensor, windows: Sequence[SlidingWindow]) -> torch.Tensor:
        dilations = [w.dilation for w in windows]
        result: torch.Tensor = pool(padded, *_sizes(windows), 0, dilations)
        return result

    return _on_windows(tensor, windows, extents, largest, -math.inf)


def pool_mean(
    tensor: SlabTensor,
    kernel: Any,
    stride: Any,
    padding: Any,
    *,
    ceil_mode: bool,
    count_padding: bool,
    divisor: int | None,
) -> torch.Tensor:
    """Return the means of windows."""
    count = len(tensor.extents)
    pool: Any = (functional.avg_pool1d, functional.avg_pool2d, functional.avg_pool3d)[count - 1]
    windows = _windows(count, kernel, stride, padding, 1, ceil_mode=ceil_mode)
    extents = tuple(w.output_extent(n) for w, n in zip(windows, tensor.extents, strict=True))
    if not tensor.group.grid.divides(extents):
        further = {} if divisor is None else {"divisor_override": divisor}
        whole: torch.Tensor = pool(
            spatial_whole(tensor), kernel, stride, padding, ceil_mode, count_padding, **further
        )
        return whole
    slab = plain(tensor)
    factors = []
    for axis, (window, own) in enumerate(
        zip(windows, tensor.group.grid.slab(extents), strict=True)
    ):
        counted = [
            window.kernel
            if divisor is not None
            else _counted(window, i, tensor.extents[axis], count_padding)
            for i in range(own.start, own.stop)
        ]
        shape = [-1 if axis == i else 1 for i in range(count)]
        factors.append(
            slab.new_tensor([window.kernel / number for number in counted]).reshape(shape)
        )

    def mean(padded: torch.Tensor, windows: Sequence[SlidingWindow]) -> torch.Tensor:
        result: torch.Tensor = pool(padded, *_sizes(windows), 0)
        return result

    means = plain(_on_windows(tensor, windows, extents, mean, 0.0))
    for factor in factors:
        if bool((factor != 1).any()):
            means = means * factor
    if divisor is not None:
        means = means * (math.prod(w.kernel for w in windows) / divisor)
    return wrapped(means, tensor.group, extents)


def enlarge(tensor: SlabTensor, factors: Sequence[int]) -> torch.Tensor:
    """Repeat each voxel (the mode "nearest" with whole factors)."""
    grid = tensor.group.grid
    extents = tuple(n * factor for n, factor in zip(tensor.extents, factors, strict=True))
    windows: dict[int, list[tuple[int, int]]] = {}
    for axis in grid.cut_axes:
        bounds = slab_bounds(extents[axis], grid.parts[axis])
        factor = factors[axis]
        windows[axis] = [
            (bounds[i] // factor, (bounds[i + 1] - 1) // factor + 1)
            for i in range(grid.parts[axis])
        ]
    own = grid.slab(extents)

    def operation(extended: torch.Tensor) -> torch.Tensor:
        result = functional.interpolate(extended, scale_factor=[float(f) for f in factors])
        for axis, part in enumerate(own):
            begin = part.start
            if axis in windows:
                begin -= windows[axis][grid.coordinates[axis]][0] * factors[axis]
            result = result.narrow(axis + 2, begin, part.stop - part.start)
        return result

    planes = PlanesAtOnce(Halo(tensor.group, tensor.extents, windows), 0.0)
    output = HaloOperation.apply(plain(tensor), planes, operation, None)
    return wrapped(output, tensor.group, extents)


def normalize(
    tensor: SlabTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    *,
    parts: int,
    over_batch: bool,
    epsilon: float,
    running: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    momentum: float = 0.0,
) -> torch.Tensor:
    """Normalise over the whole volume; `running` mean and variance follow."""
    output, mean, variance, total = GroupNormalization.apply(
        plain(tensor), weight, bias, tensor.group, parts, over_batch, epsilon
    )
    if running[0] is not None and running[1] is not None:
        with torch.no_grad():
            number = float(total.reshape(-1)[0])
            unbiased = variance.reshape(-1) * (number / max(1.0, number - 1))
            running[0].lerp_(mean.reshape(-1).to(running[0].dtype), momentum)
            running[1].lerp_(unbiased.to(running[1].dtype), momentum)
    return wrapped(output, tensor.group, tensor.extents)


def drop(tensor: SlabTensor, probability: float, *, channels: bool) -> torch.Tensor:
    """Set voxels, or whole channels, to zero at random, the same on any number of ranks."""
    slab = plain(tensor)
    if probability <= 0.0:
        return tensor
    if channels:
        shape = [*slab.shape[:2], *[1] * len(tensor.extents)]
        kept = torch.rand(shape, device=slab.device) >= probability
    else:
        kept = _random_slab(tensor, slab) >= probability
    factor = 0.0 if probability >= 1.0 else 1.0 / (1.0 - probability)
    return wrapped(slab * (kept.to(slab.dtype) * factor), tensor.group, tensor.extents)


def _random_slab(tensor: SlabTensor, slab: torch.Tensor) -> torch.Tensor:
    """Return random numbers of [0, 1) that depend on a voxel's place in the volume alone."""
    seed = int(torch.randint(2**62, (1,)))
    first, *others = tensor.group.grid.slab(tensor.extents)
    generator = torch.Generator()
    values = torch.empty(slab.shape)
    shape = [*slab.shape[:2], *tensor.extents[1:]]
    for i, plane in enumerate(range(first.start, first.stop)):
        generator.manual_seed((seed + plane * 0x9E3779B97F4A7C15) % 2**63)
        values[:, :, i] = torch.rand(shape, generator=generator)[in_space(others)]
    return values.to(slab.device)


#: Function from padded planes and the window of each dimension to outputs.
_Pool = Callable[[torch.Tensor, Sequence[SlidingWindow]], torch.Tensor]
_NO_POOLING = SlidingWindow(kernel=1, stride=1, padding=0)


def _on_windows(
    tensor: SlabTensor,
    windows: Sequence[SlidingWindow],
    extents: tuple[int, ...],
    pool: _Pool,
    padding_value: float,
) -> SlabTensor:
    """Return the result of pooling.

    Dimensions behind the last one that is cut are pooled first, so that the planes that are sent
    are smaller. As these dimensions change fastest, the first of several equal largest values is
    the one that it would be on one rank.
    """
    group = tensor.group
    last = max(group.grid.cut_axes, default=len(windows) - 1)
    before = [*windows[: last + 1], *[_NO_POOLING] * (len(windows) - last - 1)]
    behind = [*[_NO_POOLING] * (last + 1), *windows[last + 1 :]]

    def padded_planes(first: int, end: int) -> Halo:
        needed = {}
        for axis in range(first, end):
            bounds = pairwise(slab_bounds(extents[axis], group.grid.parts[axis]))
            needed[axis] = [windows[axis].needed(low, high) for low, high in bounds]
        return Halo(group, tensor.extents, needed)

    halo, around = padded_planes(0, last + 1), padded_planes(last + 1, len(windows))
    planes = planes_of_windows(halo, windows, group.grid.slab(extents), padding_value)

    def reduction(plane: torch.Tensor) -> torch.Tensor:
        return pool(around.pad(plane, padding_value), behind)

    output = HaloOperation.apply(
        plain(tensor),
        planes,
        lambda padded: pool(padded, before),
        reduction if last + 1 < len(windows) else None,
    )
    return wrapped(output, group, extents)


def _sizes(windows: Sequence[SlidingWindow]) -> tuple[list[int], list[int]]:
    """Return the kernel and the stride of each dimension."""
    return [w.kernel for w in windows], [w.stride for w in windows]


def _windows(
    count: int, kernel: Any, stride: Any, padding: Any, dilation: Any, *, ceil_mode: bool
) -> list[SlidingWindow]:
    kernels = _each(kernel, count)
    strides = kernels if stride is None or stride == [] else _each(stride, count)
    return [
        SlidingWindow(k, s, p, d, ceil_mode)
        for k, s, p, d in zip(
            kernels, strides, _each(padding, count), _each(dilation, count), strict=True
        )
    ]


def _counted(window: SlidingWindow, output: int, extent: int, count_padding: bool) -> int:
    """Return the number by which a window's sum is divided, in one dimension."""
    low, high = window.needed(output, output + 1)
    if count_padding:
        return min(high, extent + window.padding) - low
    return max(1, min(high, extent) - max(low, 0))


def _padding(padding: Any, kernel: Sequence[int], stride: Any, dilation: Any) -> tuple[int, ...]:
    count = len(kernel)
    if not isinstance(padding, str):
        return _each(padding, count)
    if padding == "valid":
        return (0,) * count
    reach = [d * (k - 1) for k, d in zip(kernel, _each(dilation, count), strict=True)]
    if any(r % 2 for r in reach) or any(s != 1 for s in _each(stride, count)):
        raise SpatialCutError(
            "model: padding='same' with an even kernel is invalid for a tensor that is cut in"
            " space: expected an odd kernel, or padding in numbers"
        )
    return tuple(r // 2 for r in reach)


def _each(value: Any, count: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * count
    values = tuple(int(v) for v in value)
    return values * count if len(values) == 1 else values


def _autocast(*tensors: torch.Tensor | None) -> Any:
    """Return the tensors in the type in which autocast convolves, if it is on."""
    device = next(t.device.type for t in tensors if t is not None)
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t is None else t.to(dtype) for t in tensors)
