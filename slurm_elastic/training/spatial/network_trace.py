"""Layers of a model on volumes, found by a forward pass without memory and without computing."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from slurm_elastic.core.slab_grid import SlidingWindow, TransposedWindow
from slurm_elastic.models.spatial.volume_layers import KeptVolume, VolumeLayer, VolumeNetwork

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LARGEST = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d)
_MEAN = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
#: Bases of batch and instance normalisation of any dimension.
_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)  # noqa: SLF001 - no public base
#: Activations whose backward pass needs the result instead of the input.
_BY_RESULT = (nn.ReLU, nn.Tanh, nn.Sigmoid, nn.Softmax, nn.LogSoftmax)
#: Layers that need neither.
_BY_NOTHING = (nn.Flatten, nn.Identity, nn.Unflatten)


def trace_network(model: nn.Module, channels: int, extents: Sequence[int]) -> VolumeNetwork:
    """Return the layers of a model, those that are modules.

    Args:
        model: on any device; it is not changed.
        channels: of its input.
        extents: of its input.
    """
    trace = _Trace(len(extents))
    traced = copy.deepcopy(model).to("meta")
    hooks = [
        module.register_forward_hook(trace.note)
        for module in traced.modules()
        if not any(True for _ in module.children())
    ]
    trace.names = {id(module): name for name, module in traced.named_modules()}
    with torch.no_grad():
        traced(torch.empty(2, channels, *extents, device="meta"))
    for hook in hooks:
        hook.remove()
    return VolumeNetwork(tuple(trace.layers), tuple(trace.kept.values()))


class _Trace:
    def __init__(self, dimensions: int) -> None:
        self.layers: list[VolumeLayer] = []
        self.kept: dict[int, KeptVolume] = {}
        self.names: dict[int, str] = {}
        self._dimensions = dimensions
        self._alive: list[torch.Tensor] = []

    def note(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        tensor = inputs[0]
        # Kept alive, as a new tensor could have the same identity else.
        self._alive += [tensor, output]
        if isinstance(module, _BY_RESULT):
            self.kept.setdefault(id(output), self._volume(output))
        elif not isinstance(module, _BY_NOTHING):
            self.kept.setdefault(id(tensor), self._volume(tensor))
        own, result = self._volume(tensor), self._volume(output)
        parameters = sum(p.numel() for p in module.parameters())
        self.layers.append(
            VolumeLayer(
                self.names[id(module)],
                _kind(module),
                (own.channels, result.channels),
                (own.extents, result.extents),
                _windows(module, self._dimensions) if own.extents else (),
                parameters,
                _operations(module, own, result),
            )
        )

    def _volume(self, tensor: torch.Tensor) -> KeptVolume:
        if tensor.dim() != self._dimensions + 2:
            return KeptVolume(tensor[0].numel())
        return KeptVolume(tensor.shape[1], tuple(tensor.shape[2:]))


def _kind(module: nn.Module) -> str:
    for kind, types in (
        ("convolution", _CONVOLUTIONS),
        ("transposed", _TRANSPOSED),
        ("pooling", _LARGEST + _MEAN),
        ("normalization", _NORMS),
        ("dense", (nn.Linear,)),
    ):
        if isinstance(module, types):
            return kind
    return "elementwise"


def _windows(module: Any, dimensions: int) -> tuple[SlidingWindow | TransposedWindow, ...]:
    def each(value: Any) -> list[int]:
        return [value] * dimensions if isinstance(value, int) else list(value)

    if isinstance(module, _TRANSPOSED):
        values = zip(
            module.kernel_size,
            module.stride,
            module.padding,
            module.dilation,
            module.output_padding,
            strict=True,
        )
        return tuple(TransposedWindow(*numbers) for numbers in values)
    if isinstance(module, _CONVOLUTIONS):
        reach = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        padding = {"same": [r // 2 for r in reach], "valid": [0] * dimensions}.get(
            module.padding if isinstance(module.padding, str) else "", module.padding
        )
        return tuple(
            SlidingWindow(k, s, p, d)
            for k, s, p, d in zip(
                module.kernel_size, module.stride, padding, module.dilation, strict=True
            )
        )
    if isinstance(module, _LARGEST + _MEAN):
        return tuple(
            SlidingWindow(k, s, p, d, module.ceil_mode)
            for k, s, p, d in zip(
                each(module.kernel_size),
                each(module.stride),
                each(module.padding),
                each(getattr(module, "dilation", 1)),
                strict=True,
            )
        )
    return ()


def _operations(module: Any, own: KeptVolume, result: KeptVolume) -> int:
    """Return the operations of the layers that take most of them, two for each product."""
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        voxels = own.extents if isinstance(module, _TRANSPOSED) else result.extents
        products = own.channels * result.channels // int(module.groups)
        products *= math.prod(int(k) for k in module.kernel_size)
        return 2 * products * math.prod(voxels)
    if isinstance(module, nn.Linear):
        return 2 * int(module.weight.numel())
    return 0
