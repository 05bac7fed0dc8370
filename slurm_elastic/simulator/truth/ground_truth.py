"""Truth about an application: its speed in each shape, and the progress of its steps.

After the simulator of Sia's artifact (SOSP'23; `applications.py`, `job.py`):

* a step's time is looked up at its placement, linear in the micro-batch between measured ones;
  at a placement that was not measured it is interpolated linearly between (nodes, replicas,
  micro-batch) triples of all rows (Delaunay); and outside of all rows (our definition: the
  artifact has none) it is no faster than the largest measured placement within it;
* gradient statistics at global batch B and epoch e are linear in B between validation runs;
  a step is worth `gain = (var + sqr) / (var B0/B + sqr)` steps at the initial batch B0;
* progress per second is `gain / iteration time * calibration`, the iteration being
  `step + s (step - sync)` with s accumulated micro-steps;
* epoch e ends at the smallest progress that any validation run shows for it.

A pipeline of S stages with M micro-batches in flight takes `3 (S - 1 + M) f` per iteration (GPipe;
Sia, section 5.3), f the forward time of a stage, and as in the artifact nothing for its all-reduce.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.application import Noise
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    ApplicationProfileError,
    Shape,
    TypeTable,
)
from slurm_elastic.simulator.workloads.application_profiles import smallest_rotation as canonical

Floats = NDArray[np.float64]

#: Largest number of nodes in the artifact's interpolation.
_MOST_NODES = 16


class GroundTruth:
    """Truth of one application. Look-ups are cached: an instance serves all its jobs.

    Attributes:
        batches: smallest and largest global batch, `initial` and `largest`.
        targets: progress at the end of each epoch.
    """

    def __init__(self, profile: ApplicationProfile) -> None:
        self.profile = profile
        self.initial = profile.batches[0]
        self.largest = profile.batches[-1]
        self.targets: tuple[float, ...] = tuple(
            min(column) for column in zip(*profile.progress, strict=True)
        )
        self._tables = {name: _Table(table) for name, table in profile.types.items()}
        self._rates: dict[tuple[str, Shape, int, int, int], float] = {}
        self._noise: dict[tuple[int, int], Noise] = {}
        self._gains: dict[int, Floats] = {}

    @property
    def total(self) -> float:
        """Progress at which a job is complete."""
        return float(self.targets[-1])

    def step(self, gpu_type: str, shape: Iterable[int], micro_batch: int) -> tuple[float, float]:
        """Return (seconds of a step without accumulation, seconds of its synchronisation).

        Args:
            gpu_type: with a table.
            shape: GPUs on each node; zeros and rotation do not matter.
            micro_batch: samples per replica and micro-step.

        Raises:
            ProfileError: the tables say nothing about such a shape or micro-batch.
        """
        return self._table(gpu_type).step(canonical(shape), micro_batch)

    def iteration(self, gpu_type: str, shape: Shape, micro_batch: int) -> tuple[float, float]:
        """Return (seconds of an iteration without accumulation, of one accumulated micro-step)."""
        step, sync = self._table(gpu_type).step(shape, micro_batch)
        pipeline = self.profile.micro_batches
        if pipeline > 1:
            stages = self.profile.types[gpu_type].unit
            iteration_s = 3 * (stages - 1 + pipeline) * step
            return iteration_s, iteration_s
        return step, step - sync

    def most(self, gpu_type: str, shape: Iterable[int]) -> int:
        """Return the largest micro-batch measured at a placement."""
        return self._table(gpu_type).most(canonical(shape))

    def most_with(self, gpu_type: str, replicas: int) -> int:
        """Return the largest micro-batch measured at any placement of so many GPUs."""
        return self._table(gpu_type).most_with(replicas)

    def noise(self, batch: int, epoch: int) -> Noise:
        """Return the gradient noise at a global batch, epochs from 0; the same object each time."""
        statistics = self._noise.get((batch, epoch))
        if statistics is None:
            p = self.profile
            statistics = Noise(
                sqr=_linear(batch, p.batches, [row[epoch] for row in p.sqr]),
                var=_linear(batch, p.batches, [row[epoch] for row in p.var]),
            )
            self._noise[batch, epoch] = statistics
        return statistics

    def gain(self, batch: int, epoch: int) -> float:
        """Return the progress of one step at this batch, in steps at the initial batch."""
        noise = self.noise(batch, epoch)
        sqr, var = noise.sqr, noise.var
        return (var + sqr) / (var / (batch / self.initial) + sqr)

    def gains(self, batch: int) -> Floats:
        """Return `gain` at every epoch; shape (epochs,)."""
        gains = self._gains.get(batch)
        if gains is None:
            batches = self.profile.batches
            known_batch = min(max(batch, batches[0]), batches[-1])
            high = max(1, bisect_left(batches, known_batch)) if len(batches) > 1 else 0
            low = max(0, high - 1)
            span = batches[high] - batches[low]
            part = (known_batch - batches[low]) / span if span else 0.0
            sqr, var = (
                (1 - part) * np.asarray(table[low]) + part * np.asarray(table[high])
                for table in (self.profile.sqr, self.profile.var)
            )
            gains = (var + sqr) / (var / (batch / self.initial) + sqr)
            self._gains[batch] = gains
        return gains

    def goodput(
        self, gpu_type: str, shape: Shape, micro_batch: int, accumulation: int, epoch: int
    ) -> float:
        """Return progress per second; `shape` in its smallest rotation."""
        key = (gpu_type, shape, micro_batch, accumulation, epoch)
        cached_rate = self._rates.get(key)
        if cached_rate is None:
            step, micro = self.iteration(gpu_type, shape, micro_batch)
            gain = self.gain(self.batch(gpu_type, shape, micro_batch, accumulation), epoch)
            iteration = step + accumulation * micro
            rate = gain / iteration * self.profile.calibration
            if not rate > 0 or not math.isfinite(rate):
                raise ApplicationProfileError(
                    f"{self.profile.types[gpu_type].source}: placement {_digits(shape)} at"
                    f" local_bsz {micro_batch} would take {iteration:.3g} s per step; measure it"
                )
            cached_rate = self._rates[key] = rate
        return cached_rate

    @property
    def assumptions(self) -> tuple[str, ...]:
        """Sentences about placements outside of all rows, whose times were assumed."""
        return tuple(
            f"{table.source}: placement {_digits(shape)} is not measured: taken to be no faster"
            f" than {_digits(known)}"
            for table in self._tables.values()
            for shape, known in sorted(table.unmeasured.items())
        )

    def replicas(self, gpu_type: str, shape: Shape) -> int:
        """Return the replicas that fit into a shape."""
        return max(1, sum(shape) // self.profile.types[gpu_type].unit)

    def batch(self, gpu_type: str, shape: Shape, micro_batch: int, accumulation: int) -> int:
        """Return the global batch, bound by the largest one with a validation run."""
        replicas = self.replicas(gpu_type, shape)
        requested = replicas * micro_batch * (accumulation + 1) * self.profile.micro_batches
        return min(requested, self.largest)

    def single(self, gpu_type: str) -> float:
        """Return the samples/s of one replica: its largest micro-batch over its longest step."""
        table = self.profile.types[gpu_type]
        shape = canonical((table.unit,))
        curve = table.curves[shape]
        if self.profile.micro_batches > 1:
            return self.profile.micro_batches / self.iteration(gpu_type, shape, 1)[0]
        return max(curve.micro_batches) / max(curve.step_s)

    def rate(self, gpu_type: str, shape: Shape, batch: int) -> float:
        """Return iterations/s times calibration in a shape with a fixed batch (Gavel's measure)."""
        shape = canonical(shape)
        micro, accumulation = self.fixed_batch(gpu_type, shape, batch)
        iteration_s, micro_step_s = self.iteration(gpu_type, shape, micro)
        return self.profile.calibration / (iteration_s + accumulation * micro_step_s)

    def fixed_batch(
        self, gpu_type: str, shape: Shape, batch: int, *, alone: bool = True
    ) -> tuple[int, int]:
        """Return (micro-batch, accumulated micro-steps) of a shape for a global batch.

        Args:
            gpu_type: with a table.
            shape: GPUs on each node, in the smallest rotation.
            batch: global.
            alone: a lone replica accumulates, to see its gradient's noise.
        """
        if self.profile.micro_batches > 1:
            return 1, 0
        batch = min(batch, self.largest)
        return self.capped(gpu_type, shape, *self._split(gpu_type, shape, batch, alone=alone))

    def first_batch(self, gpu_type: str, shape: Shape) -> tuple[int, int]:
        """Return the split on a type where the job was never measured: the initial batch."""
        if self.profile.micro_batches > 1:
            return 1, 0
        least = self.profile.types[gpu_type].least
        batch = max(self.initial, least * self.replicas(gpu_type, shape))
        return self.capped(gpu_type, shape, *self._split(gpu_type, shape, batch))

    def capped(self, gpu_type: str, shape: Shape, micro: int, accumulation: int) -> tuple[int, int]:
        """Return the split bound by the measured micro-batches and by the largest batch."""
        replicas = self.replicas(gpu_type, shape)
        micro = min(micro, self.most_with(gpu_type, sum(shape)))
        return max(1, min(micro, self.largest // (replicas * (accumulation + 1)))), accumulation

    def _split(
        self, gpu_type: str, shape: Shape, batch: int, *, alone: bool = True
    ) -> tuple[int, int]:
        replicas = self.replicas(gpu_type, shape)
        local = math.ceil(batch / replicas - 1e-8)
        accumulation = math.ceil(local / self.most(gpu_type, shape) - 1e-8) - 1
        if alone and replicas == 1 and batch > self.initial:
            # One replica alone sees gradient noise only between accumulated micro-steps.
            accumulation = max(1, accumulation)
        return math.ceil(local / (accumulation + 1) - 1e-8), accumulation

    def _table(self, gpu_type: str) -> _Table:
        table = self._tables.get(gpu_type)
        if table is None:
            raise ApplicationProfileError(
                f"application {self.profile.name} has no table for GPU type {gpu_type};"
                f" add placements-{gpu_type}.csv"
            )
        return table


class _Table:
    """Look-ups in the tables of one GPU type."""

    def __init__(self, table: TypeTable) -> None:
        self._table = table
        self.source = table.source
        self._interpolator: Any = None
        #: Placements outside of all rows, and the ones that they were taken for.
        self.unmeasured: dict[Shape, Shape] = {}
        self.step = cache(self._step)
        self.most = cache(self._most)
        self.most_with = cache(self._most_with)

    def _step(self, shape: Shape, micro_batch: int) -> tuple[float, float]:
        curve = self._table.curves.get(shape)
        if curve is None:
            return self._interpolated(shape, micro_batch)
        # Fewer samples than were measured are taken to need as long as the fewest measured.
        if micro_batch > curve.micro_batches[-1]:
            raise ApplicationProfileError(
                f"{self._table.source}: placement {_digits(shape)} was measured from local_bsz"
                f" {curve.micro_batches[0]} to {curve.micro_batches[-1]}, not at {micro_batch}"
            )
        return (
            _linear(micro_batch, curve.micro_batches, curve.step_s),
            _linear(micro_batch, curve.micro_batches, curve.sync_s),
        )

    def _most(self, shape: Shape) -> int:
        curve = self._table.curves.get(shape)
        if curve is not None:
            return curve.micro_batches[-1]
        nodes, replicas = min(len(shape), _MOST_NODES), sum(shape)
        rows = [r[2] for r in self._table.scalability if r[0] >= nodes and r[1] >= replicas]
        return int(max(rows)) if rows else self._table.most

    def _most_with(self, gpus: int) -> int:
        rows = [
            float(c.micro_batches[-1])
            for shape, c in self._table.curves.items()
            if sum(shape) == gpus
        ]
        rows += [r[2] for r in self._table.scalability if r[1] == gpus]
        return int(max(rows)) if rows else self._table.most

    def _interpolated(self, shape: Shape, micro_batch: int) -> tuple[float, float]:
        if self._interpolator is None:
            self._interpolator = _interpolator(self._table) or _no_time
        nodes = min(len(shape), _MOST_NODES)
        micro_batch = max(micro_batch, self._table.least)
        step, sync = np.ravel(self._interpolator([nodes, sum(shape), micro_batch]))
        if math.isfinite(step):
            return float(step), float(sync)
        return self._extrapolated(shape, micro_batch)

    def _extrapolated(self, shape: Shape, micro_batch: int) -> tuple[float, float]:
        """Return times outside of all rows: no faster than the largest placement within it."""
        within = [
            nearest
            for nearest, curve in self._table.curves.items()
            if len(nearest) <= len(shape)
            and sum(nearest) <= sum(shape)
            and curve.micro_batches[-1] >= micro_batch
        ]
        if not within:
            raise ApplicationProfileError(
                f"{self._table.source}: has no row for placement {_digits(shape)} at local_bsz"
                f" {micro_batch}, nor has the scalability table; measure it"
            )
        nearest = max(within, key=lambda s: (sum(s), len(s), s))
        self.unmeasured[shape] = nearest
        step, sync = self.step(nearest, micro_batch)
        longer = step * sum(shape) / sum(nearest)
        return longer, longer - (step - sync)


def _no_time(_: Any) -> tuple[float, float]:
    return math.nan, math.nan


def _interpolator(table: TypeTable) -> Any:
    """Return an interpolator between all rows, those of placements averaged per triple."""
    from scipy.interpolate import LinearNDInterpolator  # noqa: PLC0415 - a second, seldom needed
    from scipy.spatial import QhullError  # noqa: PLC0415

    sums: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for shape, curve in table.curves.items():
        for micro, step, sync in zip(curve.micro_batches, curve.step_s, curve.sync_s, strict=True):
            sums.setdefault((len(shape), sum(shape), micro), []).append((step, sync))
    rows = [(*key, *np.mean(sums[key], axis=0)) for key in sorted(sums)] + list(table.scalability)
    points = np.array(rows, dtype=np.float64)
    try:
        return LinearNDInterpolator(points[:, :3], points[:, 3:])
    except (QhullError, ValueError):
        return None


def _linear(x: float, xs: tuple[int, ...], ys: Any) -> float:
    """Return the value between the neighbours of x; the nearest value outside of them."""
    i = bisect_left(xs, x)
    if i == 0 or (i < len(xs) and xs[i] == x):
        return float(ys[i])
    if i == len(xs):
        return float(ys[-1])
    # The order of operations is numpy's and scipy's, so that values agree to the last bits.
    slope = (ys[i] - ys[i - 1]) / (xs[i] - xs[i - 1])
    return float(slope * (x - xs[i - 1]) + ys[i - 1])


def _digits(shape: Shape) -> str:
    return "+".join(str(g) for g in shape)
