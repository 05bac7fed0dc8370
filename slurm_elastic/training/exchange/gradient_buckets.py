"""Sums of gradients that leave in buckets while the backward pass still computes.

The gradients of all buckets stay local until `GradientBuckets.reduce`. The last bucket leaves after
the backward pass, with the values that all ranks must agree on.

A gradient that is completed twice in one pass (a layer that several segments of a recomputation
share) may have left incomplete. The last bucket carries that to all ranks, which repeat the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurm_elastic.training.exchange.gradient_reducer import CONTROL, Reducer
from slurm_elastic.training.exchange.overlapped_buckets import (
    Bucket,
    OverlappedBuckets,
    group_by_size,
    views_of,
)
from slurm_elastic.training.ranks.group_guard import StartedCollective
from slurm_elastic.training.ranks.process_group import RankGroup

_OPERATION = "adding up the gradients"


class GradientBuckets(OverlappedBuckets[Bucket]):
    """Mean of the gradients of several ranks, as of `Reducer`, sent during the backward pass.

    Args:
        parameters: in the order in which their gradients become complete, equal on all ranks.
        rank_group: at least two ranks.
        bucket_bytes: bytes of gradients at which a bucket is closed.

    Attributes:
        incomplete: a gradient was completed twice in one pass, on some rank: this training needs
            another schedule.
    """

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], rank_group: RankGroup, *, bucket_bytes: int
    ) -> None:
        trained = [p for p in parameters if p.requires_grad]
        buckets = _allocate(trained, bucket_bytes, rank_group.device)
        super().__init__(trained, buckets=buckets, early=len(buckets) - 1)
        self._rank_group = rank_group
        self.incomplete = False
        tail = buckets[-1].flat
        self._tail = tail[tail.numel() - len(trained) - 1 - CONTROL :]

    def reduce(self, control: torch.Tensor, count: int) -> list[float]:
        """Replace sums over this rank's samples by the mean over the whole batch.

        Args:
            control: `CONTROL` float32 values of this rank.
            count: samples of the batch over all ranks.

        Returns:
            The control values, summed over the ranks.
        """
        flags = self._end_passes()
        for bucket in self._buckets[len(self._started) :]:
            if bucket is self._buckets[-1]:
                self._tail[:-CONTROL] = torch.tensor(flags)
                self._tail[-CONTROL:] = control
            self._start(bucket)
        for bucket in self._arrivals(self._rank_group.guard):
            if bucket is not self._buckets[-1]:
                bucket.flat.div_(count)
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

    def _send(self, bucket: Bucket) -> StartedCollective:
        """See `OverlappedBuckets`."""
        return self._rank_group.start_sum(bucket.flat, _OPERATION)


def _allocate(
    parameters: Sequence[torch.nn.Parameter], bucket_bytes: int, device: torch.device
) -> list[Bucket]:
    """Return buckets for the parameters in this order; the last one is of float32, with a tail.

    The tail has a flag for each gradient, one for a gradient that was completed too late, and the
    control values.
    """
    # Of float32 the last one, as control values are.
    groups = group_by_size(parameters, bucket_bytes, last=torch.float32)
    if not groups or groups[-1][0] != torch.float32:
        groups.append((torch.float32, []))
    buckets = []
    for number, (kind, members) in enumerate(groups):
        tail = len(parameters) + 1 + CONTROL if number == len(groups) - 1 else 0
        elements = sum(parameters[i].numel() for i in members)
        flat = torch.zeros(elements + tail, dtype=kind, device=device)
        views = views_of(flat, parameters, members)
        buckets.append(Bucket(flat=flat, members=members, views=views))
    return buckets
