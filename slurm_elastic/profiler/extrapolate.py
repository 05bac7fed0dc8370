"""Communication stalls of models that were not profiled. Pure.

After STASH (ICDCS 2023), whose abstract names the numbers of layers and of gradients as inputs
of a model; the formula is our definition. Communication takes, in seconds per step,

    comm = c0 + c1 layers + c2 gradient bytes           all c >= 0

with coefficients of each configuration, by least squares over the models that were profiled on
it. A latency or a bandwidth cannot be negative; without that bound the fit predicts negative
stalls outside of the profiled range. Errors are relative to the stall, below 2 % of the computing
time relative to that: stalls differ by a factor of hundreds, so absolute errors would fit the
largest alone, and smaller stalls do not matter.

All of it is stall where gradients are sent after the backward pass. torch's
DistributedDataParallel sends them in buckets during that pass; then computing hides a part of
`comm`, but never the last bucket:

    stall = max(comm - h compute, comm min(1, bucket / gradient bytes), 0)

h is the fraction of the computing time that hides communication; buckets of torch's size (25 MB)
and none are tried. This form is used only where six or more models support it clearly (an F test:
its sum of squares must be smaller by more than a further coefficient explains).

The error is measured by leaving out one model after the other (`leave_one_out`).

>>> models = [("a", 10, 1e8, 0.12), ("b", 100, 1e8, 0.21), ("c", 10, 2e8, 0.22)]
>>> stall = fit([ObservedStall(*model) for model in models])
>>> round(stall.base_s, 6), round(stall.layer_s, 6), round(stall.byte_s * 1e9, 6), stall.hidden
(0.01, 0.001, 1.0, 0.0)
>>> round(stall.stall_s(layers=50, gradient_bytes=1e8), 6)
0.16
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from slurm_elastic.core.errors import InvalidInputError

#: Models that a fit needs, one for each coefficient; leaving one out needs one more.
LEAST = 3
#: Smallest number of models with which hidden communication is fitted.
_LEAST_HIDDEN = 6
#: Fraction of the computing time below which stalls do not matter.
_FLOOR = 0.02
#: Bytes of a bucket of torch's DistributedDataParallel, and no bucket.
_BUCKETS = (0.0, 25 * 2.0**20)
_HIDDEN = tuple(i / 20 for i in range(1, 20))
#: Threshold of the F statistic of hidden communication.
_CLEAR = 6.0
#: Iterations that assign a term of the maximum to each model.
_ROUNDS = 12

Floats = NDArray[np.float64]


class ExtrapolationError(InvalidInputError):
    """The profiled models do not suffice; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class ObservedStall:
    """Stall of a model that was profiled on the configuration.

    Attributes:
        stall_s: seconds per step of waiting for other GPUs (interconnect and network).
        compute_s: seconds per step on one GPU.
    """

    model: str
    layers: int
    gradient_bytes: float
    stall_s: float
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients of a configuration: seconds, seconds per layer, seconds per byte.

    Attributes:
        hidden: fraction of the computing time that hides communication, 0 to 1.
        bucket_bytes: size of the last bucket, which is never hidden.
    """

    base_s: float
    layer_s: float
    byte_s: float
    hidden: float = 0.0
    bucket_bytes: float = 0.0

    def stall_s(self, *, layers: int, gradient_bytes: float, compute_s: float = 0.0) -> float:
        """Return the predicted stall in seconds per step."""
        total_s = self.base_s + self.layer_s * layers + self.byte_s * gradient_bytes
        if not self.hidden:
            return total_s
        last = min(1.0, self.bucket_bytes / gradient_bytes) if gradient_bytes else 0.0
        return max(total_s - self.hidden * compute_s, total_s * last)


@dataclass(frozen=True, slots=True)
class PredictedStall:
    """Stall of a model as observed, and as predicted from other models."""

    observed: ObservedStall
    predicted_s: float

    @property
    def error(self) -> float:
        """Error relative to the stall, or to 2 % of the computing time if that is more."""
        size = _size(self.observed)
        error_s = abs(self.predicted_s - self.observed.stall_s)
        return error_s / size if size else math.inf if error_s else 0.0

    @property
    def step_error(self) -> float:
        """Error relative to computing and stall together; NaN without a computing time."""
        if not self.observed.compute_s:
            return math.nan
        error_s = abs(self.predicted_s - self.observed.stall_s)
        return error_s / (self.observed.compute_s + self.observed.stall_s)


def predict(stall_fit: Fit, observed: ObservedStall) -> PredictedStall:
    """Return the stall of a model as observed and as a fit predicts it."""
    return PredictedStall(
        observed,
        stall_fit.stall_s(
            layers=observed.layers,
            gradient_bytes=observed.gradient_bytes,
            compute_s=observed.compute_s,
        ),
    )


def fit(stalls: Sequence[ObservedStall], *, hide: bool = True) -> Fit:
    """Return the coefficients of one configuration, fitted to several models.

    Args:
        stalls: one for each model.
        hide: also fit communication that computing hides.

    Raises:
        ExtrapolationError: fewer than three models, or layers and gradient bytes in proportion.
    """
    if len(stalls) < LEAST:
        raise ExtrapolationError(
            f"{len(stalls)} model{'s' if len(stalls) != 1 else ''} profiled, {LEAST} are needed;"
            " profile another one there"
        )
    data = _Data(stalls)
    best, least_squares = data.solve(0.0, 0.0)
    if hide and len(stalls) >= _LEAST_HIDDEN and all(k.compute_s for k in stalls):
        freedom = len(stalls) - LEAST - 1
        limit = least_squares / (1 + _CLEAR / freedom)
        for bucket in _BUCKETS:
            for hidden in _HIDDEN:
                candidate, squares = data.solve(hidden, bucket)
                if squares < min(least_squares, limit):
                    best, least_squares = candidate, squares
    return best


def leave_one_out(
    stalls: Sequence[ObservedStall], *, hide: bool = True
) -> tuple[PredictedStall, ...]:
    """Compare each model with a fit to the others, where these suffice; in the order given."""
    predictions = []
    for i, held_out in enumerate(stalls):
        try:
            others_fit = fit([*stalls[:i], *stalls[i + 1 :]], hide=hide)
        except ExtrapolationError:
            continue
        predictions.append(predict(others_fit, held_out))
    return tuple(predictions)


def rms_error(missed: Sequence[PredictedStall]) -> float:
    """Return the root mean square of the relative errors; NaN: there are none."""
    if not missed:
        return math.nan
    return math.sqrt(sum(m.error**2 for m in missed) / len(missed))


class _Data:
    """Models as arrays, columns scaled to one magnitude: seconds per byte are about 1e-10.

    Raises:
        ExtrapolationError: layers and gradient bytes are in proportion.
    """

    def __init__(self, stalls: Sequence[ObservedStall]) -> None:
        self.bytes: Floats = np.array([k.gradient_bytes for k in stalls])
        self.stalls: Floats = np.array([k.stall_s for k in stalls])
        self.compute: Floats = np.array([k.compute_s for k in stalls])
        rows: Floats = np.array([(1.0, k.layers, k.gradient_bytes) for k in stalls])
        self.scales: Floats = np.maximum(rows.max(axis=0), 1e-300)
        self.rows: Floats = rows / self.scales
        if np.linalg.matrix_rank(self.rows, tol=1e-6) < LEAST:
            raise ExtrapolationError(
                "the profiled models do not distinguish layers from gradient bytes; profile a model"
                " with another ratio of them"
            )
        sizes: Floats = np.array([_size(k) for k in stalls])
        self.sizes: Floats = np.maximum(sizes, max(1e-9 * float(sizes.max()), 1e-300))

    def solve(self, hidden: float, bucket: float) -> tuple[Fit, float]:
        """Return the best coefficients for these two values, and their sum of squares.

        The term of the maximum that holds for a model depends on the coefficients: both are
        computed in turn until nothing changes. The result is the best of these iterations, not
        necessarily the global one.
        """
        last = (
            np.minimum(1.0, bucket / np.maximum(self.bytes, 1e-300)) if hidden else 0.0 * self.bytes
        )
        covered = hidden * self.compute
        exposed = last >= 1.0
        best = np.zeros(LEAST)
        least = math.inf
        for _ in range(_ROUNDS):
            # A model whose communication is wholly hidden has no information about its duration.
            informative = ~exposed | (last > 0)
            rows = np.where(exposed[:, None], self.rows * last[:, None], self.rows)[informative]
            targets = np.where(exposed, self.stalls, self.stalls + covered)[informative]
            if len(targets) < LEAST:
                break
            sizes = self.sizes[informative]
            coefficients, _ = nnls(rows / sizes[:, None], targets / sizes)
            totals = self.rows @ coefficients
            stalls = np.maximum(totals - covered, totals * last)
            squares = float((((stalls - self.stalls) / self.sizes) ** 2).sum())
            if squares < least:
                best, least = coefficients, squares
            newly_exposed = (totals * last >= totals - covered) if hidden else exposed
            if (newly_exposed == exposed).all():
                break
            exposed = newly_exposed
        base, layer, byte = (float(c) for c in best / self.scales)
        return Fit(base, layer, byte, hidden, bucket), least


def _size(observed: ObservedStall) -> float:
    return max(observed.stall_s, _FLOOR * observed.compute_s)
