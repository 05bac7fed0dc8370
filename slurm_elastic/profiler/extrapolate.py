"""Communication stalls of models that were not profiled. Pure.

After STASH (ICDCS 2023), whose abstract says that the number of layers and of gradients is
modelled; the formula is our definition:

    stall = c0 + c1 layers + c2 gradient bytes          seconds per step, all c >= 0

one for each configuration, by least squares over the models that were profiled on it. A latency
or a bandwidth cannot be negative, and without that bound the fit answers with negative stalls
outside of what was profiled. Errors count relative to the stall, below 2 % of the computing time
relative to that: models differ by a factor of hundreds, and what is minimised would else be
the error of the largest alone, while a stall that nobody notices need not be met.

How wrong this is, is measured by leaving out one model after the other (`left_out`).

>>> known = [Known("a", 10, 1e8, 0.12), Known("b", 100, 1e8, 0.21), Known("c", 10, 2e8, 0.22)]
>>> found = fit(known)
>>> round(found.base_s, 6), round(found.layer_s, 6), round(found.byte_s * 1e9, 6)
(0.01, 0.001, 1.0)
>>> round(found.stall_s(layers=50, gradient_bytes=1e8), 6)
0.16
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

#: Models that a fit needs, one for each coefficient; leaving one out needs one more.
LEAST = 3
#: Stalls below this part of the computing time need not be met.
_FLOOR = 0.02


class ExtrapolationError(ValueError):
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
    """Coefficients: seconds, seconds per layer, seconds per byte."""

    base_s: float
    layer_s: float
    byte_s: float

    def stall_s(self, *, layers: int, gradient_bytes: float) -> float:
        """Seconds per step."""
        return self.base_s + self.layer_s * layers + self.byte_s * gradient_bytes


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


def fit(known: Sequence[Known]) -> Fit:
    """Coefficients from different models on one configuration.

    Raises:
        ExtrapolationError: fewer than three models, or models that do not tell layers from bytes.
    """
    if len(known) < LEAST:
        raise ExtrapolationError(
            f"{len(known)} model{'s' if len(known) != 1 else ''} profiled, {LEAST} are needed"
        )
    rows = np.array([(1.0, k.layers, k.gradient_bytes) for k in known])
    # Columns of one size: seconds per byte are 1e-10, and the rank would be one of rounding.
    scales = np.maximum(rows.max(axis=0), 1e-300)
    rows /= scales
    if np.linalg.matrix_rank(rows, tol=1e-6) < LEAST:
        raise ExtrapolationError(
            "the profiled models do not tell layers from gradient bytes: profile another"
        )
    stalls = np.array([k.stall_s for k in known])
    sizes = np.array([_size(k) for k in known])
    sizes = np.maximum(sizes, max(1e-9 * float(sizes.max()), 1e-300))
    found, _ = nnls(rows / sizes[:, None], stalls / sizes)
    return Fit(*(float(c) for c in found / scales))


def left_out(known: Sequence[Known]) -> tuple[Missed, ...]:
    """Each model against a fit to the others, where those suffice for one; in the order given."""
    answers = []
    for i, one in enumerate(known):
        try:
            found = fit([*known[:i], *known[i + 1 :]])
        except ExtrapolationError:
            continue
        predicted = found.stall_s(layers=one.layers, gradient_bytes=one.gradient_bytes)
        answers.append(Missed(one, predicted))
    return tuple(answers)


def typical(missed: Sequence[Missed]) -> float:
    """The root mean square of the relative errors; NaN: none are known."""
    if not missed:
        return math.nan
    return math.sqrt(sum(m.error**2 for m in missed) / len(missed))


def _size(known: Known) -> float:
    return max(known.stall_s, _FLOOR * known.compute_s)
