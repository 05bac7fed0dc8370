"""Candidate batches of a configuration, from which the best is chosen.

Sia's artifact tries, for R replicas that take `least` to `most` samples each, 50
total batches in geometric steps from max(B0, R least) to the largest allowed, and
splits each into micro-batches m and s accumulated micro-steps. A lone replica
whose batch exceeds B0 accumulates at least once: it could not measure its
gradient's noise otherwise. Jobs with a fixed batch have one candidate.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.application import Application

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: Batches tried per configuration.
TRIED = 50
#: Rounding errors below this do not make a batch one sample larger.
_SLACK = 1e-8


@dataclass(frozen=True, slots=True)
class ConfigurationSet:
    """Configurations that a model predicts in one call; hashable.

    Attributes:
        types: GPU type of each.
        nodes: nodes of each.
        gpus: GPUs of each, over all its nodes.

    Raises:
        ValueError: lengths differ, or a count is below 1.
    """

    types: tuple[str, ...]
    nodes: tuple[int, ...]
    gpus: tuple[int, ...]

    def __post_init__(self) -> None:
        if not len(self.types) == len(self.nodes) == len(self.gpus):
            raise ValueError(
                f"configurations: {len(self.types)} types, {len(self.nodes)} nodes and "
                f"{len(self.gpus)} gpus: give one of each per configuration"
            )
        if min(self.nodes, default=1) < 1 or min(self.gpus, default=1) < 1:
            raise ValueError("configurations: nodes and gpus must be >= 1")

    def __len__(self) -> int:
        return len(self.types)


@dataclass(frozen=True, slots=True)
class BatchCandidates:
    """Batches of each configuration; arrays of shape (configurations, tried).

    Attributes:
        replicas: of each configuration, shape (configurations, 1).
        micro_batch, accumulation: how each batch is split.
        samples: global batch that results.
        valid: whether the configuration can run it.
    """

    replicas: Ints
    micro_batch: Ints
    accumulation: Ints
    samples: Floats
    valid: NDArray[np.bool_]

    def where(self, rows: NDArray[np.bool_], other: BatchCandidates) -> BatchCandidates:
        """Take the given rows from these, the others from `other`; no rows: `other` itself."""
        if not rows.any():
            return other
        pick = rows[:, None]
        return BatchCandidates(
            np.where(pick, self.replicas, other.replicas),
            np.where(pick, self.micro_batch, other.micro_batch),
            np.where(pick, self.accumulation, other.accumulation),
            np.where(pick, self.samples, other.samples),
            np.where(pick, self.valid, other.valid),
        )


@lru_cache(maxsize=4096)
def candidates(
    application: Application,
    configurations: ConfigurationSet,
    *,
    fixed: bool,
    compat: bool,
    max_batch: int | None = None,
    most: int | None = None,
) -> BatchCandidates:
    """Return the batches that may be tried in each configuration.

    Args:
        application: states the limits of each type.
        configurations: those on types it cannot run on, or without whole replicas, have none.
        fixed: the batch is the user's.
        compat: as in the artifact: a lone replica accumulates although its batch is fixed, and
            replicas whose smallest micro-batches exceed the largest batch may run them all the
            same.
        max_batch: largest global batch, instead of the application's.
        most: largest micro-batch, instead of each type's.
    """
    profiles = {t.gpu_type: t for t in application.types}
    rows = [profiles.get(name) for name in configurations.types]
    column = (len(rows), 1)
    unit = np.array([p.unit if p else 1 for p in rows], dtype=np.int64).reshape(column)
    low = np.array([p.least if p else 1 for p in rows], dtype=np.float64).reshape(column)
    high = np.array([p.most if p else 1 for p in rows], dtype=np.float64).reshape(column)
    if most is not None:
        high = np.full(column, float(most))
    gpus = np.array(configurations.gpus, dtype=np.int64).reshape(column)
    replicas = np.maximum(gpus // unit, 1)
    has_type = np.array([p is not None for p in rows], dtype=np.bool_).reshape(column)
    possible = has_type & (gpus % unit == 0)
    #: Samples of a global batch per sample of a micro-batch.
    spread = (replicas * application.micro_batches).astype(np.float64)
    if fixed:
        batches = np.full(column, float(application.batch))
    else:
        largest = float(application.max_batch if max_batch is None else max_batch)
        smallest = np.maximum(float(application.initial_batch), low * spread)
        if compat:
            # The artifact then counts down, and so allows the smallest batch above the largest.
            batches = np.geomspace(smallest[:, 0], largest, TRIED, axis=-1)
        else:
            possible &= smallest <= largest * (1 + 1e-12)
            batches = np.geomspace(np.minimum(smallest, largest)[:, 0], largest, TRIED, axis=-1)
    local = batches / spread
    accumulation = np.zeros_like(local)
    if application.accumulation:
        accumulation = np.maximum(np.ceil(local / high - _SLACK) - 1, 0)
        if compat or not fixed:
            alone = (replicas == 1) & (batches > application.initial_batch + _SLACK)
            accumulation = np.where(alone, np.maximum(accumulation, 1), accumulation)
    micro_batch = np.ceil(local / (accumulation + 1) - _SLACK)
    valid = possible & (low <= micro_batch) & (micro_batch <= high)
    # A fixed batch is exactly that; an elastic one is what whole micro-batches make of it.
    samples = batches if fixed else spread * micro_batch * (accumulation + 1)
    batch_candidates = BatchCandidates(
        replicas,
        micro_batch.astype(np.int64),
        accumulation.astype(np.int64),
        np.asarray(samples),
        valid,
    )
    for array in (
        batch_candidates.replicas,
        batch_candidates.micro_batch,
        batch_candidates.accumulation,
        batch_candidates.samples,
        batch_candidates.valid,
    ):
        array.flags.writeable = False
    return batch_candidates
