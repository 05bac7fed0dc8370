"""Sia's fit of step times, corrected by a Gaussian process of its residuals over shapes.

The seven parameters of `throughput.fit` cannot follow every curve. The residuals of the measured
points, in logarithms of seconds, are interpolated over

    x = (log2 replicas, log2 nodes, log2 micro-batch)

by Gaussian process regression (Rasmussen and Williams 2006, chapter 2) with the prior mean 0 and a
squared-exponential kernel: far from all measurements the fit alone counts. A step and a micro-step
have a process each, with one kernel matrix. The kernel is a product over the coordinates, so that
predictions take one exponential per point and distinct shape, and per point and distinct
micro-batch.

>>> from slurm_elastic.core.application import Observation
>>> seen = tuple(Observation("t4", 1, g, 8, s, 0.2) for g, s in ((1, 0.2), (2, 0.3), (4, 0.26)))
>>> corrected(seen).iteration_time(1, [1, 2, 4], 8).round(2).tolist()
[0.2, 0.3, 0.26]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.core.application import Observation
from slurm_elastic.models import throughput
from slurm_elastic.models.throughput import ThroughputParameters

Floats = NDArray[np.float64]

#: Length scales: doublings of replicas, nodes and micro-batch over which residuals are alike.
_SCALES = (0.7, 0.7, 1.5)
#: Standard deviations of residuals and of measurements, in logarithms of seconds.
_AMPLITUDE = 0.15
_NOISE = 0.02
#: No prediction leaves the fit by more than a factor of two.
_MOST = math.log(2.0)
#: Micro-batches of one shape that the fit itself takes: at least so many times apart, and how many.
_APART, _MOST_BATCHES = 1.5, 4
#: Room for replicas beside nodes in one integer.
_SHIFT = 1 << 24


@dataclass(frozen=True, eq=False, slots=True)
class CorrectedThroughput:
    """Step times of one job on one GPU type; made by `corrected`.

    Attributes:
        fit: the seven parameters.
        points: [P, 3] scaled coordinates of the measurements.
        weights: [P, 2] of each measurement in the logarithm of a step and of a micro-step.
    """

    fit: ThroughputParameters
    points: Floats
    weights: Floats

    def lighter(self, *, compute: float, network: float) -> CorrectedThroughput:
        """Return the model of a job that computes and sends less, as with frozen layers."""
        return replace(self, fit=self.fit.lighter(compute=compute, network=network))

    def iteration_time(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        micro_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Return the seconds of a step with its accumulated micro-steps. Arguments broadcast."""
        step, micro = self.corrections(nodes, replicas, micro_batch)
        last = self.fit.step_time(nodes, replicas, micro_batch)
        compute = self.fit.accumulation_time(micro_batch)
        return np.asarray(last * step + np.asarray(accumulation) * compute * micro)

    def corrections(
        self, nodes: ArrayLike, replicas: ArrayLike, micro_batch: ArrayLike
    ) -> tuple[Floats, Floats]:
        """Return the factors of a step's and of a micro-step's seconds. Arguments broadcast."""
        n, r, m = np.broadcast_arrays(nodes, replicas, micro_batch)
        shapes, shape_at = np.unique(
            n.ravel().astype(np.int64) * _SHIFT + r.ravel().astype(np.int64), return_inverse=True
        )
        batches, batch_at = np.unique(np.maximum(m.ravel(), 1), return_inverse=True)
        by_shape = _kernel(shapes % _SHIFT, self.points[:, 0], _SCALES[0])
        by_shape *= _kernel(shapes // _SHIFT, self.points[:, 1], _SCALES[1])
        by_batch = _kernel(batches, self.points[:, 2], _SCALES[2])
        factors = []
        for column in range(2):
            grid = (by_shape * (_AMPLITUDE**2 * self.weights[:, column])) @ by_batch.T
            grid = np.exp(np.clip(grid, -_MOST, _MOST))
            factors.append(grid[shape_at.ravel(), batch_at.ravel()].reshape(n.shape))
        return factors[0], factors[1]


def corrected(
    observations: Sequence[Observation], *, unit: int = 1, overlap: bool = True
) -> CorrectedThroughput:
    """Return the corrected model of these measurements; equal input, same object.

    Args:
        observations: of one GPU type, at least one; of equal configurations the first counts.
        unit: GPUs per replica.
        overlap: whether communication may hide behind computation.

    Raises:
        ValueError: as `throughput.fit`.
    """
    return _corrected(tuple(observations), unit, overlap)


def posterior_deviation(
    observations: Sequence[Observation],
    *,
    unit: int = 1,
    nodes: int,
    replicas: int,
    micro_batch: int,
) -> float:
    """Return the standard deviation of the logarithm of a step's seconds in a configuration.

    That is of the process of the residuals, after these measurements: the less, the nearer they
    are; `_AMPLITUDE` without any.

    Args:
        observations: of one GPU type.
        unit: GPUs per replica.
        nodes: of the configuration.
        replicas: over all its nodes.
        micro_batch: samples per replica and micro-step.
    """
    shapes = {(o.gpus // unit, o.nodes, o.micro_batch) for o in observations}
    points = np.log2(np.array(sorted(shapes), dtype=np.float64).reshape(-1, 3)) / _SCALES
    at = np.log2(np.array([(replicas, nodes, micro_batch)], dtype=np.float64)) / _SCALES
    near = _AMPLITUDE**2 * np.exp(-0.5 * ((points - at) ** 2).sum(axis=1))
    explained = near @ np.linalg.solve(_covariance(points), near)
    return float(np.sqrt(max(0.0, _AMPLITUDE**2 - explained)))


@lru_cache(maxsize=8192)
def _corrected(
    observations: tuple[Observation, ...], unit: int, overlap: bool
) -> CorrectedThroughput:
    fit = throughput.fit(_thinned(observations), unit=unit, overlap=overlap)
    different: dict[tuple[int, int, int], Observation] = {}
    for o in observations:
        different.setdefault((o.nodes, o.gpus, o.micro_batch), o)
    rows = np.array(list(different), dtype=np.float64)
    nodes, replicas, micro = rows[:, 0], rows[:, 1] // unit, rows[:, 2]
    measured = np.array([(o.step_s, o.micro_step_s) for o in different.values()])
    predicted = np.stack([fit.step_time(nodes, replicas, micro), fit.accumulation_time(micro)])
    residuals = np.clip(np.log(measured) - np.log(predicted.T), -_MOST, _MOST)
    points = np.log2(np.stack([replicas, nodes, micro], axis=1)) / _SCALES
    return CorrectedThroughput(fit, points, np.linalg.solve(_covariance(points), residuals))


def _covariance(points: Floats) -> Floats:
    """Return the [P, P] covariance of measurements at scaled coordinates."""
    apart = points[:, None, :] - points[None, :, :]
    covariance = _AMPLITUDE**2 * np.exp(-0.5 * (apart**2).sum(axis=2))
    covariance[np.diag_indices(len(points))] += _NOISE**2
    return np.asarray(covariance)


def _thinned(observations: Sequence[Observation]) -> list[Observation]:
    """Return the measurements that the seven parameters are fitted to: few of each shape.

    A new point beside others of its shape moves the fit little, and the residuals follow it; so
    most new points keep the fit as it is.
    """
    taken: dict[tuple[int, int], list[int]] = {}
    kept = []
    for o in observations:
        batches = taken.setdefault((o.nodes, o.gpus), [])
        apart = all(max(m, o.micro_batch) >= _APART * min(m, o.micro_batch) for m in batches)
        if len(batches) < _MOST_BATCHES and apart:
            batches.append(o.micro_batch)
            kept.append(o)
    return kept


def _kernel(values: NDArray[np.int64], points: Floats, scale: float) -> Floats:
    """Return the [values, points] factor of the kernel in one coordinate."""
    at = np.log2(values.astype(np.float64)) / scale
    return np.asarray(np.exp(-0.5 * (at[:, None] - points[None, :]) ** 2))
