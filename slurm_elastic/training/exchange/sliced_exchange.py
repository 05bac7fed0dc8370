"""Gradients summed at the rank that owns a parameter, and weights that this rank sends back.

Each parameter belongs to one rank, which alone keeps its optimizer state and updates it (CoCoNet's
sliced schedule, ZeRO-1). During the backward pass each bucket of gradients is passed on to the
owners as soon as it is complete. After the update the owners send the weights; a module waits for
its own just before its next forward pass, so that they arrive while the layers before it compute.
Both together move as many bytes as an all-reduce.

Where ranks share the weights of layers, the replicas' ranks with the same parts do so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from slurm_elastic.training.exchange.gradient_reducer import CONTROL
from slurm_elastic.training.exchange.overlapped_buckets import (
    Bucket,
    OverlappedBuckets,
    group_by_size,
    views_of,
)
from slurm_elastic.training.exchange.own_parameter import OwnParameter
from slurm_elastic.training.ranks.group_guard import StartedCollective
from slurm_elastic.training.ranks.subgroup import Subgroup

_BUCKET_BYTES = 1 << 20


def owners(parameters: Iterable[torch.nn.Parameter | OwnParameter], ranks: int) -> list[int]:
    """Return the rank that owns each parameter: whole ones, so many bytes to each as possible.

    >>> owners([torch.nn.Parameter(torch.zeros(n)) for n in (1, 4, 2, 3)], 2)
    [0, 0, 1, 1]
    """
    sizes = [p.numel() * p.element_size() for p in parameters]
    owned_bytes, owner = [0] * ranks, [0] * len(sizes)
    for position in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        rank = min(range(ranks), key=lambda r: owned_bytes[r])
        owner[position] = rank
        owned_bytes[rank] += sizes[position]
    return owner


def keep_owned(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, replicas: Subgroup
) -> None:
    """Leave an optimizer those parameters of a model that this rank owns."""
    parameters = list(model.parameters())
    owner_of = owners([OwnParameter(p) for p in parameters], replicas.size)
    owned = {id(p) for p, rank in zip(parameters, owner_of, strict=True) if rank == replicas.rank}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) in owned]


@dataclass(eq=False, kw_only=True)
class SlicedBucket(Bucket):
    """Parameters whose gradients, and later weights, travel at once.

    Attributes:
        flat: gradients of this rank; after the update, weights.
        members: positions of the parameters, by owner.
        parts: of `flat`, one for each owner.
        received: gradients of all ranks for what this rank owns, one row each.
        arriving: weights that are on their way.
    """

    parts: tuple[torch.Tensor, ...]
    received: torch.Tensor
    arriving: list[StartedCollective] = field(default_factory=list)


class SlicedExchange(OverlappedBuckets[SlicedBucket]):
    """Exchange of gradients and weights between replicas with sliced optimizer state.

    Args:
        model: whole, or with this rank's parts of layers.
        replicas: at least two ranks, which hold the same parameters.
        bucket_bytes: a bucket is closed when it has so many bytes.
    """

    #: See `ParallelStrategy`: each rank sends to each other one, wherever it stands.
    crossing_bytes: int | None = None

    def __init__(
        self, model: torch.nn.Module, replicas: Subgroup, *, bucket_bytes: int = _BUCKET_BYTES
    ) -> None:
        self._replicas = replicas
        every = list(model.parameters())
        parts = [OwnParameter(p) for p in every]
        owner_of = owners(parts, replicas.size)
        # Reversed: the last layers are the first of a backward pass.
        trained = [i for i in reversed(range(len(every))) if every[i].requires_grad]
        parameters = [parts[i] for i in trained]
        self._owners = [owner_of[i] for i in trained]
        self._position = {id(every[i]): position for position, i in enumerate(trained)}
        buckets = [
            _allocate(parameters, members, self._owners, replicas)
            for _, members in group_by_size(parameters, bucket_bytes)
        ]
        super().__init__(parameters, buckets=buckets, early=len(buckets))
        self._values = torch.zeros(len(trained) + 1 + CONTROL, device=replicas.device)
        self._needed_by: dict[torch.nn.Module, tuple[SlicedBucket, ...]] = {}
        #: Modules called since the last update, and between the two updates before.
        self._called: set[torch.nn.Module] = set()
        self._called_before: set[torch.nn.Module] = set()
        self._wait_before_use(model)

    def close(self) -> None:
        """Wait for weights, and remove the hooks."""
        self.receive_weights()
        super().close()

    def begin_last_pass(self) -> None:
        """See `OverlappedBuckets`."""
        self.receive_weights()
        super().begin_last_pass()

    def reduce(self, control: torch.Tensor, count: int) -> list[float]:
        """Replace gradients by the mean over the whole batch, at their owners; delete the others.

        Args:
            control: `CONTROL` float32 values of this rank.
            count: samples of the batch over all ranks.

        Returns:
            The control values, summed over the ranks.
        """
        self._values[:-CONTROL] = torch.tensor(self._end_passes())
        self._values[-CONTROL:] = control
        self._pass_on()
        self._replicas.add_up([self._values], "adding up the values of a step")
        *used, late = self._values[:-CONTROL].tolist()
        if late:  # a gradient was completed twice in one pass, and has left too early
            self._started = []
            self._pass_on()
        for bucket in self._buckets:
            own = bucket.received.sum(0).div_(count) if bucket.received.numel() else None
            start = 0
            for i in bucket.members:
                p = self._parameters[i]
                p.grad = None
                if self._owners[i] == self._replicas.rank and own is not None:
                    piece = own[start : start + p.numel()]
                    start += p.numel()
                    # A parameter that no rank used keeps no gradient: AdamW would move it.
                    p.grad = piece.view(p.shape) if used[i] else None
        return list(self._values[-CONTROL:].tolist())

    def add_up(self, value: torch.Tensor) -> float:
        """Return the sum of a value over all ranks."""
        self._replicas.add_up([value], "adding up the norms of gradients")
        return float(value)

    def send_weights(self) -> None:
        """Begin to send updated weights to all ranks; those of the first layers leave first."""
        rank, guard = self._replicas.rank, self._replicas.guard
        self._called_before, self._called = self._called, set()
        for bucket in reversed(self._buckets):
            for i, view in zip(bucket.members, bucket.views, strict=True):
                if self._owners[i] == rank:
                    view.copy_(self._parameters[i].tensor)
            for source, part in zip(self._replicas.ranks, bucket.parts, strict=True):
                if part.numel():
                    begin = partial(
                        torch.distributed.broadcast,
                        part,
                        src=source,
                        group=self._replicas.process_group,
                        async_op=True,
                    )
                    bucket.arriving.append(guard.start(begin, part, "receiving weights"))

    def receive_weights(self) -> None:
        """Wait until all weights have arrived."""
        for bucket in reversed(self._buckets):
            self._receive(bucket)

    def _wait_before_use(self, model: torch.nn.Module) -> None:
        """Let each module wait for its own weights, and a checkpoint for all."""
        self._hooks.append(model.register_forward_pre_hook(self._receive_early))
        position = self._position
        for module in model.modules():
            direct = [
                position[id(p)] for p in module.parameters(recurse=False) if id(p) in position
            ]
            if direct:
                needed = {id(b): b for b in (self._bucket_of[i] for i in direct)}
                self._needed_by[module] = tuple(needed.values())
                self._hooks.append(module.register_forward_pre_hook(self._receive_for))
        self._hooks.append(
            model.register_state_dict_pre_hook(lambda *_, **__: self.receive_weights())
        )

    def _receive_early(self, *_: Any) -> None:
        """Wait for the weights of modules that were not called in the step before.

        Another module may use them directly.
        """
        for module, buckets in self._needed_by.items():
            if module not in self._called_before:
                for bucket in buckets:
                    self._receive(bucket)

    def _receive_for(self, module: torch.nn.Module, _: Any) -> None:
        """Wait for the weights of a module that is about to be used."""
        self._called.add(module)
        for bucket in self._needed_by[module]:
            self._receive(bucket)

    def _receive(self, bucket: SlicedBucket) -> None:
        if not bucket.arriving:
            return
        for started in bucket.arriving:
            self._replicas.guard.wait(started)
        bucket.arriving = []
        with torch.no_grad():
            for i, view in zip(bucket.members, bucket.views, strict=True):
                if self._owners[i] != self._replicas.rank:
                    self._parameters[i].tensor.copy_(view)

    def _send(self, bucket: SlicedBucket) -> StartedCollective:
        """Start to pass the gradients of a bucket on to their owners."""
        received = bucket.received
        begin = partial(
            torch.distributed.all_to_all_single,
            received.view(-1),
            bucket.flat,
            [received.shape[1]] * self._replicas.size,
            [part.numel() for part in bucket.parts],
            group=self._replicas.process_group,
            async_op=True,
        )
        return self._replicas.guard.start(begin, bucket.flat, "adding up gradients")

    def _pass_on(self) -> None:
        """Begin with the buckets that have not left, and wait for all."""
        for bucket in self._buckets[len(self._started) :]:
            self._start(bucket)
        for started in self._started:
            self._replicas.guard.wait(started)


def _allocate(
    parameters: Sequence[OwnParameter],
    unsorted: Sequence[int],
    owner_of: Sequence[int],
    replicas: Subgroup,
) -> SlicedBucket:
    """Return a bucket of the parameters at these positions, which have one type."""
    members = sorted(unsorted, key=lambda i: owner_of[i])
    owned = [0] * replicas.size
    for i in members:
        owned[owner_of[i]] += parameters[i].numel()
    kind = parameters[members[0]].dtype
    flat = torch.zeros(sum(owned), dtype=kind, device=replicas.device)
    return SlicedBucket(
        flat=flat,
        members=members,
        views=views_of(flat, parameters, members),
        parts=flat.split(owned),
        received=flat.new_zeros(replicas.size, owned[replicas.rank]),
    )
