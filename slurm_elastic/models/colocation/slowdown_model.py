"""Speed of a job beside another one, from what each of them uses alone.

Zacarias et al. (JPDC 2021) predict the slowdown of co-located applications from hardware counters;
their model is not published. Here:

    speed = c - sum_k w_k overload_k,    w_k >= 0

so that a job that uses more never predicts more speed, for itself or beside it (`overloads`),
fitted by non-negative least squares. With scikit-learn and enough pairs, boosted trees with the
same monotone constraints take its place, which also see whether a job computes in mixed precision.

The model keeps its own error: the 90 % quantile of how far predictions were too high for pairs that
were left out of a fit, application by application.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Coefficients before anything was measured: those of the 780 published pairs, on an RTX 3090.
PUBLISHED = (0.99, 0.086, 0.191)
#: Speeds above this are noise of a measurement.
_MOST_SPEED = 1.05
#: Pairs from which coefficients, and trees, are fitted.
FEW, _MANY = 20, 300
_LEVEL = 0.9
#: Error before it can be measured.
UNKNOWN_ERROR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneLoad:
    """What a job uses while it is alone.

    Attributes:
        application: jobs of one application are alike; errors are measured across applications.
        compute: part of the time in which the shared device computes, 0 to 1.
        memory_bus: part of the time in which its memory is read or written, 0 to 1.
        memory_mb: of the device.
        mixed_precision: whether it computes in mixed precision.
        gpus: of the shared node that it holds; 0: that does not matter.
        known: whether its use was measured; models learn from, and predict for, these only.
    """

    application: str
    compute: float
    memory_bus: float
    memory_mb: float = 0.0
    mixed_precision: bool = False
    gpus: int = 0
    known: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedRun:
    """Measured speed of a job beside another one, relative to its speed alone."""

    job: AloneLoad
    other: AloneLoad
    speed: float


@dataclass(frozen=True, eq=False)
class SlowdownModel:
    """A fitted model.

    Attributes:
        weights: constant, and weight of each overload, at most 0.
        trees: boosted model in place of the weights; None: there is none.
        error: 90 % of the left-out predictions were too high by at most this.
        runs: number of runs learned from.
    """

    weights: Floats
    trees: Any = None
    error: float = UNKNOWN_ERROR
    runs: int = 0

    @classmethod
    def prior(cls) -> SlowdownModel:
        """Return the model before anything was measured."""
        constant, overload, product = PUBLISHED
        return cls(np.array([constant, -overload, -product, 0.0, 0.0, 0.0]))

    @classmethod
    def fit(cls, runs: Sequence[SharedRun], *, boosted: bool = True) -> SlowdownModel:
        """Fit to measured runs; with few of them, to the prior's predictions as well.

        Args:
            runs: measured.
            boosted: trees where scikit-learn is installed and there are enough runs.
        """
        model = fitted(runs, boosted=boosted)
        applications = sorted({r.job.application for r in runs})
        too_high: list[float] = []
        for name in applications if len(runs) >= FEW else ():
            inside = [r for r in runs if name not in (r.job.application, r.other.application)]
            left_out = [r for r in runs if name in (r.job.application, r.other.application)]
            predicted = fitted(inside, boosted=False).speeds([(r.job, r.other) for r in left_out])
            too_high += (predicted - [min(r.speed, _MOST_SPEED) for r in left_out]).tolist()
        error = float(np.quantile(too_high, _LEVEL)) if too_high else UNKNOWN_ERROR
        return cls(model.weights, model.trees, max(0.0, error), len(runs))

    def speeds(self, pairs: Sequence[tuple[AloneLoad, AloneLoad]]) -> Floats:
        """Return the predicted speed of the first job of each pair beside the second."""
        if not pairs:
            return np.empty(0)
        if self.trees is not None:
            predicted = self.trees.predict(_tree_features(pairs))
        else:
            predicted = _with_one(overloads(pairs)) @ self.weights
        return np.asarray(np.clip(predicted, 0.0, 1.0))

    @property
    def boosted(self) -> bool:
        """Whether trees predict."""
        return self.trees is not None


def overloads(pairs: Sequence[tuple[AloneLoad, AloneLoad]]) -> Floats:
    """Return [N, 5] what a device lacks for both: none falls where one of them uses more."""
    u1, m1, u2, m2 = _loads(pairs).T
    lacking = np.maximum(0.0, u1 + u2 - 1)
    bus = np.maximum(0.0, m1 + m2 - 1)
    return np.column_stack([lacking, lacking * m2, bus, u2 * m2, m1 * m2])


def fitted(runs: Sequence[SharedRun], *, boosted: bool) -> SlowdownModel:
    """Return a model without its error; see `SlowdownModel.fit`."""
    if not runs:
        return SlowdownModel.prior()
    pairs = [(r.job, r.other) for r in runs]
    speeds = np.array([min(r.speed, _MOST_SPEED) for r in runs])
    if boosted and len(runs) >= _MANY and importlib.util.find_spec("sklearn"):
        return SlowdownModel(SlowdownModel.prior().weights, _trees(pairs, speeds))
    if len(runs) < FEW:
        # As many predictions of the prior, over all loads, as runs are missing.
        levels = np.linspace(0.1, 1.0, FEW - len(runs))
        imagined = [
            (
                AloneLoad(application="", compute=float(level), memory_bus=float(level) / 2),
                AloneLoad(application="", compute=float(level), memory_bus=float(level) / 2),
            )
            for level in levels
        ]
        speeds = np.r_[speeds, SlowdownModel.prior().speeds(imagined)]
        pairs += imagined
    lost = np.column_stack([np.ones(len(pairs)), -overloads(pairs)])
    from scipy.optimize import nnls  # noqa: PLC0415 - slow: selasticd starts without it

    weights, _ = nnls(lost, speeds)
    return SlowdownModel(np.r_[weights[0], -weights[1:]])


def _trees(pairs: Sequence[tuple[AloneLoad, AloneLoad]], speeds: Floats) -> Any:
    from sklearn.ensemble import (  # noqa: PLC0415 - an extra
        HistGradientBoostingRegressor,
    )

    features = _tree_features(pairs)
    return HistGradientBoostingRegressor(
        max_leaf_nodes=4,
        min_samples_leaf=20,
        max_iter=200,
        learning_rate=0.05,
        early_stopping=False,
        random_state=0,
        monotonic_cst=[-1] * (features.shape[1] - 2) + [0, 0],
    ).fit(features, speeds)


def _tree_features(pairs: Sequence[tuple[AloneLoad, AloneLoad]]) -> Floats:
    loads = _loads(pairs)
    u1, m1, u2, m2 = loads.T
    lacking = np.maximum(0.0, u1 + u2 - 1)
    mixed = np.array([[a.mixed_precision, b.mixed_precision] for a, b in pairs], dtype=np.float64)
    return np.column_stack([loads, u1 + u2, m1 + m2, lacking * m2, mixed])


def _loads(pairs: Sequence[tuple[AloneLoad, AloneLoad]]) -> Floats:
    return np.array([[a.compute, a.memory_bus, b.compute, b.memory_bus] for a, b in pairs])


def _with_one(values: Floats) -> Floats:
    return np.concatenate([np.ones((len(values), 1)), values], axis=1)
