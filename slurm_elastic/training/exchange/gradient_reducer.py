"""Mean of the gradients of all ranks by one all-reduce after the backward pass.

DistributedDataParallel is not used. Its first use costs a second, it averages over ranks where an
uneven split needs a sum over samples, and it would have to be built again when layers freeze.
Instead one flat bucket per data type carries the *sum* of the per-sample gradients; the same
all-reduce carries the control values that all ranks must agree on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from slurm_elastic.training.step_requests import StepRequests

#: Control values of an all-reduce: sum of the losses, two of `StepProfiler`, and the requests.
CONTROL = 3 + len(StepRequests._fields)


class ReplicaRanks(Protocol):
    """The ranks that hold the same parameters: a `RankGroup`, or a `Subgroup`.

    Attributes:
        size: number of ranks.
        device: of the parameters.
    """

    @property
    def size(self) -> int:
        """See the class."""

    @property
    def device(self) -> torch.device:
        """See the class."""

    def add_up(self, tensors: Iterable[torch.Tensor], operation: str) -> None:
        """Replace tensors by their sums over the ranks."""


class Reducer:
    """Mean of the gradients of all ranks, exact for any split of the batch.

    Args:
        parameters: of this rank.
        rank_group: the ranks with the same parameters.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rank_group: ReplicaRanks) -> None:
        self._rank_group = rank_group
        self._parameters = [p for p in parameters if p.requires_grad]
        self._buckets: dict[torch.dtype, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []
        if rank_group.size > 1:
            self._allocate()

    def _allocate(self) -> None:
        sizes: dict[torch.dtype, int] = {torch.float32: 0}
        for p in self._parameters:
            sizes[p.dtype] = sizes.get(p.dtype, 0) + p.numel()
        gradients = sizes[torch.float32]
        # The float32 bucket always exists; it ends with a flag for each gradient, then control.
        sizes[torch.float32] += len(self._parameters) + CONTROL
        device = self._rank_group.device
        self._buckets = {t: torch.zeros(n, dtype=t, device=device) for t, n in sizes.items()}
        used: dict[torch.dtype, int] = {}
        for p in self._parameters:
            start = used.get(p.dtype, 0)
            used[p.dtype] = start + p.numel()
            self._views.append(self._buckets[p.dtype][start : used[p.dtype]].view(p.shape))
        self._tail = self._buckets[torch.float32][gradients:]

    @property
    def bytes(self) -> int:
        """Size of a step's all-reduce; 0 for a single rank."""
        return sum(b.numel() * b.element_size() for b in self._buckets.values())

    @property
    def fits(self) -> bool:
        """Whether there is memory for a reduction, if one is needed."""
        return self._rank_group.size == 1 or bool(self._buckets)

    def clear(self) -> None:
        """Delete the gradients of the last step."""
        for p in self._parameters:
            p.grad = None

    def reduce(self, control: torch.Tensor, count: int) -> list[float]:
        """Replace sums over this rank's samples by the mean over the whole batch.

        Args:
            control: `CONTROL` float32 values of this rank.
            count: samples of the batch over all ranks.

        Returns:
            The control values, summed over the ranks.
        """
        if self._rank_group.size == 1:
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.div_(count)
            return list(control.tolist())
        present = [0.0 if p.grad is None else 1.0 for p in self._parameters]
        for p, view in zip(self._parameters, self._views, strict=True):
            if p.grad is None:
                view.zero_()
            else:
                view.copy_(p.grad)
        self._tail[:-CONTROL] = torch.tensor(present)
        self._tail[-CONTROL:] = control
        self._rank_group.add_up(self._buckets.values(), "adding up the gradients")
        used = self._tail[:-CONTROL].tolist()
        summed = list(self._tail[-CONTROL:].tolist())
        for bucket in self._buckets.values():
            bucket.div_(count)
        # A parameter that no rank used keeps no gradient: with zeros AdamW would still move it.
        for p, view, times in zip(self._parameters, self._views, used, strict=True):
            p.grad = view if times else None
        return summed
