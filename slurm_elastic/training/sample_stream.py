"""Samples of a stream, dealt to ranks and their worker processes by position.

Every process reads the whole stream and keeps its own samples. So a position, counted in samples
over all ranks, is all that a checkpoint needs, on any number of ranks and workers.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from slurm_elastic.training.dealt_split import DealtSplit
from slurm_elastic.training.loader import reseed


class StreamItems(IterableDataset):  # type: ignore[misc]
    """This rank's micro-batches of a stream: (samples of the step, whether it is the last, batch).

    With several workers each reads the whole stream, and every n-th micro-batch is from the n-th.

    Args:
        dataset: the stream, an iterable.
        split: micro-batches of this rank.
        global_batch: samples per step.
        collate: makes a micro-batch out of samples.
        seed: of the stream's own random draws.
        epoch: is set where the stream has `set_epoch`.
        skipped: samples before the present position.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        split: DealtSplit,
        global_batch: int,
        collate: Callable[[Sequence[Any]], Any],
        seed: int,
        epoch: int,
        skipped: int,
    ) -> None:
        self._dataset, self._split, self._global_batch = dataset, split, global_batch
        self._collate, self._seed, self._epoch, self._skipped = collate, seed, epoch, skipped

    def __iter__(self) -> Iterator[tuple[int, bool, Any]]:
        worker = get_worker_info()
        workers, own = (worker.num_workers, worker.id) if worker else (1, 0)
        for number, (count, last, samples) in enumerate(self._micro_batches()):
            if number % workers == own:
                yield count, last, self._collate(samples)

    def _micro_batches(self) -> Iterator[tuple[int, bool, list[Any]]]:
        stream = _SeededStream(self._samples, self._seed)
        # One more sample shows whether the stream goes on.
        taken = stream.take(self._global_batch + 1)
        while taken:
            batch, following = taken[: self._global_batch], taken[self._global_batch :]
            for piece in self._split.slices(len(batch)):
                yield len(batch), not following, [batch[i] for i in piece.span]
            taken = following + stream.take(self._global_batch) if following else []

    def _samples(self) -> Iterator[Any]:
        """Return the samples from the present position on."""
        source: Iterable[Any] = self._dataset
        if callable(set_epoch := getattr(source, "set_epoch", None)):
            set_epoch(self._epoch)
        if not self._skipped:
            return iter(source)
        if callable(skip := getattr(source, "skip", None)):
            return iter(skip(self._skipped))
        return itertools.islice(iter(source), self._skipped, None)


class _SeededStream:
    """Samples of a stream, whose own random draws are the same on all ranks and workers."""

    def __init__(self, samples: Callable[[], Iterator[Any]], seed: int) -> None:
        outside = random_states()
        reseed(seed)
        self._samples = samples()
        self._inside = random_states()
        set_random_states(outside)

    def take(self, count: int) -> list[Any]:
        """Return the next samples; fewer at the end of the stream.

        Changing the states of the random generators costs as much as reading some samples.
        """
        outside = random_states()
        set_random_states(self._inside)
        try:
            return list(itertools.islice(self._samples, count))
        finally:
            self._inside = random_states()
            set_random_states(outside)


def random_states() -> tuple[Any, ...]:
    """Return the states of the random generators of torch (CPU), Python and NumPy."""
    numpy = sys.modules.get("numpy")
    return torch.get_rng_state(), random.getstate(), numpy and numpy.random.get_state()


def set_random_states(states: tuple[Any, ...]) -> None:
    """Set the states that `random_states` returned."""
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
