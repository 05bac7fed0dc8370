"""Progress of a training as a beta distribution, learned from finished trainings (ONES, SC'21).

    progress ~ Beta(a, b),   a = epochs done,   b = 1 + softplus(W2 tanh(W1 x))
    x = log(epoch size), initial loss, epochs done, 1 - loss / initial loss, accuracy

fitted by maximum likelihood on every epoch of finished trainings. The published predictor takes
these values as they are, has relu in place of softplus, and takes 60 passes of Adam from random
weights; here the features are standardised, the fit is L-BFGS on all rows, and a + b is bounded.
Remaining work is `done (1 / progress - 1)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import betaln, digamma, expit

Floats = NDArray[np.float64]

_HIDDEN = 64
_STEPS, _DECAY = 200, 0.1
#: Latest epochs that are learned from.
_MOST_ROWS = 2_000
#: Most of a + b. The published a grows with the epochs, whatever the data: for trainings that were
#: not learned from, that is worse than a constant distribution. 5 to 10 suit the published 20.
_SUREST = 10.0
#: Progress is kept this far from 0 and 1, where the density has no value.
_EDGE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRecord:
    """One epoch of a training.

    Attributes:
        epoch_size: samples of an epoch.
        epochs: done so far.
        initial_loss, loss, accuracy: of the training.
        progress: part of the training that is done; of a running one it is not known, and not read.
    """

    epoch_size: float
    epochs: float
    initial_loss: float
    loss: float
    accuracy: float
    progress: float = float("nan")


@dataclass(frozen=True, eq=False)
class BetaProgress:
    """A fitted predictor."""

    mean: Floats
    scale: Floats
    hidden: Floats
    output: Floats

    @classmethod
    def fit(cls, records: Sequence[EpochRecord], *, seed: int = 0) -> BetaProgress:
        """Fit the latest epochs of finished trainings, in order of time.

        Raises:
            ValueError: there is none.
        """
        rows = records[-_MOST_ROWS:]
        if not rows:
            raise ValueError("progress: no finished epoch is known; expected at least one")
        features = np.array([_features(r) for r in rows])
        mean, scale = features.mean(axis=0), np.maximum(features.std(axis=0), _EDGE)
        inputs = _with_one((features - mean) / scale)
        done = np.array([r.epochs for r in rows])
        target = np.clip([r.progress for r in rows], _EDGE, 1 - _EDGE)
        rng = np.random.default_rng(seed)
        hidden = rng.normal(size=(inputs.shape[1], _HIDDEN)) / np.sqrt(inputs.shape[1])
        output = np.abs(rng.normal(size=_HIDDEN + 1)) / np.sqrt(_HIDDEN)
        # Begin where b is about what the trainings had left.
        output[-1] = float(np.mean(done * (1 / target - 1)))
        fitted = minimize(
            _loss,
            np.r_[hidden.ravel(), output],
            args=(inputs, done, target),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": _STEPS},
        )
        size = hidden.size
        return cls(mean, scale, fitted.x[:size].reshape(hidden.shape), fitted.x[size:])

    def shapes(self, records: Sequence[EpochRecord]) -> tuple[Floats, Floats]:
        """Return a and b of each record's distribution."""
        features = np.array([_features(r) for r in records]).reshape(len(records), -1)
        inputs = _with_one((features - self.mean) / self.scale)
        raw, _ = _raw(self.hidden, self.output, inputs)
        a, b = np.maximum([r.epochs for r in records], _EDGE), 1.0 + np.logaddexp(0.0, raw)
        factor = np.minimum(1.0, _SUREST / (a + b))
        return a * factor, b * factor

    def expected(self, records: Sequence[EpochRecord]) -> Floats:
        """Return the mean progress of each record."""
        a, b = self.shapes(records)
        return a / (a + b)

    def drawn(self, records: Sequence[EpochRecord], rng: np.random.Generator) -> Floats:
        """Return one draw of the progress of each record, as the published policy takes it."""
        a, b = self.shapes(records)
        return np.clip(rng.beta(a, b), _EDGE, 1 - _EDGE)

    def log_likelihood(self, records: Sequence[EpochRecord]) -> float:
        """Return the mean log likelihood of records whose progress is known."""
        a, b = self.shapes(records)
        return mean_log_likelihood(a, b, np.array([r.progress for r in records]))


def mean_log_likelihood(a: Floats, b: Floats, progress: Floats) -> float:
    """Return the mean log density of beta distributions at these values."""
    p = np.clip(progress, _EDGE, 1 - _EDGE)
    return float(np.mean((a - 1) * np.log(p) + (b - 1) * np.log1p(-p) - betaln(a, b)))


def _features(record: EpochRecord) -> list[float]:
    initial = record.initial_loss or 1.0
    return [
        float(np.log(max(record.epoch_size, 1.0))),
        record.initial_loss,
        record.epochs,
        1 - record.loss / initial,
        record.accuracy,
    ]


def _with_one(values: Floats) -> Floats:
    return np.concatenate([values, np.ones((len(values), 1))], axis=1)


def _raw(hidden: Floats, output: Floats, inputs: Floats) -> tuple[Floats, Floats]:
    units = np.tanh(inputs @ hidden)
    return _with_one(units) @ output, units


def _loss(weights: Floats, inputs: Floats, done: Floats, target: Floats) -> tuple[float, Floats]:
    """Return the mean negative log likelihood with its decay, and its gradient."""
    size = inputs.shape[1] * _HIDDEN
    hidden, output = weights[:size].reshape(inputs.shape[1], _HIDDEN), weights[size:]
    raw, units = _raw(hidden, output, inputs)
    a, b = np.maximum(done, _EDGE), 1.0 + np.logaddexp(0.0, raw)
    loss = -mean_log_likelihood(a, b, target) + _DECAY / 2 * float(weights @ weights)
    slope = (digamma(b) - digamma(a + b) - np.log1p(-target)) * expit(raw) / len(done)
    back = np.outer(slope, output[:-1]) * (1 - units**2)
    gradient = np.r_[(inputs.T @ back).ravel(), _with_one(units).T @ slope]
    return loss, gradient + _DECAY * weights
