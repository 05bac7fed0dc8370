"""Samples of each optimisation step, and the share of each rank.

One global cursor is the position of the job. The order of an epoch depends on
the seed and the epoch alone, every step takes the next `batch` samples of it,
and the ranks split those. So a job that changes its number of ranks between two
steps trains on the same batches in the same order.

>>> sampler = Sampler(samples=10, global_batch=4, epochs=1, seed=0)
>>> splits = [EvenSplit(rank=rank, world_size=3) for rank in range(3)]
>>> [len(share.indices) for share in sampler.shares(Cursor(), splits[0])]
[1, 1, 0]
>>> sorted(i for split in splits for s in sampler.shares(Cursor(), split) for i in s.indices)
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class Cursor:
    """Position in a training.

    Attributes:
        step: optimisation steps done.
        epoch: the epoch that the next step belongs to.
        consumed: samples of that epoch already trained on.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class MicroBatchSlice:
    """A micro-batch that this rank loads.

    Attributes:
        number: index among the micro-batches of the step.
        span: its samples, as positions within the step.
        counts: whether this rank computes its loss; of ranks that share samples, the first one.
        padding: its loss has no weight; it makes the number of passes equal to that of others.
    """

    number: int
    span: range
    counts: bool = True
    padding: bool = False


class BatchSplit(Protocol):
    """Division of a step's samples into the micro-batches of one rank."""

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """Return this rank's micro-batches of a step of `count` samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvenSplit:
    """Equal shares for all ranks, up to one sample, in micro-batches of at most `micro`.

    Attributes:
        rank, world_size: index and number of the shares.
        micro: most samples of a micro-batch; None: no limit.
    """

    rank: int
    world_size: int
    micro: int | None = None

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        first, last = (
            count * self.rank // self.world_size,
            count * (self.rank + 1) // self.world_size,
        )
        size = self.micro or max(1, last - first)
        starts = range(first, last, size)
        return [MicroBatchSlice(n, range(i, min(i + size, last))) for n, i in enumerate(starts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSplit:
    """As `EvenSplit`, with one share for each group of consecutive ranks; the first one counts.

    Attributes:
        group_size: ranks of a group.
        rank: of this process.
        world_size: of all groups.
        micro: most samples of a micro-batch; None: no limit.
    """

    group_size: int
    rank: int
    world_size: int
    micro: int | None = None

    def slices(self, count: int) -> list[MicroBatchSlice]:
        """See `BatchSplit`."""
        group, place = divmod(self.rank, self.group_size)
        share = EvenSplit(
            rank=group, world_size=self.world_size // self.group_size, micro=self.micro
        )
        return [replace(part, counts=place == 0) for part in share.slices(count)]


@dataclass(frozen=True, slots=True)
class StepShare:
    """Part of one rank in one optimisation step.

    Attributes:
        before, after: the cursor without and with this step.
        count: samples of the step over all ranks; less than the batch at an epoch's end.
        slices: the micro-batches that this rank loads, possibly none.
        samples: indices into the dataset, for each of them.
    """

    before: Cursor
    after: Cursor
    count: int
    slices: list[MicroBatchSlice]
    samples: list[list[int]]

    @property
    def indices(self) -> list[int]:
        """The samples whose loss this rank computes."""
        pairs = zip(self.slices, self.samples, strict=True)
        return [i for piece, samples in pairs if piece.counts for i in samples]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Order and batches of a whole training run.

    Attributes:
        samples: size of the dataset.
        global_batch: samples per optimisation step, over all ranks, as given by the script.
        epochs: how often each sample is trained on.
        seed: with the epoch it determines the order.
        shuffle: False: the order is that of the dataset.
    """

    samples: int
    global_batch: int
    epochs: int
    seed: int
    shuffle: bool = True

    def __post_init__(self) -> None:
        for name in ("samples", "global_batch", "epochs"):
            if getattr(self, name) < 1:
                value = getattr(self, name)
                raise ValueError(f"{name}: {value} is invalid: expected at least 1")

    def order(self, epoch: int) -> torch.Tensor:
        """Return the epoch's permutation of the dataset, a tensor of shape (samples,)."""
        if not self.shuffle:
            return torch.arange(self.samples)
        generator = torch.Generator()
        generator.manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator)

    def fingerprint(self) -> int:
        """Return a checksum of the order, which depends on seed, dataset size and torch."""
        return zlib.crc32(bytes(self.order(0)[:256].to(torch.int32).numpy()))

    def ended(self, cursor: Cursor) -> bool:
        """Return whether nothing is left to train on."""
        return cursor.epoch >= self.epochs

    def progress(self, cursor: Cursor) -> float:
        """Return the fraction of all samples of all epochs that has been trained on."""
        done = cursor.epoch * self.samples + cursor.consumed
        return min(1.0, done / (self.epochs * self.samples))

    def shares(
        self, cursor: Cursor, split: BatchSplit, *, batch: int | None = None
    ) -> Iterator[StepShare]:
        """Yield one rank's part of every step from the cursor to the end.

        Args:
            cursor: the position to begin at.
            split: divides a step's samples for this rank.
            batch: samples per step; None: `global_batch`.
        """
        batch = batch or self.global_batch
        while not self.ended(cursor):
            order = self.order(cursor.epoch)
            epoch = cursor.epoch
            while cursor.epoch == epoch:
                count = min(batch, self.samples - cursor.consumed)
                indices = order[cursor.consumed : cursor.consumed + count].tolist()
                next_cursor = self._after(cursor, count)
                slices = split.slices(count)
                samples = [[indices[i] for i in part.span] for part in slices]
                yield StepShare(cursor, next_cursor, count, slices, samples)
                cursor = next_cursor

    def _after(self, cursor: Cursor, count: int) -> Cursor:
        consumed = cursor.consumed + count
        if consumed < self.samples:
            return Cursor(cursor.step + 1, cursor.epoch, consumed)
        return Cursor(cursor.step + 1, cursor.epoch + 1, 0)
