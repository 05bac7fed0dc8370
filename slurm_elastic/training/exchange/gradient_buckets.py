"""Sums of gradients that leave in buckets while the backward pass still computes.

Hooks tell when the gradient of a parameter is complete. As soon as all gradients of a bucket are,
it is copied and its sum over the ranks begins; the copies leave the gradients themselves as they
are, local to this rank, until `GradientBuckets.reduce`. All ranks start their buckets in the same
order, so one that is complete early waits for those before it. The last bucket leaves after the
backward pass, with the values that all ranks must agree on.

A gradient that is completed twice in one pass (a layer that several segments of a recomputation
share) may have left incomplete. Ranks learn that from the last bucket, and repeat the sum at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.ranks.group_guard import StartedCollective
from slurm_elastic.training.ranks.process_group import RankGroup

_OPERATION = "adding up the gradients"


@dataclass
class GradientBucket:
    """Memory of gradients that are sent at once.

    Attributes:
        flat: all of them; the last bucket has further values behind them.
        members: positions of the parameters in the order of readiness.
        views: parts of `flat`, one for each.
        missing: gradients that are not complete in this pass.
    """

    flat: torch.Tensor
    members: list[int] = field(default_factory=list)
    views: list[torch.Tensor] = field(default_factory=list)
    missing: int = 0


class GradientBuckets:
    """Mean of the gradients of several ranks, as of `Reducer`, sent during the backward pass.

    Args:
        parameters: in the order in which their gradients become complete, equal on all ranks.
        rank_group: at least two ranks.
        bucket_bytes: a bucket is closed when it has so many bytes of gradients.

    Attributes:
        incomplete: a gradient was completed twice in one pass, on some rank: this training needs
            another schedule.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], rank_group: RankGroup, *, bucket_bytes: int
    ) -> None:
        self.incomplete = False
        self._rank_group = rank_group
        self._parameters = [p for p in parameters if p.requires_grad]
        self._buckets = _allocate(self._parameters, bucket_bytes, rank_group.device)
        tail = self._buckets[-1].flat
        self._tail = tail[tail.numel() - len(self._parameters) - 1 - CONTROL :]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.members}
        self._armed = self._late = False
        self._complete = [False] * len(self._parameters)
        self._started: list[StartedCollective] = []
        self._hooks = [
            p.register_post_accumulate_grad_hook(partial(self._completed, i))
            for i, p in enumerate(self._parameters)
        ]

    @property
    def bytes(self) -> int:
        """Size of a step's sums."""
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

    def reduce(self, control: torch.Tensor, count: int) -> list[float]:
        """Replace sums over this rank's samples by the mean over the whole batch.

        Args:
            control: `CONTROL` float32 values of this rank.
            count: samples of the batch over all ranks.

        Returns:
            The control values, summed over the ranks.
        """
        if not self._armed:  # a rank without samples
            self.begin_last_pass()
        self._armed = False
        flags = [0.0 if p.grad is None else 1.0 for p in self._parameters]
        for bucket in self._buckets[len(self._started) :]:
            if bucket is self._buckets[-1]:
                self._tail[:-CONTROL] = torch.tensor([*flags, float(self._late)])
                self._tail[-CONTROL:] = control
            self._start(bucket)
        self._wait(count)
        *used, late = self._tail[:-CONTROL].tolist()
        if late:
            self.incomplete = True
            return Reducer(self._parameters, self._rank_group).reduce(control, count)
        summed = list(self._tail[-CONTROL:].tolist())
        self._buckets[-1].flat.div_(count)
        for bucket in self._buckets:
            for i, view in zip(bucket.members, bucket.views, strict=True):
                # A parameter that no rank used keeps no gradient: with zeros AdamW would move it.
                self._parameters[i].grad = view if used[i] else None
        return summed

    def _completed(self, index: int, _: torch.Tensor) -> None:
        """Note that a gradient is complete, and start the buckets that are."""
        if not self._armed:
            return
        bucket = self._bucket_of[index]
        if self._complete[index]:
            self._late |= any(bucket is b for b in self._buckets[: len(self._started)])
            return
        self._complete[index] = True
        bucket.missing -= 1
        while len(self._started) < len(self._buckets) - 1:
            first_waiting = self._buckets[len(self._started)]
            if first_waiting.missing:
                return
            self._start(first_waiting)

    def _start(self, bucket: GradientBucket) -> None:
        """Copy the gradients of a bucket, and start their sum."""
        for i, view in zip(bucket.members, bucket.views, strict=True):
            gradient = self._parameters[i].grad
            if gradient is None:
                view.zero_()
            else:
                view.copy_(gradient)
        self._started.append(self._rank_group.start_sum(bucket.flat, _OPERATION))

    def _wait(self, count: int) -> None:
        """Wait until all buckets have arrived, and divide all but the last.

        Raises:
            LinkError: another rank has ended.
            GroupBrokenError: another rank is lost, and the others may go on.
        """
        for number, started in enumerate(self._started):
            try:
                self._rank_group.guard.wait(started)
            except Exception:
                self._rank_group.guard.abandon(self._started[number + 1 :])
                raise
            if number < len(self._buckets) - 1:
                started.tensor.div_(count)


def _allocate(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, device: torch.device
) -> list[GradientBucket]:
    """Return buckets for the parameters in this order; the last one is of float32, with a tail.

    The tail has a flag for each gradient, one for a gradient that was completed too late, and the
    control values.
    """
    closed: list[tuple[torch.dtype, list[int]]] = []
    open_by_type: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for i, parameter in enumerate(parameters):
        kind = parameter.dtype
        open_by_type.setdefault(kind, []).append(i)
        sizes[kind] = sizes.get(kind, 0) + parameter.numel() * parameter.element_size()
        if sizes[kind] >= bucket_bytes:
            closed.append((kind, open_by_type.pop(kind)))
            sizes[kind] = 0
    # Of float32 the last one, as control values are.
    closed += sorted(open_by_type.items(), key=lambda item: item[0] == torch.float32)
    if not closed or closed[-1][0] != torch.float32:
        closed.append((torch.float32, []))
    buckets = []
    for number, (kind, members) in enumerate(closed):
        last = number == len(closed) - 1
        elements = sum(parameters[i].numel() for i in members)
        tail = len(parameters) + 1 + CONTROL if last else 0
        flat = torch.zeros(elements + tail, dtype=kind, device=device)
        parts = flat[:elements].split([parameters[i].numel() for i in members]) if members else ()
        views = [part.view(parameters[i].shape) for i, part in zip(members, parts, strict=True)]
        buckets.append(GradientBucket(flat, members, views))
    return buckets
