"""Order of samples that does not depend on the world, for frameworks with a DataLoader per rank."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from slurm_elastic.integrations.batch_share import BatchShare


class ElasticSampler(torch.utils.data.Sampler):  # type: ignore[misc]
    """Order of samples that depends on seed and epoch only, dealt to the ranks of any world.

    Each step of the optimizer takes the next samples of one order; the ranks get a micro-batch each
    in turn. Samples that do not fill a step are left out, others in each epoch.

    Args:
        samples: size of the dataset.
        planned: the share of a rank.
        seed: of the order.
        shuffle: False: in the order of the dataset.
        rank: of this process; None: RANK.
    """

    def __init__(
        self,
        samples: int,
        planned: BatchShare,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
    ) -> None:
        if samples < planned.actual:
            raise ValueError(
                f"samples: {samples} is invalid: expected at least the {planned.actual} of one step"
            )
        self._samples = samples
        self._planned = planned
        self._seed, self._shuffle = seed, shuffle
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._resumed = (0, 0)
        self.epoch = 0

    @property
    def per_epoch(self) -> int:
        """Samples of an epoch, over all ranks: whole steps."""
        return self._samples - self._samples % self._planned.actual

    def __len__(self) -> int:
        return self.per_epoch // self._planned.world

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from the next `iter` on; Lightning calls it."""
        self.epoch = epoch

    def resume(self, epoch: int, consumed: int) -> None:
        """Leave out the first samples of one epoch, as all ranks together have trained on them."""
        self.epoch, self._resumed = epoch, (epoch, consumed)

    def __iter__(self) -> Iterator[int]:
        if self._shuffle:
            generator = torch.Generator()
            generator.manual_seed((self._seed * 1_000_003 + self.epoch) % 2**63)
            order = torch.randperm(self._samples, generator=generator)
        else:
            order = torch.arange(self._samples)
        epoch, consumed = self._resumed
        first = consumed if epoch == self.epoch else 0
        size, world = self._planned.per_rank, self._planned.world
        for start in range(first + self._rank * size, self.per_epoch, size * world):
            yield from order[start : start + size].tolist()
