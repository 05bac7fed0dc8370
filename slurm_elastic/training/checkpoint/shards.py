"""Which part of a tensor this rank holds, told without asking the others.

A plain tensor is held whole. A DTensor, such as a parameter under
`fully_shard`, is cut along one or more dimensions as `torch.chunk` cuts, once
for each dimension of its mesh that it is sharded over. Nothing here
communicates, and nothing imports `torch.distributed.tensor`, which takes long:
who has a DTensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from slurm_elastic.core.errors import SlurmElasticError


class ShardError(SlurmElasticError, RuntimeError):
    """A tensor is cut in a way that cannot be told from this rank alone."""


def held(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.Tensor]:
    """Where this rank's part of the tensor begins, and that part.

    Returns:
        One offset per dimension, in elements, and a plain tensor, not copied.

    Raises:
        ShardError: a DTensor with other placements than `Shard` and `Replicate`.
    """
    tensor = tensor.detach()
    if not is_cut(tensor):
        return (0,) * tensor.dim(), tensor
    local: torch.Tensor = tensor.to_local()
    bounds = _bounds(tensor)
    if tuple(local.shape) != tuple(size for _, size in bounds):
        raise ShardError(f"a tensor of {tuple(tensor.shape)} is cut unlike torch.chunk")
    return tuple(start for start, _ in bounds), local


def like(full: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
    """A whole tensor, cut as the live one is, on the live one's device if it is cut.

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
    """Whether it is a DTensor."""
    # While another thread is still importing the module there can be none.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(tensor, kind)


def _bounds(tensor: Any) -> list[tuple[int, int]]:
    """(first, count) in each dimension."""
    bounds = [(0, size) for size in tensor.shape]
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None:
        raise ShardError("this rank is not in the mesh of one of its tensors")
    for i, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            continue
        if type(placement).__name__ != "Shard":
            raise ShardError(
                f"a tensor is placed as {placement}; checkpoints know Shard and Replicate"
            )
        start, count = bounds[placement.dim]
        step = -(-count // tensor.device_mesh.size(i))
        first = min(count, step * coordinate[i])
        last = min(count, step * (coordinate[i] + 1))
        bounds[placement.dim] = (start + first, last - first)
    return bounds


def _slice(full: torch.Tensor, bounds: Sequence[tuple[int, int]]) -> torch.Tensor:
    for dim, (start, count) in enumerate(bounds):
        full = full.narrow(dim, start, count)
    return full
