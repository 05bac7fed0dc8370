"""Some ranks of the group, with collectives of their own.

All of them call the same collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch

from slurm_elastic.training.ranks.group_guard import StartedCollective
from slurm_elastic.training.ranks.link_errors import link_errors
from slurm_elastic.training.ranks.process_group import RankGroup


class Subgroup:
    """Ranks that share something; see the module.

    Args:
        rank_group: all ranks.
        ranks: of the subgroup, this one among them.
        process_group: of these ranks; None for a single one, and for all.

    Attributes:
        ranks: as given.
        process_group: as given.
        device: of the model.
        guard: of all ranks.
    """

    def __init__(self, rank_group: RankGroup, ranks: Sequence[int], process_group: Any) -> None:
        self.ranks, self.process_group = tuple(ranks), process_group
        self.device = rank_group.device
        self.guard = rank_group.guard
        self._rank = self.ranks.index(rank_group.rank)

    @property
    def rank(self) -> int:
        """Place of this process in the subgroup."""
        return self._rank

    @property
    def size(self) -> int:
        """Number of its ranks."""
        return len(self.ranks)

    def start_sum(self, tensor: torch.Tensor, operation: str) -> StartedCollective:
        """Start to replace a tensor by its sum over the subgroup; `wait` must follow."""
        begin = partial(
            torch.distributed.all_reduce, tensor, group=self.process_group, async_op=True
        )
        return self.guard.start(begin, tensor, operation)

    def wait(self, started: StartedCollective) -> None:
        """Wait for the end of a collective.

        Raises:
            LinkError: another rank has ended.
            GroupBrokenError: another rank is lost, and the others may go on.
        """
        self.guard.wait(started)

    def add_up(self, tensors: Iterable[torch.Tensor], operation: str) -> None:
        """Replace tensors by their sums over the subgroup; errors as of `wait`."""
        for tensor in tensors:
            if self.size > 1:
                self.wait(self.start_sum(tensor, operation))

    def broadcast(self, tensors: Iterable[torch.Tensor], operation: str) -> None:
        """Set tensors to the values of the subgroup's first rank; errors as of `wait`."""
        for tensor in tensors:
            if self.size > 1:
                begin = partial(
                    torch.distributed.broadcast,
                    tensor,
                    src=self.ranks[0],
                    group=self.process_group,
                    async_op=True,
                )
                self.guard.run(begin, tensor, operation)

    def collect(self, tensor: torch.Tensor, operation: str) -> list[torch.Tensor]:
        """Return the tensors of all ranks, of equal shapes, in order; errors as of `wait`."""
        if self.size == 1:
            return [tensor]
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        begin = partial(
            torch.distributed.all_gather, parts, tensor, group=self.process_group, async_op=True
        )
        self.guard.run(begin, tensor, operation)
        return parts


def subgroup(rank_group: RankGroup, divisions: Iterable[Sequence[int]]) -> Subgroup:
    """Return the subgroup of this rank; collective, as all ranks make all groups.

    Args:
        rank_group: all ranks, connected.
        divisions: the ranks of each subgroup, the same on all ranks; together all ranks.

    Raises:
        ValueError: none contains this rank.
    """
    own: Subgroup | None = None
    for ranks in divisions:
        process_group = None
        if len(ranks) > 1:
            with link_errors("forming a group of some of the ranks"):
                process_group = torch.distributed.new_group(list(ranks))
        if rank_group.rank in ranks:
            own = Subgroup(rank_group, ranks, process_group)
    if own is None:
        raise ValueError(f"divisions: expected one that contains rank {rank_group.rank}")
    return own
