"""Gradients summed at the rank that owns a parameter, and weights that this rank sends back.

Each parameter belongs to one rank, which alone keeps its optimizer state and updates it (CoCoNet's
sliced schedule, ZeRO-1). During the backward pass each bucket of gradients is passed on to the
owners as soon as it is complete. After the update the owners send the weights; a module waits for
those that other ranks own just before its next forward pass, so that they arrive while the layers
before it compute. Both together move as many bytes as an all-reduce. Buckets are large enough that
most have parameters of every rank: then each link carries data both ways at once.

Where ranks share the weights of layers, the replicas' ranks with the same parts do so. In place of
a whole model it may be a stage of a pipeline that the ranks are replicas of.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
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

#: Of each rank's parameters in a bucket.
_BUCKET_BYTES = 1 << 20
#: By which a parameter must be smaller than another one of its module to go to the same rank.
_SMALLER = 16


def owners(
    parameters: Iterable[torch.nn.Parameter | OwnParameter],
    ranks: int,
    *,
    modules: Iterable[Sequence[int]] = (),
) -> list[int]:
    """Return the rank that owns each parameter: a whole one, so that each owns about as many bytes.

    A rank owns at most an equal share and the largest parameter, or with `modules` 1.125 times
    that. So one dominant parameter exceeds the equal share: with 60 % of all bytes it leaves its
    owner among four ranks with 35 % of all bytes more than a quarter.

    Args:
        parameters: of a model.
        ranks: number of ranks.
        modules: positions of the parameters of each module; its small ones go with its largest, so
            that it waits for one rank only.

    >>> four = [torch.nn.Parameter(torch.zeros(n)) for n in (1, 40, 20, 30)]
    >>> owners(four, 2)
    [0, 0, 1, 1]
    >>> owners(four, 2, modules=[(0, 2), (1, 3)])
    [1, 0, 1, 1]
    >>> dominant = [torch.nn.Parameter(torch.zeros(n)) for n in (10, 60, 20, 10)]
    >>> owners(dominant, 4)
    [2, 0, 1, 3]
    """
    sizes = [p.numel() * p.element_size() for p in parameters]
    leader = list(range(len(sizes)))
    for members in modules:
        largest = max(members, key=lambda i: sizes[i])
        for i in members:
            if leader[i] == i and sizes[i] * _SMALLER <= sizes[largest]:
                leader[i] = largest
    led: dict[int, list[int]] = {}
    for i, position in enumerate(leader):
        led.setdefault(position, []).append(i)
    owned_bytes, owner = [0] * ranks, [0] * len(sizes)
    for position in sorted(led, key=lambda i: -sizes[i]):
        rank = min(range(ranks), key=lambda r: owned_bytes[r])
        for i in led[position]:
            owner[i] = rank
            owned_bytes[rank] += sizes[i]
    return owner


def owners_of(model: torch.nn.Module, ranks: int) -> list[int]:
    """Return the rank that owns each parameter of a model; see `owners`."""
    parameters = list(model.parameters())
    position = {id(p): i for i, p in enumerate(parameters)}
    direct = [[position[id(p)] for p in m.parameters(recurse=False)] for m in model.modules()]
    parts = [OwnParameter(p) for p in parameters]
    return owners(parts, ranks, modules=[members for members in direct if members])


def keep_owned(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module,
    *,
    rank: int,
    ranks: int,
    excluded: Container[int] = (),
) -> None:
    """Remove the parameters of a model from an optimizer that other ranks own.

    Args:
        optimizer: of these parameters, and perhaps others.
        model: whole, or a stage.
        rank: this one, of those that hold the model.
        ranks: their number.
        excluded: ids of parameters that every rank updates.
    """
    pairs = zip(model.parameters(), owners_of(model, ranks), strict=True)
    others = {id(p) for p, owner in pairs if owner != rank and id(p) not in excluded}
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if id(p) not in others]


@dataclass(eq=False, kw_only=True)
class SlicedBucket(Bucket):
    """Parameters whose gradients, and later weights, are sent together.

    Attributes:
        flat: gradients of this rank; after the update, weights.
        members: positions of the parameters, by owner.
        parts: parts of `flat`, one for each owner.
        owned: elements of this rank's part.
        received: gradients of all ranks for what this rank owns, one row each; None: not yet.
        arriving: weights that are on their way, by owner.
    """

    parts: tuple[torch.Tensor, ...]
    owned: int
    received: torch.Tensor | None = None
    arriving: dict[int, StartedCollective] = field(default_factory=dict)


class SlicedExchange(OverlappedBuckets[SlicedBucket]):
    """Exchange of gradients and weights between replicas with sliced optimizer state.

    Args:
        model: whole or a stage, or with this rank's parts of layers.
        replicas: at least two ranks, which hold the same parameters.
        excluded: ids of parameters that are exchanged otherwise.
        bucket_bytes: a bucket is closed when it has so many bytes for each rank.
    """

    #: See `ParallelStrategy`: each rank sends to each other one, wherever it stands.
    crossing_bytes: int | None = None

    def __init__(
        self,
        model: torch.nn.Module,
        replicas: Subgroup,
        *,
        excluded: Container[int] = (),
        bucket_bytes: int = _BUCKET_BYTES,
    ) -> None:
        self._replicas = replicas
        every = list(model.parameters())
        parts = [OwnParameter(p) for p in every]
        owner_of = owners_of(model, replicas.size)
        # Reversed: the last layers are the first of a backward pass.
        trained = [
            i
            for i in reversed(range(len(every)))
            if every[i].requires_grad and id(every[i]) not in excluded
        ]
        parameters = [parts[i] for i in trained]
        self._owners = [owner_of[i] for i in trained]
        self._position = {id(every[i]): position for position, i in enumerate(trained)}
        buckets = [
            _allocate(parameters, members, self._owners, replicas)
            for _, members in group_by_size(parameters, bucket_bytes * replicas.size)
        ]
        super().__init__(parameters, buckets=buckets, early=len(buckets))
        self._values = torch.zeros(len(trained) + 1 + CONTROL, device=replicas.device)
        #: Buckets whose weights of some owner each module uses, but for this rank's own.
        self._needed_by: dict[torch.nn.Module, list[tuple[SlicedBucket, int]]] = {}
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

    def reduce(self, control: torch.Tensor, count: float) -> list[float]:
        """Replace gradients by the mean over the whole batch, at their owners; delete the others.

        Args:
            control: `CONTROL` float32 values of this rank.
            count: samples of the batch over all ranks, or another divisor.

        Returns:
            The control values, summed over the ranks.
        """
        self._values[:-CONTROL] = torch.tensor(self._end_passes())
        self._values[-CONTROL:] = control
        self._start_rest()
        # Beside the last bucket, so that the values do not lengthen the step.
        values = self._replicas.start_sum(self._values, "adding up the values of a step")
        means = self._receive_means(count, values)
        *used, late = self._values[:-CONTROL].tolist()
        if late:  # a gradient was completed twice in one pass, and has left too early
            self._begin_again()
            self._start_rest()
            means = self._receive_means(count)
        self._started = []  # their handles keep what has arrived
        for bucket, own in zip(self._buckets, means, strict=True):
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
            for owner, part in enumerate(bucket.parts):
                if part.numel():
                    begin = partial(
                        torch.distributed.broadcast,
                        part,
                        src=self._replicas.ranks[owner],
                        group=self._replicas.process_group,
                        async_op=True,
                    )
                    bucket.arriving[owner] = guard.start(begin, part, "receiving weights")

    def receive_weights(self) -> None:
        """Wait until all weights have arrived, those of this rank at the others."""
        for bucket in reversed(self._buckets):
            for owner in list(bucket.arriving):
                self._receive(bucket, owner)

    def _wait_before_use(self, model: torch.nn.Module) -> None:
        """Let each module wait for its own weights, and a checkpoint for all."""
        self._hooks.append(model.register_forward_pre_hook(self._receive_early))
        position = self._position
        for module in model.modules():
            direct = [
                position[id(p)] for p in module.parameters(recurse=False) if id(p) in position
            ]
            if direct:
                uses = [(self._bucket_of[i], self._owners[i]) for i in direct]
                self._needed_by[module] = [
                    use for use in dict.fromkeys(uses) if use[1] != self._replicas.rank
                ]
                self._hooks.append(module.register_forward_pre_hook(self._receive_for))
        self._hooks.append(
            model.register_state_dict_pre_hook(lambda *_, **__: self.receive_weights())
        )

    def _receive_early(self, *_: Any) -> None:
        """Wait for the weights of modules that were not called in the step before.

        Another module may use them directly.
        """
        for module, needed in self._needed_by.items():
            if module not in self._called_before:
                for bucket, owner in needed:
                    self._receive(bucket, owner)

    def _receive_for(self, module: torch.nn.Module, _: Any) -> None:
        """Wait for the weights of a module that is about to be used."""
        self._called.add(module)
        for bucket, owner in self._needed_by[module]:
            self._receive(bucket, owner)

    def _receive(self, bucket: SlicedBucket, owner: int) -> None:
        """Wait until the weights of one owner in a bucket have arrived."""
        started = bucket.arriving.pop(owner, None)
        if started is None:
            return
        self._replicas.guard.wait(started)
        if owner == self._replicas.rank:
            return
        with torch.no_grad():
            for i, view in zip(bucket.members, bucket.views, strict=True):
                if self._owners[i] == owner:
                    self._parameters[i].tensor.copy_(view)

    def _send(self, bucket: SlicedBucket) -> StartedCollective:
        """Start to pass the gradients of a bucket on to their owners."""
        # Not kept: it would take as much memory as all gradients during the forward pass.
        received = bucket.flat.new_empty(self._replicas.size, bucket.owned)
        bucket.received = received
        begin = partial(
            torch.distributed.all_to_all_single,
            received.view(-1),
            bucket.flat,
            [bucket.owned] * self._replicas.size,
            [part.numel() for part in bucket.parts],
            group=self._replicas.process_group,
            async_op=True,
        )
        return self._replicas.guard.start(begin, bucket.flat, "adding up gradients")

    def _start_rest(self) -> None:
        """Start the buckets that have not left during the backward pass."""
        for bucket in self._buckets[len(self._started) :]:
            self._start(bucket)

    def _receive_means(
        self, count: float, *further: StartedCollective
    ) -> list[torch.Tensor | None]:
        """Wait for all buckets, and for further collectives begun after them.

        The mean of a bucket is formed while the next ones are on their way.

        Returns:
            By bucket the mean gradients of what this rank owns; None where it owns nothing.
        """
        means = []
        for bucket in self._arrivals(self._replicas.guard, *further):
            received, bucket.received = bucket.received, None
            owns = received is not None and bucket.owned
            means.append(_mean(received, count) if owns else None)
        return means


def _mean(gradients: torch.Tensor, count: float) -> torch.Tensor:
    """Return the sum of the rows, divided by a number; formed in the first row."""
    own, *others = gradients
    for other in others:
        own.add_(other)
    return own.div_(count)


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
        owned=owned[replicas.rank],
    )
