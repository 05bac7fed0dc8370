"""Samples for a script that keeps its own loop: exactly once per epoch on any ranks.

A dataset with an index is read in an order that depends on seed and epoch only. A stream is
read by every rank, and by every worker process of it, from its begin; each keeps the
samples of its own micro-batches. After a restart a stream is read again up to the present
position, or asked to skip the samples before it, where it has a method `skip(n)` as those of
Hugging Face datasets have.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.training.dealt_split import DealtSplit
from slurm_elastic.training.loader import MicroBatchSampler, derive_seed, reseed
from slurm_elastic.training.sample_stream import StreamItems
from slurm_elastic.training.sampler import Cursor, MicroBatchSlice, Sampler, StepShare
from slurm_elastic.training.signals import ignore_in_worker

#: Set by the loop, or without meaning where it sets the samples of a batch.
_SET_BY_LOOP = ("batch_size", "sampler", "batch_sampler")


class LoaderError(InvalidInputError):
    """A dataset or an option that the loader cannot use."""


class StepOwner(Protocol):
    """The loop whose steps a loader marks."""

    def enter_epoch(self) -> Cursor:
        """Return the position to read from, after the boundary of the step before."""

    def enter_micro_batch(
        self, piece: MicroBatchSlice, count: int, *, last: bool, after: Cursor | None = None
    ) -> None:
        """Prepare for one micro-batch of a step.

        Args:
            piece: this rank's micro-batch.
            count: samples of the step over all ranks.
            last: whether it is this rank's last of the step.
            after: the position after the step; None: the next one.
        """

    def complete(self, after: Cursor) -> None:
        """Record that a step is done."""

    @property
    def resizes(self) -> int:
        """Number of changes of the ranks so far, after which samples are dealt anew."""


def settings_of(loader: DataLoader[Any]) -> tuple[Any, dict[str, Any]]:
    """Return the dataset of a DataLoader that the script has made, and the options for `loader`.

    Raises:
        LoaderError: a sampler of the script determines its samples.
    """
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in (
            *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn"),
            *("multiprocessing_context", "prefetch_factor"),
        )
    }
    if loader.num_workers == 0:
        del options["prefetch_factor"]
    if loader.batch_size is None and loader.batch_sampler is None:
        raise LoaderError(
            "loop.loader: a DataLoader with batch_size=None is invalid: expected one that makes"
            " batches of samples; give the dataset itself"
        )
    if isinstance(loader.dataset, IterableDataset):
        return loader.dataset, options
    # As accelerate and torchrun's scripts pass it, a sampler only divides the samples by rank.
    sampler = getattr(loader.batch_sampler, "sampler", None)
    kind = type(sampler).__name__
    shuffles = {"RandomSampler": True, "SequentialSampler": False}
    if kind == "DistributedSampler":
        shuffle = bool(getattr(sampler, "shuffle", True))
    elif kind in shuffles and not getattr(sampler, "replacement", False):
        shuffle = shuffles[kind]
    else:
        raise LoaderError(
            f"loop.loader: a DataLoader with {kind if sampler else 'batch_sampler'} is invalid:"
            " expected shuffle=True, shuffle=False or a DistributedSampler, as the loop determines"
            " the samples; give the dataset itself"
        )
    return loader.dataset, options | {"shuffle": shuffle, "drop_last": loader.drop_last}


class ElasticLoader:
    """Micro-batches of this rank, from the loop's present position to the end of its epoch.

    Each further iteration reads the next epoch. `len` is the number of a whole epoch's
    micro-batches on this rank; a stream has none.

    Args:
        dataset: with `len()` and `[index]`, or a stream.
        owner: the loop.
        split: micro-batches of this rank.
        global_batch: samples per step.
        seed: of the order.
        shuffle: False: in the order of the dataset; a stream keeps its own.
        drop_last: leave out the last, smaller batch of an epoch.
        options: for torch's DataLoader.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        owner: StepOwner,
        split: DealtSplit,
        global_batch: int,
        seed: int,
        shuffle: bool,
        drop_last: bool,
        options: dict[str, Any],
    ) -> None:
        for name in _SET_BY_LOOP:
            if name in options:
                raise LoaderError(
                    f"loop.loader: {name} is invalid: expected none, as global_batch and"
                    " micro_batch of ElasticLoop determine the samples; leave it out"
                )
        self.streams = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")
        self._dataset, self._owner, self._split = dataset, owner, split
        self._global_batch, self._seed = global_batch, seed
        self._drop_last = drop_last
        collate = options.pop("collate_fn", None) or default_collate
        self._collate: Callable[[Sequence[Any]], Any] = collate
        self._options = options | {
            "worker_init_fn": _WorkerStart(options.get("worker_init_fn")),
        }
        self.sampler: Sampler | None = None
        if self.streams:
            _check_stream(dataset, drop_last=drop_last)
        else:
            self.sampler = Sampler(
                samples=len(dataset),
                global_batch=global_batch,
                epochs=1,
                seed=seed,
                shuffle=shuffle,
            )
            if drop_last and len(dataset) < global_batch:
                raise LoaderError(
                    f"loop.loader: drop_last with {len(dataset)} samples is invalid: expected at"
                    f" least global_batch={global_batch} samples; leave drop_last out"
                )

    def __len__(self) -> int:
        if self.sampler is None:
            raise TypeError("loop.loader: the length of a stream is not known")
        full, rest = divmod(self.sampler.samples, self._global_batch)
        micro_batches = full * len(self._split.slices(self._global_batch))
        if rest and not self._drop_last:
            micro_batches += len(self._split.slices(rest))
        return micro_batches

    def __iter__(self) -> Iterator[Any]:
        cursor: Cursor | None = self._owner.enter_epoch()
        while cursor is not None:
            cursor = yield from (self._stream if self.streams else self._indexed)(cursor)

    @property
    def order(self) -> dict[str, int]:
        """Values by which a checkpoint of other samples is recognised."""
        if self.sampler is None:
            return {"samples": 0}
        return {"samples": self.sampler.samples, "order": self.sampler.fingerprint()}

    def _shares(self, cursor: Cursor) -> Iterator[StepShare]:
        """Yield this rank's part of every step up to the end of the epoch."""
        assert self.sampler is not None
        sampler = replace(self.sampler, epochs=cursor.epoch + 1)
        for share in sampler.shares(cursor, self._split):
            rest = sampler.samples - share.before.consumed - share.count
            if self._drop_last and share.count < self._global_batch:
                return
            if self._drop_last and rest < self._global_batch:
                share = replace(share, after=Cursor(share.after.step, cursor.epoch + 1, 0))  # noqa: PLW2901
            yield share

    def _indexed(self, cursor: Cursor) -> Generator[Any, None, Cursor | None]:
        """Yield micro-batches up to the end of the epoch.

        Returns:
            Position after which the ranks have changed, so that the rest is to be read anew.
        """
        resizes = self._owner.resizes
        fetched = iter(
            DataLoader(
                _SeededSamples(self._dataset, self._seed, cursor.epoch),
                batch_sampler=MicroBatchSampler(lambda: self._shares(cursor)),
                collate_fn=self._collate,
                generator=self._generator(cursor),
                **self._options,
            )
        )
        ended = False
        for share in self._shares(cursor):
            for piece in share.slices:
                batch = next(fetched)
                last = piece is share.slices[-1]
                self._owner.enter_micro_batch(piece, share.count, last=last, after=share.after)
                yield batch
            self._owner.complete(share.after)
            ended = share.after.epoch > cursor.epoch
            if not ended and self._owner.resizes != resizes:
                return share.after
        if not ended:  # too few samples are left for a whole batch
            self._owner.complete(Cursor(cursor.step, cursor.epoch + 1, 0))
        return None

    def _generator(self, cursor: Cursor) -> torch.Generator:
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self._seed, cursor.step, self._split.rank))
        return generator

    def _stream(self, cursor: Cursor) -> Generator[Any, None, Cursor | None]:
        """See `_indexed`."""
        resizes = self._owner.resizes
        items = StreamItems(
            self._dataset,
            split=self._split,
            global_batch=self._global_batch,
            collate=self._collate,
            seed=derive_seed(self._seed, cursor.epoch, 0),
            epoch=cursor.epoch,
            skipped=cursor.consumed,
        )
        fetched = iter(
            DataLoader(
                items,
                batch_size=None,
                collate_fn=_unchanged,
                generator=self._generator(cursor),
                **self._options,
            )
        )
        ended = False
        while not ended:
            try:
                count, ended, batch = next(fetched)
            except StopIteration:
                raise LoaderError(
                    f"loop.loader: a stream that ends before sample {cursor.consumed + 1} of epoch"
                    f" {cursor.epoch} is invalid: expected the same samples in each attempt, and at"
                    " least one"
                ) from None
            after = Cursor(cursor.step + 1, cursor.epoch, cursor.consumed + count)
            if ended:
                after = Cursor(cursor.step + 1, cursor.epoch + 1, 0)
            slices = self._split.slices(count)
            for piece in slices:
                if piece is not slices[0]:
                    _, _, batch = next(fetched)
                last = piece is slices[-1]
                self._owner.enter_micro_batch(piece, count, last=last, after=after)
                yield batch
            self._owner.complete(after)
            cursor = after
            if not ended and self._owner.resizes != resizes:
                return cursor
        return None


@dataclass(frozen=True)
class _SeededSamples:
    """Samples by index, whose random augmentation depends on seed, epoch and micro-batch only."""

    dataset: Any
    seed: int
    epoch: int

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> Any:
        reseed(derive_seed(self.seed, self.epoch, indices[0]))
        if callable(several := getattr(self.dataset, "__getitems__", None)):
            return several(indices)
        return [self.dataset[i] for i in indices]


@dataclass(frozen=True)
class _WorkerStart:
    """`worker_init_fn` of the script, after signals are ignored."""

    function: Callable[[int], Any] | None

    def __call__(self, worker: int) -> None:
        ignore_in_worker(worker)
        if self.function is not None:
            self.function(worker)


def _check_stream(dataset: Any, *, drop_last: bool) -> None:
    if not hasattr(dataset, "__iter__") or isinstance(dataset, Iterator):
        raise LoaderError(
            f"loop.loader: dataset: {type(dataset).__name__} is invalid: expected a dataset with"
            " len() and [index], or an iterable that can be read again from its begin"
        )
    if drop_last:
        raise LoaderError(
            "loop.loader: drop_last with a stream is invalid: expected a dataset with len(); leave"
            " it out"
        )


def _unchanged(value: Any) -> Any:
    return value
