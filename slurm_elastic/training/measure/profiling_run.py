"""A training that is profiled: a few steps on data from here and there, timed; nothing is kept.

`selastic profile` starts it (`slurm_elastic.job.profile_request`). Each *block* takes the same
samples,
from the beginning: `synthetic` repeats the first batch, `cold` reads what has just been taken out
of the page cache, `warm` reads what has been read just before. After the last block the process
ends inside of the script's loop: no checkpoint is read or written, and what follows is not run.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from slurm_elastic.job import page_cache, profile_request
from slurm_elastic.job.profile_request import COLD, SYNTHETIC, WARM, ProfileRequest
from slurm_elastic.training.job_requests import log_line
from slurm_elastic.training.loader import Batch, Loader
from slurm_elastic.training.parallel.process_group import RankGroup
from slurm_elastic.training.sampler import BatchSplit, Cursor, Sampler, StepShare
from slurm_elastic.training.signals import exit_now

#: Ranks of which one reads from cold storage come to the end of a block at different times.
_TOGETHER_S = 600.0


def global_batch(asked: ProfileRequest, scripts: int, *, samples: int) -> int:
    """Samples per step on this run's GPUs, equally many per GPU in every configuration.

    Args:
        asked: of this run.
        scripts: the script's own global batch, for the largest configuration.
        samples: of the dataset.

    Raises:
        ValueError: the dataset has not enough for one step.
    """
    rank_group = int(os.environ.get("WORLD_SIZE", "1"))
    batch = (asked.batch or -(-scripts // max(1, asked.gpus or rank_group))) * rank_group
    if batch > samples:
        raise ValueError(
            f"profile: {rank_group} GPUs take {batch} samples a step, the data set has {samples};"
            " give a smaller --batch"
        )
    return batch


class ProfilingRun:
    """The blocks of one run, on one rank.

    Args:
        asked: what is to be run.
        sampler: its global batch is that of all ranks.
        loader: of the real data.
        rank_group: this rank and the others.
        facts: of the training, for the profile.
        clock: seconds.
    """

    def __init__(
        self,
        asked: ProfileRequest,
        *,
        sampler: Sampler,
        loader: Loader,
        rank_group: RankGroup,
        facts: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asked, self._sampler, self._loader = asked, sampler, loader
        self._rank_group, self._facts, self._clock = rank_group, facts, clock
        self._done: list[dict[str, Any]] = []

    def batches(self, split: BatchSplit) -> Iterator[Batch]:
        """All batches of all blocks; the script's loop runs between them."""
        shares = self._shares(split)
        for number, block in enumerate(self._asked.blocks):
            if block == COLD and self._first_here:
                page_cache.drop(self._asked.data)
            elif block == WARM and COLD not in self._asked.blocks[:number]:
                for _ in self._real(shares):
                    pass  # into memory; what `cold` reads is there already
            self._rank_group.barrier(f"profile/{number}", _TOGETHER_S)
            stamps: list[float] = []
            waited = 0.0
            source = self._synthetic(shares) if block == SYNTHETIC else self._real(shares)
            for step in range(len(shares)):
                begun = self._clock()
                if step >= self._asked.warm_up and not stamps:
                    stamps.append(begun)
                batch = next(source)
                if stamps:
                    waited += self._clock() - begun
                yield batch
                if stamps:
                    stamps.append(self._clock())
            seconds = [b - a for a, b in itertools.pairwise(stamps)]
            self._done.append(
                {"block": block, "seconds": seconds, "data_s": waited / max(1, len(seconds))}
            )

    def end(self) -> None:
        """Write down the times and leave with the other ranks; does not return."""
        if self._rank_group.rank == 0:
            profile_request.write(self._asked.result, self._done, self._facts)
        self._rank_group.barrier("profile/end", _TOGETHER_S)
        exit_now(0)

    @property
    def _first_here(self) -> bool:
        """One rank of each node drops the node's cache."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def _shares(self, split: BatchSplit) -> list[StepShare]:
        """Full steps, from the first sample on; over again where the dataset ends."""
        wanted = self._asked.warm_up + self._asked.steps
        full = self._sampler.samples // self._sampler.global_batch
        if full < wanted and COLD in self._asked.blocks and self._rank_group.rank == 0:
            log_line(
                f"profile: the data set has {full} steps, {wanted} are run: what is read for the"
                " second time is not cold; give fewer --steps or a smaller --batch"
            )
        found: list[StepShare] = []
        for share in self._sampler.shares(Cursor(), split):
            if len(found) == min(full, wanted):
                break
            found.append(share)
        return [found[i % len(found)] for i in range(wanted)]

    def _real(self, shares: list[StepShare]) -> Iterator[Batch]:
        return self._loader.batches(lambda: iter(shares), rank=self._rank_group.rank, step=0)

    def _synthetic(self, shares: list[StepShare]) -> Iterator[Batch]:
        first = next(self._real(shares[:1]))
        for share in shares:
            yield replace(first, step=share.after.step, indices=share.indices, share=share)


def prepared(
    asked: ProfileRequest | None,
    model: torch.nn.Module,
    *,
    application: str,
    sampler: Sampler,
    loader: Loader,
    rank_group: RankGroup,
) -> ProfilingRun | None:
    """What `ProfilingRun` needs, with what a profile says of a training besides times.

    Args:
        asked: None: nothing.
        model: whole.
        application: as the script calls it, or "".
        sampler: see `ProfilingRun`.
        loader: see `ProfilingRun`.
        rank_group: see `ProfilingRun`.
    """
    if asked is None:
        return None
    trained = [p for p in model.parameters() if p.requires_grad]
    layers = [m for m in model.modules() if any(True for _ in m.parameters(recurse=False))]
    facts = {
        "application": application,
        "model": type(model).__name__,
        "batch": sampler.global_batch // rank_group.size,
        "samples": sampler.samples,
        "layers": len(layers),
        "gradient_bytes": sum(p.numel() * p.element_size() for p in trained),
    }
    return ProfilingRun(asked, sampler=sampler, loader=loader, rank_group=rank_group, facts=facts)
