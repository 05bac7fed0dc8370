"""Loading of samples from the dataset, ahead of time where there are workers.

Samples that are fetched ahead do not count as trained on: only the cursor does.
"""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from slurm_elastic.training.sampler import StepShare
from slurm_elastic.training.signals import ignore_in_worker


@dataclass(frozen=True)
class Batch:
    """This rank's part of one optimisation step.

    Attributes:
        step: number of the step, counted from 1 over the whole training.
        epoch: counted from 0.
        indices: the samples of the dataset whose loss this rank computes, possibly none.
        last_of_epoch: whether the epoch ends with this step.
        parts: the samples that this rank loads, collated in micro-batches.
        share: position of the step in the training.
    """

    step: int
    epoch: int
    indices: list[int]
    last_of_epoch: bool
    parts: list[Any]
    share: StepShare


@dataclass(frozen=True, kw_only=True)
class Loader:
    """Settings by which samples are loaded.

    Attributes:
        dataset: anything with `[index]`.
        workers: processes that fetch ahead; 0: the training process loads.
        collate: makes a micro-batch out of samples; None: torch's default.
        pin: whether fetched batches go to pinned memory.
        seed: of everything random in this run.
        ranks_per_sample: consecutive ranks that share each sample, and their random numbers.
    """

    dataset: Any
    workers: int
    collate: Callable[[Sequence[Any]], Any] | None
    pin: bool
    seed: int
    ranks_per_sample: int = 1

    def batches(
        self, shares: Callable[[], Iterator[StepShare]], *, rank: int, step: int
    ) -> Iterator[Batch]:
        """Yield the rank's batches.

        Args:
            shares: returns the rank's shares of all steps from the present one on; called twice.
            rank: of this process.
            step: optimisation steps done.
        """
        generator = torch.Generator()
        rank //= self.ranks_per_sample
        generator.manual_seed(derive_seed(self.seed, step, rank))
        fetched = iter(
            DataLoader(
                self.dataset,
                batch_sampler=MicroBatchSampler(shares),
                num_workers=self.workers,
                collate_fn=self.collate,
                pin_memory=self.pin,
                worker_init_fn=ignore_in_worker,
                generator=generator,
            )
        )
        for share in shares():
            reseed(derive_seed(self.seed, share.after.step, rank))
            parts = [next(fetched) for _ in share.slices]
            yield Batch(
                share.after.step,
                share.before.epoch,
                share.indices,
                share.after.epoch != share.before.epoch,
                parts,
                share,
            )


class MicroBatchSampler:
    """Micro-batches of a whole run, as `batch_sampler` of a DataLoader."""

    def __init__(self, shares: Callable[[], Iterator[StepShare]]) -> None:
        self._shares = shares

    def __iter__(self) -> Iterator[list[int]]:
        for share in self._shares():
            yield from share.samples


def derive_seed(seed: int, step: int, rank: int) -> int:
    """Return one seed for three numbers; adjacent numbers have different seeds."""
    return (
        seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + rank * 0x94D049BB133111EB
    ) % 2**63


def reseed(seed: int) -> None:
    """Set all random states from one seed, so that checkpoints need not keep those of each rank."""
    if _only_cpu():
        torch.default_generator.manual_seed(seed)
    elif torch.cuda.is_initialized():
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)
    else:
        torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


@functools.cache
def _only_cpu() -> bool:
    """Return whether torch has no other devices; `torch.manual_seed` takes 0.1 ms to look."""
    return not torch.accelerator.is_available()
