"""Communication stalls of models that were not profiled. Pure.

After STASH (ICDCS 2023), whose abstract says that the number of layers and of gradients is
modelled; the formula is our definition. Communication takes, in seconds per step,

    comm = c0 + c1 layers + c2 gradient bytes           all c >= 0

with other coefficients for each configuration, by least squares over the models that were
profiled on it. A latency or a bandwidth cannot be negative, and without that bound the fit answers
with negative stalls outside of what was profiled. Errors count relative to the stall, below 2 % of
the computing time relative to that: models differ by a factor of hundreds, and what is minimised
would else be the error of the largest alone, while a stall that nobody notices need not be met.

All of it is stall where gradients are sent after the backward pass. torch's
DistributedDataParallel sends them in buckets while that pass runs; then of `comm` hides what the
computing time covers, but never the last bucket:

    stall = max(comm - h compute, comm min(1, bucket / gradient bytes), 0)

h is the part of the computing time behind which communication hides; of buckets those of torch
(25 MB) and none are tried. This form is taken only where six or more models speak for it clearly
(an F test: the squares that it leaves must be fewer by more than a further coefficient explains).

How wrong all this is, is measured by leaving out one model after the other (`left_out`).

>>> known = [Known("a", 10, 1e8, 0.12), Known("b", 100, 1e8, 0.21), Known("c", 10, 2e8, 0.22)]
>>> found = fit(known)
>>> round(found.base_s, 6), round(found.layer_s, 6), round(found.byte_s * 1e9, 6), found.hidden
(0.01, 0.001, 1.0, 0.0)
>>> round(found.stall_s(layers=50, gradient_bytes=1e8), 6)
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
#: Models from which on hidden communication is looked for.
_LEAST_HIDDEN = 6
#: Stalls below this part of the computing time need not be met.
_FLOOR = 0.02
#: Bytes of a bucket of torch's DistributedDataParallel, and no bucket.
_BUCKETS = (0.0, 25 * 2.0**20)
_HIDDEN = tuple(i / 20 for i in range(1, 20))
#: What the F statistic of hidden communication must exceed.
_CLEAR = 6.0
#: Rounds in which each model finds out which term of the maximum is its own.
_ROUNDS = 12

Floats = NDArray[np.float64]


class ExtrapolationError(InvalidInputError):
    """The profiled models do not tell; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class Known:
    """A model that was profiled on the configuration.

    Attributes:
        stall_s: seconds per step that it waited for others (interconnect and network).
        compute_s: seconds per step on one GPU.
    """

    model: str
    layers: int
    gradient_bytes: float
    stall_s: float
    compute_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds, seconds per layer, seconds per byte; see the module.

    Attributes:
        hidden: part of the computing time that hides communication, 0 to 1.
        bucket_bytes: of these nothing hides.
    """

    base_s: float
    layer_s: float
    byte_s: float
    hidden: float = 0.0
    bucket_bytes: float = 0.0

    def stall_s(self, *, layers: int, gradient_bytes: float, compute_s: float = 0.0) -> float:
        """Seconds per step."""
        whole = self.base_s + self.layer_s * layers + self.byte_s * gradient_bytes
        if not self.hidden:
            return whole
        last = min(1.0, self.bucket_bytes / gradient_bytes) if gradient_bytes else 0.0
        return max(whole - self.hidden * compute_s, whole * last)


@dataclass(frozen=True, slots=True)
class Missed:
    """A model's stall, and what the others let expect."""

    known: Known
    predicted_s: float

    @property
    def error(self) -> float:
        """Relative to the stall, or to 2 % of the computing time if that is more."""
        size = _size(self.known)
        wrong = abs(self.predicted_s - self.known.stall_s)
        return wrong / size if size else math.inf if wrong else 0.0

    @property
    def step_error(self) -> float:
        """Relative to computing and stall together; NaN if the model was not timed."""
        if not self.known.compute_s:
            return math.nan
        wrong = abs(self.predicted_s - self.known.stall_s)
        return wrong / (self.known.compute_s + self.known.stall_s)


def predict(found: Fit, known: Known) -> Missed:
    """What a fit says of a model, beside what was measured."""
    return Missed(
        known,
        found.stall_s(
            layers=known.layers, gradient_bytes=known.gradient_bytes, compute_s=known.compute_s
        ),
    )


def fit(known: Sequence[Known], *, hide: bool = True) -> Fit:
    """Coefficients from different models on one configuration.

    Args:
        known: the models.
        hide: look for communication that hides behind computing.

    Raises:
        ExtrapolationError: fewer than three models, or models that do not tell layers from bytes.
    """
    if len(known) < LEAST:
        raise ExtrapolationError(
            f"{len(known)} model{'s' if len(known) != 1 else ''} profiled, {LEAST} are needed"
        )
    data = _Data(known)
    best, left = data.solve(0.0, 0.0)
    if hide and len(known) >= _LEAST_HIDDEN and all(k.compute_s for k in known):
        freedom = len(known) - LEAST - 1
        limit = left / (1 + _CLEAR / freedom)
        for bucket in _BUCKETS:
            for hidden in _HIDDEN:
                found, squares = data.solve(hidden, bucket)
                if squares < min(left, limit):
                    best, left = found, squares
    return best


def left_out(known: Sequence[Known], *, hide: bool = True) -> tuple[Missed, ...]:
    """Each model against a fit to the others, where those suffice for one; in the order given."""
    answers = []
    for i, one in enumerate(known):
        try:
            found = fit([*known[:i], *known[i + 1 :]], hide=hide)
        except ExtrapolationError:
            continue
        answers.append(predict(found, one))
    return tuple(answers)


def typical(missed: Sequence[Missed]) -> float:
    """The root mean square of the relative errors; NaN: none are known."""
    if not missed:
        return math.nan
    return math.sqrt(sum(m.error**2 for m in missed) / len(missed))


class _Data:
    """Models as arrays, columns scaled to one size: seconds per byte are 1e-10.

    Raises:
        ExtrapolationError: the models do not tell layers from bytes.
    """

    def __init__(self, known: Sequence[Known]) -> None:
        self.bytes: Floats = np.array([k.gradient_bytes for k in known])
        self.stalls: Floats = np.array([k.stall_s for k in known])
        self.compute: Floats = np.array([k.compute_s for k in known])
        rows: Floats = np.array([(1.0, k.layers, k.gradient_bytes) for k in known])
        self.scales: Floats = np.maximum(rows.max(axis=0), 1e-300)
        self.rows: Floats = rows / self.scales
        if np.linalg.matrix_rank(self.rows, tol=1e-6) < LEAST:
            raise ExtrapolationError(
                "the profiled models do not tell layers from gradient bytes: profile another"
            )
        sizes: Floats = np.array([_size(k) for k in known])
        self.sizes: Floats = np.maximum(sizes, max(1e-9 * float(sizes.max()), 1e-300))

    def solve(self, hidden: float, bucket: float) -> tuple[Fit, float]:
        """The best coefficients found for these two, and the sum of squares that they leave.

        Which term of the maximum holds for a model depends on the coefficients: both are found
        in turn until nothing changes. Not surely the best of all, but of all that were tried.
        """
        last = (
            np.minimum(1.0, bucket / np.maximum(self.bytes, 1e-300)) if hidden else 0.0 * self.bytes
        )
        covered = hidden * self.compute
        exposed = last >= 1.0
        best = np.zeros(LEAST)
        least = math.inf
        for _ in range(_ROUNDS):
            # A model whose communication hides wholly says nothing of how long it takes.
            tells = ~exposed | (last > 0)
            rows = np.where(exposed[:, None], self.rows * last[:, None], self.rows)[tells]
            goal = np.where(exposed, self.stalls, self.stalls + covered)[tells]
            if len(goal) < LEAST:
                break
            sizes = self.sizes[tells]
            found, _ = nnls(rows / sizes[:, None], goal / sizes)
            whole = self.rows @ found
            stalls = np.maximum(whole - covered, whole * last)
            squares = float((((stalls - self.stalls) / self.sizes) ** 2).sum())
            if squares < least:
                best, least = found, squares
            now = (whole * last >= whole - covered) if hidden else exposed
            if (now == exposed).all():
                break
            exposed = now
        base, layer, byte = (float(c) for c in best / self.scales)
        return Fit(base, layer, byte, hidden, bucket), least


def _size(known: Known) -> float:
    return max(known.stall_s, _FLOOR * known.compute_s)
