"""The ranks that share one sample, and their communication.

All ranks of a group call the same operations in the same order. Messages are posted together,
receptions and transmissions, so that no rank waits for another one that waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from slurm_elastic.core.slab_grid import SlabGrid
from slurm_elastic.training.ranks.link_errors import link_errors

_OPERATION = "exchanging planes with the other ranks of a sample"


class SpatialGroup:
    """One spatial group; see the module.

    Args:
        grid: place of this rank in the group.
        ranks: of torch's default group, those of this group in the order of the grid.
        process_group: of these ranks; None: the default group.

    Attributes:
        sent_bytes: by this rank in messages, so far.
    """

    def __init__(self, grid: SlabGrid, ranks: Sequence[int], process_group: Any = None) -> None:
        if len(ranks) != grid.size:
            raise ValueError(f"ranks: {len(ranks)} is invalid: expected {grid.size}, as the grid")
        self.grid, self._ranks, self._process_group = grid, list(ranks), process_group
        self.sent_bytes = 0

    @property
    def size(self) -> int:
        """Ranks that share a sample."""
        return self.grid.size

    def start(
        self,
        sends: Sequence[tuple[int, torch.Tensor]],
        receives: Sequence[tuple[int, torch.Tensor]],
    ) -> PlaneMessages:
        """Start messages of tensors.

        Args:
            sends: (index of the other rank in the group, tensor) pairs.
            receives: (index, memory) pairs.
        """
        operations = [
            distributed.P2POp(distributed.irecv, memory, self._ranks[i], self._process_group)
            for i, memory in receives
            if memory.numel()
        ]
        kept = [(i, tensor.contiguous()) for i, tensor in sends if tensor.numel()]
        operations += [
            distributed.P2POp(distributed.isend, tensor, self._ranks[i], self._process_group)
            for i, tensor in kept
        ]
        self.sent_bytes += sum(t.numel() * t.element_size() for _, t in kept)
        if not operations:
            return PlaneMessages([], [])
        with link_errors(_OPERATION):
            works = distributed.batch_isend_irecv(operations)
        return PlaneMessages(works, [tensor for _, tensor in kept])

    def add_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by its sum over the group, and return it."""
        if self.size > 1:
            with link_errors("adding up values of the ranks of a sample"):
                distributed.all_reduce(tensor, group=self._process_group)
        return tensor

    def collect(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks of the group, of equal shapes, stacked in order."""
        if self.size == 1:
            return tensor.unsqueeze(0)
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with link_errors("collecting values of the ranks of a sample"):
            distributed.all_gather(parts, tensor.contiguous(), group=self._process_group)
        return torch.stack(parts)


class PlaneMessages:
    """Messages under way."""

    def __init__(self, works: Sequence[Any], kept: Sequence[torch.Tensor]) -> None:
        self._works, self._kept = list(works), list(kept)

    def wait(self) -> None:
        """Wait for all of them."""
        with link_errors(_OPERATION):
            for work in self._works:
                work.wait()
        self._works, self._kept = [], []
