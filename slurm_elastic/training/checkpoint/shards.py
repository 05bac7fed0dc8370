"""The part of a tensor that this rank holds, computed without communication.

A plain tensor is held whole. A DTensor, such as a parameter under
`fully_shard`, is cut along one or more dimensions as `torch.chunk` cuts, once
for each dimension of its mesh that it is sharded over. Nothing here imports
`torch.distributed.tensor`, which is slow: where there is a DTensor it has been
imported.

On a mesh of replicas and tensor-parallel ranks, FSDP2 cuts the part of each
rank again: the cut over the replicas, the first dimension of the mesh, comes
last. Torch's name for that placement is `_StridedShard`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from slurm_elastic.core.errors import SlurmElasticError


class ShardError(SlurmElasticError, RuntimeError):
    """A tensor is sharded in a way that this rank cannot compute alone."""


def local_part(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Return the offset of this rank's part of the tensor, and that part.

    Returns:
        One offset per dimension, in elements, and a plain tensor, not copied.

    Raises:
        ShardError: a DTensor with other placements than `Shard`, `Replicate`, and `_StridedShard`
            of equal parts.
    """
    tensor = tensor.detach()
    if not is_cut(tensor):
        return (0,) * tensor.dim(), tensor
    local: torch.Tensor = tensor.to_local()
    bounds = _bounds(tensor)
    if tuple(local.shape) != tuple(size for _, size in bounds):
        raise ShardError(
            f"a tensor of {tuple(tensor.shape)}: shard of {tuple(local.shape)} is invalid:"
            " expected equal chunks as of torch.chunk"
        )
    return tuple(start for start, _ in bounds), local


def like(full: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """Return the part of a whole tensor that a live one holds, on its device if it is sharded.

    Raises:
        ShardError: see `held`.
    """
    if not is_cut(live) or full.shape != live.shape:
        return full
    tensor: Any = sys.modules["torch.distributed.tensor"]
    mesh: Any = live.device_mesh
    return tensor.DTensor.from_local(
        _slice(full, _bounds(live)).clone().to(mesh.device_type),
        mesh,
        live.placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def is_cut(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a DTensor."""
    # While another thread is still importing the module there can be none.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _bounds(tensor: Any) -> list[tuple[int, int]]:
    """Return (first, count) in each dimension."""
    bounds = [(0, size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardError("a tensor's mesh is invalid: expected one that contains this rank")
    for i in _cuts(tensor):
        dim = tensor.placements[i].dim
        start, count = bounds[dim]
        step = -(-count // tensor.device_mesh.size(i))
        first = min(count, step * coordinate[i])
        last = min(count, step * (coordinate[i] + 1))
        bounds[dim] = (start + first, last - first)
    return bounds


def _cuts(tensor: Any) -> list[int]:
    """Return the dimensions of the mesh that a tensor is cut over, in the order of the cuts.

    Raises:
        ShardError: it has other placements, or `_StridedShard` of unequal parts.
    """
    order: list[int] = []
    for i in reversed(range(tensor.device_mesh.ndim)):
        placement = tensor.placements[i]
        kind = type(placement).__name__
        if placement.is_replicate():
            continue
        if kind == "Shard":
            order.insert(0, i)
        elif kind == "_StridedShard":
            dim, factor = placement.dim, placement.split_factor
            # It cuts the parts that the dimensions of the mesh to the right of it make.
            sizes = [tensor.device_mesh.size(j) for j in order if tensor.placements[j].dim == dim]
            if math.prod(sizes) != factor or tensor.shape[dim] % factor:
                raise ShardError(
                    f"a tensor of {tuple(tensor.shape)}: placement {placement} is invalid: expected"
                    " one that cuts equal parts of another dimension of the mesh"
                )
            order.append(i)
        else:
            raise ShardError(
                f"a tensor's placement {placement} is invalid: expected Shard or Replicate"
            )
    return order


def _slice(full: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    for dim, (start, count) in enumerate(bounds):
        full = full.narrow(dim, start, count)
    return full
