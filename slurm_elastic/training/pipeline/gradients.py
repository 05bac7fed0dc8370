"""Sums of the gradients of parameters that several ranks hold.

Replicas of a stage hold the same parameters, and so do stages with tied weights (an
embedding and the head that shares it). In both cases the gradient is the sum over all
ranks that hold it. A parameter that no rank used keeps no gradient: with zeros AdamW
would still move it.

Either every rank gets the sum, in flat buckets, or the one that owns the parameter does
(`exchange.sliced_exchange`).
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any, Protocol

import torch
from torch import distributed as dist

from slurm_elastic.training.exchange.gradient_reducer import CONTROL
from slurm_elastic.training.exchange.own_parameter import OwnParameter
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange
from slurm_elastic.training.ranks.link_errors import link_errors
from slurm_elastic.training.ranks.subgroup import Subgroup


class GradientSum(Protocol):
    """Sum of the gradients of some parameters over the ranks that hold them."""

    @property
    def bytes(self) -> int:
        """Bytes that this rank contributes to a sum; 0 without other ranks."""

    def reduce(self, divisor: float) -> None:
        """Replace the gradients here by their sum over the ranks, divided."""


class FlatSum:
    """Sum of gradients over the ranks of a group.

    Args:
        slots: the same number and order on every rank: the parameters here whose gradients
            make one sum; more than one where a rank holds both ends of a tie.
        group: of torch.distributed; None: this rank alone.
        device: of the parameters.
        name: for messages.
    """

    def __init__(
        self,
        slots: Sequence[Sequence[OwnParameter]],
        *,
        group: Any,
        device: torch.device,
        name: str,
    ) -> None:
        self._slots = [slot for slot in slots if slot[0].requires_grad]
        self._group = group
        self._name = name
        self._buckets: dict[torch.dtype, torch.Tensor] = {}
        self._views: list[torch.Tensor] = []
        if self._slots and (group is not None or any(len(slot) > 1 for slot in self._slots)):
            self._allocate(device)

    def _allocate(self, device: torch.device) -> None:
        sizes: dict[torch.dtype, int] = {torch.float32: 0}
        for first, *_ in self._slots:
            sizes[first.dtype] = sizes.get(first.dtype, 0) + first.numel()
        gradients = sizes[torch.float32]
        # The float32 bucket ends with the number of ranks that have each gradient.
        sizes[torch.float32] += len(self._slots)
        self._buckets = {t: torch.zeros(n, dtype=t, device=device) for t, n in sizes.items()}
        used: dict[torch.dtype, int] = {}
        for first, *_ in self._slots:
            start = used.get(first.dtype, 0)
            used[first.dtype] = start + first.numel()
            self._views.append(self._buckets[first.dtype][start : used[first.dtype]])
        self._holders = self._buckets[torch.float32][gradients:]

    @property
    def bytes(self) -> int:
        """Size of the all-reduce; 0 without other ranks."""
        if self._group is None:
            return 0
        return sum(b.numel() * b.element_size() for b in self._buckets.values())

    def reduce(self, divisor: float) -> None:
        """Replace the gradients here by their sum over the group, divided.

        Raises:
            LinkError: a rank of the group has ended.
        """
        if not self._buckets:
            for (parameter,) in self._slots:
                if parameter.grad is not None:
                    parameter.grad.div_(divisor)
            return
        present = []
        for slot, view in zip(self._slots, self._views, strict=True):
            view.zero_()
            gradients = [p.grad for p in slot if p.grad is not None]
            for gradient in gradients:
                view.add_(gradient.reshape(-1))
            present.append(float(bool(gradients)))
        self._holders.copy_(torch.tensor(present))
        if self._group is not None:
            for bucket in self._buckets.values():
                with link_errors(f"adding up the gradients of {self._name}"):
                    dist.all_reduce(bucket, group=self._group)
        holders = self._holders.tolist()
        for bucket in self._buckets.values():
            bucket.div_(divisor)
        for slot, view, count in zip(self._slots, self._views, holders, strict=True):
            for index, parameter in enumerate(slot):
                if not count:
                    parameter.grad = None
                    continue
                # Copies of a tie get their own, else clipping would scale it twice.
                summed = view.view(parameter.shape)
                parameter.grad = summed.clone() if index else summed


class SlicedSum:
    """Sum of a stage's gradients, each at the replica that owns the parameter.

    Args:
        module: the stage.
        replicas: the ranks that hold it, at least two.
        excluded: ids of parameters that are added up otherwise.
    """

    def __init__(
        self, module: torch.nn.Module, replicas: Subgroup, *, excluded: Container[int]
    ) -> None:
        self.exchange = SlicedExchange(module, replicas, excluded=excluded)
        self._control = torch.zeros(CONTROL, device=replicas.device)

    @property
    def bytes(self) -> int:
        """See `GradientSum`."""
        return self.exchange.bytes

    def reduce(self, divisor: float) -> None:
        """See `GradientSum`; the gradients of parameters that other ranks own are deleted.

        Raises:
            LinkError: a rank of the group has ended.
            GroupBrokenError: a rank is lost, and the others may go on.
        """
        self.exchange.reduce(self._control, divisor)
