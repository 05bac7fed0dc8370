"""Buckets of gradients that leave as soon as they are complete, during the backward pass.

A hook runs when the gradient of a parameter is complete, and copies it, as it is in the processor's
cache then. When all gradients of a bucket are complete, it is sent; the gradients themselves stay
as they are, local to this rank. All ranks start their buckets in the same order, so one that is
complete early waits for those before it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from slurm_elastic.training.exchange.own_parameter import OwnParameter
from slurm_elastic.training.ranks.group_guard import GroupGuard, StartedCollective

#: By which the last buckets may be smaller than others.
_SMALLEST = 8


@dataclass(eq=False, kw_only=True)
class Bucket:
    """Memory of gradients that are sent at once; of one type.

    Attributes:
        flat: all of them.
        members: positions of the parameters.
        views: parts of `flat`, one for each.
        missing: gradients that are not complete in this pass.
    """

    flat: torch.Tensor
    members: list[int]
    views: list[torch.Tensor]
    missing: int = 0


B = TypeVar("B", bound=Bucket)


class OverlappedBuckets(ABC, Generic[B]):
    """Gradients of one rank in buckets, each of which is sent when it is complete.

    Args:
        parameters: those that train, in the order in which their gradients become complete, equal
            on all ranks; or this rank's parts of them.
        buckets: of all parameters, in the order in which they are sent.
        early: how many of them, from the first one, may leave during the backward pass.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter | OwnParameter],
        *,
        buckets: Sequence[B],
        early: int,
    ) -> None:
        self._parameters: list[Any] = list(parameters)
        self._buckets, self._early = list(buckets), early
        self._bucket_of = {i: bucket for bucket in buckets for i in bucket.members}
        self._view_of = {
            i: view for b in buckets for i, view in zip(b.members, b.views, strict=True)
        }
        self._armed = self._late = False
        self._complete: list[bool] = []
        self._started: list[StartedCollective] = []
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(partial(self._completed, i))
            for i, p in enumerate(self._parameters)
        ]

    @property
    def bytes(self) -> int:
        """Bytes that a step sends."""
        return sum(b.flat.numel() * b.flat.element_size() for b in self._buckets)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._armed = False

    def clear(self) -> None:
        """Delete the gradients of the last step."""
        for p in self._parameters:
            p.grad = None

    def begin_last_pass(self) -> None:
        """Begin the backward pass after which this rank's gradients are complete."""
        self._armed, self._late = True, False
        self._complete = [False] * len(self._parameters)
        self._started = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.members)

    def _begin_again(self) -> None:
        """Take all gradients as they are now: some were completed after they had left."""
        self._complete, self._started = [False] * len(self._parameters), []

    def _end_passes(self) -> list[float]:
        """End the passes of a step.

        Returns:
            1.0 for each parameter with a gradient, else 0.0; and at last 1.0 if a gradient was
            completed twice in the pass, after it had left.
        """
        if not self._armed:  # a rank without samples
            self.begin_last_pass()
        self._armed = False
        return [*(0.0 if p.grad is None else 1.0 for p in self._parameters), float(self._late)]

    def _completed(self, index: int, _: torch.Tensor) -> None:
        """Copy a gradient that is complete, and start the buckets that are."""
        if not self._armed:
            return
        bucket, again = self._bucket_of[index], self._complete[index]
        if again and any(bucket is b for b in self._buckets[: len(self._started)]):
            self._late = True
            return
        self._view_of[index].copy_(self._parameters[index].grad)
        if again:
            return
        self._complete[index] = True
        bucket.missing -= 1
        while len(self._started) < self._early:
            first_waiting = self._buckets[len(self._started)]
            if first_waiting.missing:
                return
            self._start(first_waiting)

    def _start(self, bucket: B) -> None:
        """Copy the gradients of a bucket that no hook has copied, and start to send it."""
        for i, view in zip(bucket.members, bucket.views, strict=True):
            if self._complete[i]:
                continue
            gradient = self._parameters[i].grad
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        self._started.append(self._send(bucket))

    def _arrivals(self, guard: GroupGuard, *further: StartedCollective) -> Iterator[B]:
        """Wait for the buckets in the order in which they left; yield each when it has arrived.

        Args:
            guard: of the ranks that exchange them.
            further: collectives begun after the buckets, which are waited for at last.

        Raises:
            LinkError: another rank has ended; what has not arrived is abandoned.
            GroupBrokenError: another rank is lost, and the others may go on; likewise.
        """
        collectives = [*self._started, *further]
        for number, started in enumerate(collectives):
            try:
                guard.wait(started)
            except Exception:
                guard.abandon(collectives[number + 1 :])
                raise
            if number < len(self._buckets):
                yield self._buckets[number]

    @abstractmethod
    def _send(self, bucket: B) -> StartedCollective:
        """Start to send a bucket."""


def group_by_size(
    parameters: Sequence[torch.nn.Parameter | OwnParameter],
    bucket_bytes: int,
    *,
    last: torch.dtype | None = None,
) -> list[tuple[torch.dtype, list[int]]]:
    """Return type and positions of the parameters of each bucket.

    A bucket is closed when it has so many bytes. What leaves last is not hidden behind the backward
    pass, so the last buckets are smaller: one is closed, too, when it has as many bytes as are to
    come, and at least an eighth of the size (our definition).

    >>> eight = [torch.nn.Parameter(torch.zeros(256)) for _ in range(8)]
    >>> [members for _, members in group_by_size(eight, 4096)]
    [[0, 1, 2, 3], [4, 5], [6], [7]]

    Args:
        parameters: in the order in which their gradients become complete.
        bucket_bytes: the size. What is left over, of each type, comes last.
        last: type whose rest is the last of all.
    """
    closed: list[tuple[torch.dtype, list[int]]] = []
    open_by_type: dict[torch.dtype, list[int]] = {}
    sizes: Counter[torch.dtype] = Counter()
    coming: Counter[torch.dtype] = Counter()
    for p in parameters:
        coming[p.dtype] += p.numel() * p.element_size()
    for i, p in enumerate(parameters):
        kind, size = p.dtype, p.numel() * p.element_size()
        open_by_type.setdefault(kind, []).append(i)
        sizes[kind] += size
        coming[kind] -= size
        if sizes[kind] >= min(bucket_bytes, max(bucket_bytes // _SMALLEST, coming[kind])):
            closed.append((kind, open_by_type.pop(kind)))
            sizes[kind] = 0
    return closed + sorted(open_by_type.items(), key=lambda item: item[0] == last)


def views_of(
    flat: torch.Tensor,
    parameters: Sequence[torch.nn.Parameter | OwnParameter],
    members: Sequence[int],
) -> list[torch.Tensor]:
    """Return consecutive parts of a flat tensor in the shapes of these parameters."""
    if not members:
        return []
    counts = [parameters[i].numel() for i in members]
    parts = flat[: sum(counts)].split(counts)
    return [part.view(parameters[i].shape) for i, part in zip(members, parts, strict=True)]
