"""Registration of rules, and what they have in common: slabs among arguments, sums over slabs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from slurm_elastic.core.slab_grid import SpatialCutError
from slurm_elastic.training.spatial import slab_layers
from slurm_elastic.training.spatial.slab_tensor import RULES, SlabTensor, plain, wrapped


def rule(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the rule of these names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            RULES[name] = function
        return function

    return register


def first_slab(values: Any) -> SlabTensor:
    """Return the first slab among arguments.

    Raises:
        SpatialCutError: there is none.
    """
    for value in values:
        if isinstance(value, SlabTensor):
            return value
        if isinstance(value, list | tuple):
            for item in value:
                if isinstance(item, SlabTensor):
                    return item
    raise SpatialCutError("model: no tensor that is cut in space is among the arguments")


def input_slab(value: Any) -> SlabTensor:
    """Return the input of a layer.

    Raises:
        SpatialCutError: it is no slab.
    """
    if not isinstance(value, SlabTensor):
        raise SpatialCutError(
            "model: a tensor that is cut in space as weight or second argument of a layer is"
            " invalid: expected it as the input"
        )
    return value


def reduced(tensor: SlabTensor, dims: list[int], *, keep: bool, mean: bool) -> torch.Tensor:
    """Return the sum or mean over dimensions: of the whole volume, if they are spatial.

    Args:
        tensor: to be summed.
        dims: dimensions of the volume.
        keep: whether they stay, of size 1.
        mean: divide by the number of elements.

    Raises:
        SpatialCutError: some of the spatial dimensions are among them, and some are not.
    """
    shape = tensor.volume_shape
    rank, count = len(shape), len(tensor.extents)
    dims = sorted({dim % rank for dim in dims})
    spatial = [dim for dim in dims if dim >= rank - count]
    result = plain(tensor).sum(dims, keepdim=keep)
    if spatial and len(spatial) < count:
        raise SpatialCutError(
            "model: a sum or mean over some of the spatial dimensions of a tensor that is cut in"
            " space is invalid: expected all of them or none"
        )
    if spatial:
        result = slab_layers.group_sum(result, tensor)
    if mean:
        number = 1
        for dim in dims:
            number *= shape[dim]
        result = result / number
    return result if spatial else wrapped(result, tensor.group, tensor.extents)
