"""Profiling run of a training: a few timed steps on data of several sources; nothing is saved.

`selastic profile` starts it (`slurm_elastic.job.profile_request`). Each *block* takes the same
samples, from the beginning: `synthetic` repeats the first batch, `cold` reads files that have just
been dropped from the page cache, `warm` reads the same samples again. After the last block the
process ends inside of the script's loop: no checkpoint is read or written, and the code after the
loop is not run.
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
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.loader import Batch, Loader
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.sampler import BatchSplit, Cursor, Sampler, StepShare
from slurm_elastic.training.signals import exit_now

#: Ranks that read from cold storage reach the end of a block at different times.
_BARRIER_S = 600.0


def global_batch(request: ProfileRequest, script_batch: int, *, samples: int) -> int:
    """Return the samples per step on this run's GPUs, equally many per GPU in each configuration.

    Args:
        request: of this run.
        script_batch: the script's own global batch, for the largest configuration.
        samples: of the dataset.

    Raises:
        ValueError: the dataset is smaller than one step.
    """
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    gpus = max(1, request.gpus or world_size)
    batch = (request.batch or -(-script_batch // gpus)) * world_size
    if batch > samples:
        raise ValueError(
            f"profile: {batch} samples per step on {world_size} GPUs is invalid: expected at most"
            f" {samples}, the data set; give a smaller --batch"
        )
    return batch


class ProfilingRun:
    """Blocks of one run, on one rank.

    Args:
        request: blocks and steps.
        sampler: its global batch is that of all ranks.
        loader: of the real data.
        rank_group: all ranks.
        facts: about the training, for the profile.
        clock: returns seconds.
    """

    def __init__(
        self,
        request: ProfileRequest,
        *,
        sampler: Sampler,
        loader: Loader,
        rank_group: RankGroup,
        facts: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request, self._sampler, self._loader = request, sampler, loader
        self._rank_group, self._facts, self._clock = rank_group, facts, clock
        self._done: list[dict[str, Any]] = []

    def batches(self, split: BatchSplit) -> Iterator[Batch]:
        """Yield the batches of all blocks; the script's loop runs between them."""
        shares = self._shares(split)
        for number, block in enumerate(self._request.blocks):
            if block == COLD and self._first_here:
                page_cache.drop(self._request.data)
            elif block == WARM and COLD not in self._request.blocks[:number]:
                for _ in self._real(shares):
                    pass  # fills the page cache; a `cold` block before has done so
            self._rank_group.barrier(f"profile/{number}", _BARRIER_S)
            stamps: list[float] = []
            waited = 0.0
            source = self._synthetic(shares) if block == SYNTHETIC else self._real(shares)
            for step in range(len(shares)):
                begun = self._clock()
                if step >= self._request.warm_up and not stamps:
                    stamps.append(begun)
                batch = next(source)
                if stamps:
                    waited += self._clock() - begun
                yield batch
                if stamps:
                    stamps.append(self._clock())
            seconds = [b - a for a, b in itertools.pairwise(stamps)]
            data_s = waited / max(1, len(seconds))
            self._done.append(
                {"block": block, "seconds": seconds, "data_s": data_s, "ended": time.time()}
            )

    def end(self) -> None:
        """Write the times and exit with the other ranks; does not return."""
        if self._rank_group.rank == 0:
            profile_request.write(self._request.result, self._done, self._facts)
        self._rank_group.barrier("profile/end", _BARRIER_S)
        exit_now(0)

    @property
    def _first_here(self) -> bool:
        """Whether this is the first rank of its node, which drops the node's cache."""
        return os.environ.get("LOCAL_RANK", "0") == "0"

    def _shares(self, split: BatchSplit) -> list[StepShare]:
        """Return full steps from the first sample on, again from there where the dataset ends."""
        steps = self._request.warm_up + self._request.steps
        full = self._sampler.samples // self._sampler.global_batch
        if full < steps and COLD in self._request.blocks and self._rank_group.rank == 0:
            log_line(
                f"profile: the data set has {full} steps, {steps} are run: samples read again are"
                " not cold; give fewer --steps or a smaller --batch"
            )
        shares: list[StepShare] = []
        for share in self._sampler.shares(Cursor(), split):
            if len(shares) == min(full, steps):
                break
            shares.append(share)
        return [shares[i % len(shares)] for i in range(steps)]

    def _real(self, shares: list[StepShare]) -> Iterator[Batch]:
        return self._loader.batches(lambda: iter(shares), rank=self._rank_group.rank, step=0)

    def _synthetic(self, shares: list[StepShare]) -> Iterator[Batch]:
        first = next(self._real(shares[:1]))
        for share in shares:
            yield replace(first, step=share.after.step, indices=share.indices, share=share)


def prepared(
    request: ProfileRequest | None,
    model: torch.nn.Module,
    *,
    application: str,
    sampler: Sampler,
    loader: Loader,
    rank_group: RankGroup,
) -> ProfilingRun | None:
    """Return the profiling run of a request, with the facts about the training for the profile.

    Args:
        request: None: this is no profiling run.
        model: whole.
        application: the script's name of it, or "".
        sampler: see `ProfilingRun`.
        loader: see `ProfilingRun`.
        rank_group: see `ProfilingRun`.
    """
    if request is None:
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
    return ProfilingRun(request, sampler=sampler, loader=loader, rank_group=rank_group, facts=facts)
