"""Speed of a job beside another one, from what each of them uses alone.

Zacarias et al. (JPDC 2021) predict the slowdown of co-located applications from hardware counters;
their model is not published. Here:

    speed = c - sum_k w_k overload_k,    w_k >= 0

so that a job that uses more never predicts more speed, for itself or beside it (`overloads`),
fitted by non-negative least squares. A node's network, storage and memory count as parts of about
the most that such jobs were seen to use (`Scales`), as no capacity of theirs is known. With
scikit-learn and enough pairs, boosted trees with the same monotone constraints take its place,
which also see whether a job computes in mixed precision.

The model keeps its own error: the 90 % quantile of how far predictions were too high for pairs that
were left out of a fit, application by application.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

#: Coefficients before anything was measured: those of the 780 published pairs, on an RTX 3090.
PUBLISHED = (0.99, 0.086, 0.191)
#: Resource of each overload.
RESOURCES = ("compute", "compute", *("memory",) * 3, *("network",) * 2, *("storage",) * 2)
#: Quantile of the measured loads that counts as a full network, storage or memory.
_OF_LOADS = 0.95
#: A resource that costs less speed is not named.
_NAMED = 0.01
#: Speeds above this are noise of a measurement.
_MOST_SPEED = 1.05
#: Pairs from which coefficients, and trees, are fitted.
FEW, _MANY = 20, 300
_LEVEL = 0.9
#: Error before it can be measured.
UNKNOWN_ERROR = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class AloneLoad:
    """Resources that a job uses while it is alone.

    Attributes:
        application: jobs of one application are alike; errors are measured across applications.
        compute: part of the time in which the shared device computes, 0 to 1.
        memory_bus: part of the time in which the memory of a GPU is read or written, 0 to 1.
        memory_mb: of the device.
        mixed_precision: whether it computes in mixed precision.
        gpus: GPUs of the shared node that it holds; 0: the number does not matter.
        known: whether its use was measured; models learn from, and predict for, these only.
        sent_bytes_s: bytes a second that its ranks on the node exchange with other nodes; 0: none,
            or not measured.
        read_bytes_s: bytes a second that they read from storage; 0: none, or not measured.
        memory_bytes_s: bytes a second that they move between memory and cache; 0: not measured.
    """

    application: str
    compute: float
    memory_bus: float
    memory_mb: float = 0.0
    mixed_precision: bool = False
    gpus: int = 0
    known: bool = True
    sent_bytes_s: float = 0.0
    read_bytes_s: float = 0.0
    memory_bytes_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scales:
    """Use of network, storage and memory, in bytes a second, that counts as 1."""

    sent_bytes_s: float = 1.0
    read_bytes_s: float = 1.0
    memory_bytes_s: float = 1.0

    @classmethod
    def of(cls, runs: Sequence[SharedRun]) -> Scales:
        """Return the scales of measured runs: about the most that was used; 1 where nothing was.

        A few measurements far above all others do not count.
        """
        loads = [load for run in runs for load in (run.job, run.other)]
        return cls(
            sent_bytes_s=_most([load.sent_bytes_s for load in loads]),
            read_bytes_s=_most([load.read_bytes_s for load in loads]),
            memory_bytes_s=_most([load.memory_bytes_s for load in loads]),
        )


def _most(used: Sequence[float]) -> float:
    positive = [value for value in used if value > 0]
    return float(np.quantile(positive, _OF_LOADS, method="lower")) if positive else 1.0


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
        scales: of network, storage and memory in these runs.
    """

    weights: Floats
    trees: Any = None
    error: float = UNKNOWN_ERROR
    runs: int = 0
    scales: Scales = Scales()

    @classmethod
    def prior(cls) -> SlowdownModel:
        """Return the model before anything was measured."""
        constant, overload, product = PUBLISHED
        others = [0.0] * (len(RESOURCES) - 2)
        return cls(np.array([constant, -overload, -product, *others]))

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
        return replace(model, error=max(0.0, error), runs=len(runs))

    def speeds(self, pairs: Sequence[tuple[AloneLoad, AloneLoad]]) -> Floats:
        """Return the predicted speed of the first job of each pair beside the second."""
        if not pairs:
            return np.empty(0)
        if self.trees is not None:
            predicted = self.trees.predict(_tree_features(pairs, self.scales))
        else:
            predicted = _with_one(overloads(pairs, self.scales)) @ self.weights
        return np.asarray(np.clip(predicted, 0.0, 1.0))

    def contended(self, job: AloneLoad, other: AloneLoad) -> str:
        """Return the resource, one of `RESOURCES`, that costs the first job most; "": none."""
        if self.trees is not None:
            return ""
        costs = dict.fromkeys(RESOURCES, 0.0)
        lost = -overloads([(job, other)], self.scales)[0] * self.weights[1:]
        for resource, cost in zip(RESOURCES, lost.tolist(), strict=True):
            costs[resource] += cost
        resource = max(costs, key=lambda r: costs[r])
        return resource if costs[resource] >= _NAMED else ""

    @property
    def boosted(self) -> bool:
        """Whether predictions are made by boosted trees."""
        return self.trees is not None


def overloads(pairs: Sequence[tuple[AloneLoad, AloneLoad]], scales: Scales = Scales()) -> Floats:
    """Return [N, 9] by how much each pair exceeds the resources of a node.

    No value falls if one of the two jobs uses more.

    The columns are those of `RESOURCES`.
    """
    u1, m1, n1, r1, u2, m2, n2, r2 = _loads(pairs, scales).T
    lacking = np.maximum(0.0, u1 + u2 - 1)
    bus = np.maximum(0.0, m1 + m2 - 1)
    compute_and_memory = [lacking, lacking * m2, bus, u2 * m2, m1 * m2]
    network = [np.maximum(0.0, n1 + n2 - 1), n1 * n2]
    storage = [np.maximum(0.0, r1 + r2 - 1), r1 * r2]
    return np.column_stack([*compute_and_memory, *network, *storage])


def fitted(runs: Sequence[SharedRun], *, boosted: bool) -> SlowdownModel:
    """Return a model without its error; see `SlowdownModel.fit`."""
    if not runs:
        return SlowdownModel.prior()
    pairs, scales = [(r.job, r.other) for r in runs], Scales.of(runs)
    speeds = np.array([min(r.speed, _MOST_SPEED) for r in runs])
    if boosted and len(runs) >= _MANY and importlib.util.find_spec("sklearn"):
        trees = _trees(pairs, speeds, scales)
        return SlowdownModel(SlowdownModel.prior().weights, trees, scales=scales)
    if len(runs) < FEW:
        # Fill up with predictions of the prior, over all loads, until there are FEW runs.
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
    lost = np.column_stack([np.ones(len(pairs)), -overloads(pairs, scales)])
    from scipy.optimize import nnls  # noqa: PLC0415 - slow: selasticd starts without it

    weights, _ = nnls(lost, speeds)
    return SlowdownModel(np.r_[weights[0], -weights[1:]], scales=scales)


def _trees(pairs: Sequence[tuple[AloneLoad, AloneLoad]], speeds: Floats, scales: Scales) -> Any:
    from sklearn.ensemble import (  # noqa: PLC0415 - an extra
        HistGradientBoostingRegressor,
    )

    features = _tree_features(pairs, scales)
    return HistGradientBoostingRegressor(
        max_leaf_nodes=4,
        min_samples_leaf=20,
        max_iter=200,
        learning_rate=0.05,
        early_stopping=False,
        random_state=0,
        monotonic_cst=[-1] * (features.shape[1] - 2) + [0, 0],
    ).fit(features, speeds)


def _tree_features(pairs: Sequence[tuple[AloneLoad, AloneLoad]], scales: Scales) -> Floats:
    loads = _loads(pairs, scales)
    u1, m1, n1, r1, u2, m2, n2, r2 = loads.T
    lacking = np.maximum(0.0, u1 + u2 - 1)
    mixed = np.array([[a.mixed_precision, b.mixed_precision] for a, b in pairs], dtype=np.float64)
    return np.column_stack([loads, u1 + u2, m1 + m2, n1 + n2, r1 + r2, lacking * m2, mixed])


def _loads(pairs: Sequence[tuple[AloneLoad, AloneLoad]], scales: Scales) -> Floats:
    """Return [N, 8] compute, memory, network and storage of the first and the second job."""
    return np.array([[*_parts(a, scales), *_parts(b, scales)] for a, b in pairs])


def _parts(load: AloneLoad, scales: Scales) -> tuple[float, float, float, float]:
    network = min(1.0, load.sent_bytes_s / scales.sent_bytes_s)
    storage = min(1.0, load.read_bytes_s / scales.read_bytes_s)
    memory = max(load.memory_bus, min(1.0, load.memory_bytes_s / scales.memory_bytes_s))
    return load.compute, memory, network, storage


def _with_one(values: Floats) -> Floats:
    return np.concatenate([np.ones((len(values), 1)), values], axis=1)
