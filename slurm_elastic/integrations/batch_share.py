"""Division of the global batch among the ranks of the present world.

Frameworks give each rank equal shares of whole micro-batches, so not every world can keep every
global batch: the nearest one is taken then, and `BatchShare.remark` describes it.

>>> share(64, per_rank=16, world=2)
BatchShare(global_batch=64, world=2, per_rank=16, accumulation=2)
>>> share(64, per_rank=16, world=8)
BatchShare(global_batch=64, world=8, per_rank=8, accumulation=1)
>>> share(64, per_rank=16, world=3).actual
63
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

#: Set by the launchers: esrun, torchrun, accelerate, deepspeed.
_WORLD = "WORLD_SIZE"
_GLOBAL_BATCH = "SLURM_ELASTIC_GLOBAL_BATCH"
_MICRO_BATCHES = "SLURM_ELASTIC_MICRO_BATCHES"
_START_WORLD = "SLURM_ELASTIC_START_WORLD_SIZE"


@dataclass(frozen=True, slots=True)
class BatchShare:
    """Samples and micro-batches of each rank in one step of the optimizer.

    Attributes:
        global_batch: samples per step that are requested.
        world: data-parallel ranks.
        per_rank: samples of one micro-batch, for the data loader of a rank.
        accumulation: micro-batches of a rank in one step.
    """

    global_batch: int
    world: int
    per_rank: int
    accumulation: int

    @property
    def actual(self) -> int:
        """Samples per step of all ranks; `global_batch` where that can be kept."""
        return self.per_rank * self.accumulation * self.world

    @property
    def report_fields(self) -> dict[str, int]:
        """Fields of a report (`slurm_elastic.core.report.Report`)."""
        return {
            "global_batch": self.actual,
            "micro_batch": self.per_rank,
            "accumulation": self.accumulation - 1,
        }

    @property
    def remark(self) -> str:
        """A line for the log if the global batch cannot be kept, else ""."""
        if self.actual == self.global_batch:
            return ""
        return (
            f"global batch {self.global_batch}: {self.world} ranks cannot share it evenly, steps"
            f" take {self.actual} samples; allow only sizes that divide it (sizes= of --elastic)"
        )


def share(global_batch: int, *, per_rank: int, world: int | None = None) -> BatchShare:
    """Return the share of each rank that keeps a global batch, or comes nearest to it.

    Args:
        global_batch: samples per step of the optimizer, over all ranks.
        per_rank: most samples that a rank computes at once.
        world: data-parallel ranks; None: WORLD_SIZE.

    Raises:
        ValueError: a number is less than 1.
    """
    world = world_size() if world is None else world
    for name, value in (("global_batch", global_batch), ("per_rank", per_rank), ("world", world)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r} is invalid: expected a number of at least 1")
    below = max(1, global_batch // world)
    above = -(-global_batch // world)
    samples = min((above, below), key=lambda samples: abs(samples * world - global_batch))
    accumulation = next(
        steps for steps in range(-(-samples // per_rank), samples + 1) if samples % steps == 0
    )
    return BatchShare(global_batch, world, samples // accumulation, accumulation)


def kept_global_batch(
    *, per_rank: int, accumulation: int = 1, environment: Mapping[str, str] | None = None
) -> int:
    """Return the samples per step that are to be kept, from the variables that esrun exports.

    Args:
        per_rank: samples of one micro-batch, as the script is written.
        accumulation: micro-batches of a rank in one step, as the script is written.
        environment: variables; None: those of this process.

    Returns:
        The batch that the directive fixes (`batch=256`); else `per_rank` for each micro-batch of
        `esrun --micro-batches`; else the batch of the start world
        (docs/esrun-global-batch.md). Without esrun, that of this world.
    """
    environment = os.environ if environment is None else environment
    fixed = _number(environment, _GLOBAL_BATCH)
    if fixed:
        return fixed
    micro_batches = _number(environment, _MICRO_BATCHES)
    if micro_batches:
        return per_rank * micro_batches
    start = _number(environment, _START_WORLD) or world_size(environment)
    return per_rank * accumulation * start


def world_size(environment: Mapping[str, str] | None = None) -> int:
    """Return the number of ranks; 1 without a launcher."""
    return _number(os.environ if environment is None else environment, _WORLD) or 1


def is_first_rank() -> bool:
    """Return whether this process is rank 0, the one that logs and reports."""
    return (_number(os.environ, "RANK") or 0) == 0


def log_line(line: str) -> None:
    """Write one line to the job's log, from rank 0 only."""
    if is_first_rank():
        sys.stderr.write(f"slurm-elastic: {line}\n")
        sys.stderr.flush()


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 9 else None
