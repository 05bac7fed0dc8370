"""Which samples each optimisation step takes, and which of them this rank takes.

One global cursor says how far the job is. The order of an epoch depends on the
seed and the epoch alone, every step takes the next `global_batch` samples of
it, and the ranks split those. So a job that changes its world between two
steps trains on the same batches in the same order.

>>> sampler = Sampler(samples=10, global_batch=4, epochs=1, seed=0)
>>> [len(share.indices) for share in sampler.shares(Cursor(), rank=0, world=3)]
[1, 1, 0]
>>> sorted(i for r in range(3) for s in sampler.shares(Cursor(), rank=r, world=3)
...        for i in s.indices)
[0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cursor:
    """How far the job is.

    Attributes:
        step: optimisation steps done.
        epoch: the epoch that the next step belongs to.
        consumed: samples of that epoch already trained on.
    """

    step: int = 0
    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank takes of one optimisation step.

    Attributes:
        before, after: the cursor without and with this step.
        count: samples of the step over all ranks; less than the global batch at an epoch's end.
        indices: this rank's samples, possibly none.
    """

    before: Cursor
    after: Cursor
    count: int
    indices: list[int]

    def micro_batches(self, size: int | None) -> list[list[int]]:
        """The samples in pieces of at most `size`."""
        size = size or max(1, len(self.indices))
        return [self.indices[i : i + size] for i in range(0, len(self.indices), size)]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The plan of a whole training run.

    Attributes:
        samples: size of the dataset.
        global_batch: samples per optimisation step, over all ranks.
        epochs: how often each sample is trained on.
        seed: decides the order together with the epoch.
    """

    samples: int
    global_batch: int
    epochs: int
    seed: int

    def __post_init__(self) -> None:
        for name in ("samples", "global_batch", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")

    def order(self, epoch: int) -> torch.Tensor:
        """The epoch's permutation of the dataset."""
        generator = torch.Generator()
        generator.manual_seed((self.seed * 1_000_003 + epoch) % 2**63)
        return torch.randperm(self.samples, generator=generator)

    def fingerprint(self) -> int:
        """Tells whether another torch, seed or dataset size would order the samples differently."""
        return zlib.crc32(bytes(self.order(0)[:256].to(torch.int32).numpy()))

    def ended(self, cursor: Cursor) -> bool:
        """Whether nothing is left to train on."""
        return cursor.epoch >= self.epochs

    def progress(self, cursor: Cursor) -> float:
        """Fraction of all samples of all epochs trained on."""
        done = cursor.epoch * self.samples + cursor.consumed
        return min(1.0, done / (self.epochs * self.samples))

    def shares(self, cursor: Cursor, *, rank: int, world: int) -> Iterator[Share]:
        """One rank's part of every step from the cursor to the end."""
        while not self.ended(cursor):
            order = self.order(cursor.epoch)
            epoch = cursor.epoch
            while cursor.epoch == epoch:
                count = min(self.global_batch, self.samples - cursor.consumed)
                first = cursor.consumed + count * rank // world
                last = cursor.consumed + count * (rank + 1) // world
                after = self._after(cursor, count)
                yield Share(cursor, after, count, order[first:last].tolist())
                cursor = after

    def _after(self, cursor: Cursor, count: int) -> Cursor:
        consumed = cursor.consumed + count
        if consumed < self.samples:
            return Cursor(cursor.step + 1, cursor.epoch, consumed)
        return Cursor(cursor.step + 1, cursor.epoch + 1, 0)
