"""Criteria of a layer's convergence: three published rules behind one protocol.

A criterion is called in some steps, on rank 0, and returns how many layers, from the front,
have converged. `freezer` freezes them if cap, penalty and safeguards allow it.

- `Plasticity`: Egeria (EuroSys'23). The front-most layer that trains is compared with its state
  at the last check, on the same input; it has converged when that difference no longer falls.
- `GradientChange`: AutoFreeze (2021). Layers in front of the first whose gradient changed by
  at least the median change between two intervals.
- `GradientNorm`: PipeTransformer (ICML'21). The layer with the smallest gradient among those
  that its cap allows to freeze.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from slurm_elastic.models.frozen_penalty import cap
from slurm_elastic.training.measure.gradient_noise import squared_norm

#: Plasticity compares at most so many samples: its matrix grows with their square.
MOST_SAMPLES = 32


@dataclass(frozen=True, kw_only=True)
class CriterionInputs:
    """Measurements of a step for a criterion.

    Attributes:
        layers: number of layers of the model.
        frozen: number of frozen layers.
        epoch: epochs done.
        progress: of the whole training, 0 to 1.
        gradients: of each layer that trains, from the front: means over the whole batch.
        plasticity: of the front-most layer that trains since the last check; None: unknown.
    """

    layers: int
    frozen: int
    epoch: int
    progress: float
    gradients: Sequence[Sequence[torch.Tensor]]
    plasticity: float | None = None


class Criterion(Protocol):
    """Rule by which layers have converged.

    Attributes:
        plastic: whether it uses `CriterionInputs.plasticity`, which costs two passes of one layer.
    """

    plastic: bool

    def see(self, look: CriterionInputs) -> int:
        """Return the number of converged layers from the front; at least `look.frozen`."""

    def thawed(self) -> None:
        """Discard all measurements, as all layers train again."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values: numbers, text and lists of them."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore a state that `state_dict` returned."""


class Plasticity:
    """Egeria's rule, one layer after the other.

    Readings are smoothed over `smooth` checks. A line is fitted to the last `window` of them;
    a check passes if its slope is less than `share` of the steepest so far (the paper: of the
    first, which may be flat by chance), and the layer has converged after `window` passes in a
    row. After a thaw the window is halved.

    A further deviation: the reference is the layer at the last check (the paper refreshes its
    own "periodically"), in full precision, and of that layer alone: those before it are frozen
    and give both the same input.

    Args:
        window: checks that are fitted, and passes in a row.
        share: of the steepest slope, below which a slope counts as flat.
        smooth: checks of the moving average.
    """

    plastic = True

    def __init__(self, *, window: int = 10, share: float = 0.2, smooth: int = 3) -> None:
        if window < 2:
            raise ValueError(f"Plasticity: window {window} is invalid: expected at least 2")
        self._window = window
        self._share = share
        self._smooth = smooth
        self._layer = self._passes = 0
        self._raw: list[float] = []
        self._smoothed: list[float] = []
        self._steepest = 0.0

    def see(self, look: CriterionInputs) -> int:
        """See `Criterion.see`."""
        if look.frozen != self._layer:
            self._forget(look.frozen)
        if look.plasticity is None:
            return look.frozen
        self._raw.append(look.plasticity)
        self._smoothed.append(statistics.fmean(self._raw[-self._smooth :]))
        keep = max(self._window, self._smooth)
        self._raw, self._smoothed = self._raw[-keep:], self._smoothed[-keep:]
        if len(self._smoothed) < self._window:
            return look.frozen
        slope = abs(_slope(self._smoothed[-self._window :]))
        self._steepest = max(self._steepest, slope)
        # A layer that never changed is flat from the first check on.
        flat = slope < self._share * self._steepest or self._steepest == 0
        self._passes = self._passes + 1 if flat else 0
        return look.frozen + (self._passes >= self._window)

    def thawed(self) -> None:
        """See `Criterion.thawed`."""
        self._window = max(2, self._window // 2)
        self._forget(0)

    def state_dict(self) -> dict[str, Any]:
        """See `Criterion.state_dict`."""
        return {
            "window": self._window,
            "layer": self._layer,
            "raw": list(self._raw),
            "smoothed": list(self._smoothed),
            "steepest": self._steepest,
            "passes": self._passes,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Criterion.load_state_dict`."""
        self._window, self._layer = state["window"], state["layer"]
        self._raw, self._smoothed = list(state["raw"]), list(state["smoothed"])
        self._steepest, self._passes = state["steepest"], state["passes"]

    def _forget(self, layer: int) -> None:
        self._layer = layer
        self._raw, self._smoothed = [], []
        self._steepest, self._passes = 0.0, 0


class GradientChange:
    """AutoFreeze's rule, once per interval.

    G_l is the 1-norm of the sum of a layer's gradients over an interval, its change
    |G_l before - G_l| / G_l before. The first layer whose change reaches the percentile of all
    that train keeps training, and all behind it; those in front have converged.

    The gradients summed are those of the checks, not of every step; a copy of them is kept.
    Meant for fine-tuning.

    Args:
        intervals: in the whole training.
        percentile: of the changes.
    """

    plastic = False

    def __init__(self, *, intervals: int = 10, percentile: float = 50.0) -> None:
        self._intervals = intervals
        self._percentile = percentile
        self._interval = 0
        self._before: list[float] | None = None
        self._start = 0
        self._sums: list[list[torch.Tensor]] | None = None
        self._frozen = 0

    def see(self, look: CriterionInputs) -> int:
        """See `Criterion.see`."""
        if look.frozen != self._frozen:
            # The rest of this interval has fewer layers; sums begin with the next one.
            self._before = self._before and self._before[look.frozen - self._frozen :]
            self._sums, self._frozen = None, look.frozen
            self._start = max(self._start, look.frozen)
        interval = int(look.progress * self._intervals)
        if interval != self._interval and self._sums is not None:
            now = [sum(float(t.abs().sum()) for t in tensors) for tensors in self._sums]
            self._start = look.frozen + self._converged(now)
            self._before, self._sums = now, None
        self._interval = interval
        if self._sums is None:
            self._sums = [[g.clone() for g in layer] for layer in look.gradients]
        else:
            for sums, layer in zip(self._sums, look.gradients, strict=True):
                if len(sums) == len(layer):
                    for total, gradient in zip(sums, layer, strict=True):
                        total.add_(gradient)
        return self._start

    def _converged(self, now: list[float]) -> int:
        if self._before is None or len(self._before) != len(now):
            return 0
        pairs = zip(self._before, now, strict=True)
        changes = [abs(old - new) / old if old else 0.0 for old, new in pairs]
        limit = percentile(changes, self._percentile)
        return next(i for i, change in enumerate(changes) if change >= limit)

    def thawed(self) -> None:
        """See `Criterion.thawed`."""
        self._before, self._sums, self._start, self._frozen = None, None, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """See `Criterion.state_dict`; the present interval begins anew after a restart."""
        return {
            "interval": self._interval,
            "before": self._before,
            "start": self._start,
            "frozen": self._frozen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Criterion.load_state_dict`."""
        self._interval, self._before = state["interval"], state["before"]
        self._start, self._frozen = state["start"], state["frozen"]


class GradientNorm:
    """PipeTransformer's rule, once per epoch.

    Layers in front of the one with the smallest gradient have converged, but no more of those
    that train than a fraction `alpha`. Norms are averaged over the epoch's checks.

    Args:
        alpha: fraction of the layers that still train.
    """

    plastic = False

    def __init__(self, *, alpha: float = 1 / 3) -> None:
        self._alpha = alpha
        self._epoch = 0
        self._answer = 0
        self._frozen = 0
        self._norms: list[float] = []

    def see(self, look: CriterionInputs) -> int:
        """See `Criterion.see`."""
        if look.frozen != self._frozen:
            self._norms, self._frozen = [], look.frozen
            self._answer = max(self._answer, look.frozen)
        if look.epoch > self._epoch and self._norms:
            reach = cap(len(self._norms), 1, alpha=self._alpha)
            smallest = self._norms.index(min(self._norms))
            self._answer, self._norms = look.frozen + min(reach, smallest), []
        self._epoch = look.epoch
        norms = [_norm(layer) for layer in look.gradients]
        self._norms = [a + b for a, b in zip(self._norms or [0.0] * len(norms), norms, strict=True)]
        return self._answer

    def thawed(self) -> None:
        """See `Criterion.thawed`."""
        self._norms, self._answer, self._frozen = [], 0, 0

    def state_dict(self) -> dict[str, Any]:
        """See `Criterion.state_dict`."""
        return {
            "epoch": self._epoch,
            "answer": self._answer,
            "frozen": self._frozen,
            "norms": list(self._norms),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Criterion.load_state_dict`."""
        self._epoch, self._answer = state["epoch"], state["answer"]
        self._frozen, self._norms = state["frozen"], list(state["norms"])


def similarity_loss(new: torch.Tensor, old: torch.Tensor) -> float:
    """Return the difference of two activations in the similarities of their samples.

    The similarity-preserving loss (Tung and Mori, ICCV'19) that Egeria measures plasticity
    with: |G(new) - G(old)|_F^2 / b^2, with G the b x b matrix of the samples' dot products,
    each row of length 1.

    Args:
        new: shape (b, ...).
        old: the same shape.
    """
    difference = _similarity(new) - _similarity(old)
    return float(difference.square().sum()) / len(difference) ** 2


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated linearly between the two nearest values.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50)
    2.5
    """
    ordered = sorted(values)
    at = percent / 100 * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def _similarity(activation: torch.Tensor) -> torch.Tensor:
    rows = activation.detach()[:MOST_SAMPLES].flatten(1).float()
    return torch.nn.functional.normalize(rows @ rows.T, dim=1)


def _slope(values: Sequence[float]) -> float:
    """Return the slope of the least-squares line through equally spaced values."""
    middle = (len(values) - 1) / 2
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    return sum((i - middle) * v for i, v in enumerate(values)) / spread


def _norm(tensors: Sequence[torch.Tensor]) -> float:
    return math.sqrt(float(squared_norm(tensors)))
