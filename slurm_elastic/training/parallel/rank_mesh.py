"""Mesh of replicas and of the ranks of a replica, for parameters that both divide."""

from __future__ import annotations

from typing import Any

import torch

from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.ranks.subgroup import subgroup
from slurm_elastic.training.ranks.torch_compat import forget_groups


class RankMesh:
    """Groups of consecutive ranks, each of which is a replica; the constructor is collective.

    Args:
        rank_group: all ranks, connected.
        size: ranks of a replica; there are at least two of them, and of replicas.

    Attributes:
        group: the ranks of this rank's replica.
        group_mesh, replicas_mesh: torch's meshes of these ranks, and of one rank of each replica.
            Torch divides a parameter over both only if they are parts of one mesh.
    """

    def __init__(self, rank_group: RankGroup, size: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - slow

        world = range(rank_group.size)
        self.group = subgroup(rank_group, [world[i : i + size] for i in world[::size]])
        replicas = subgroup(rank_group, [world[i::size] for i in range(size)])
        # Names tell the mesh of one division of a process from that of another.
        names = (f"replicas{rank_group.prefix}", f"tensor{rank_group.prefix}")
        self._mesh: Any = DeviceMesh.from_group(
            [replicas.process_group, self.group.process_group],
            rank_group.device.type,
            mesh=torch.arange(rank_group.size).view(-1, size),
            mesh_dim_names=names,
        )
        self.replicas_mesh, self.group_mesh = (self._mesh[name] for name in names)

    def forget_groups(self) -> None:
        """See `torch_compat.forget_groups`."""
        forget_groups(self._mesh)
