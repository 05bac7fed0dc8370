"""Speed of a job in any shape: a stated curve, corrected by measurements.

**Before any report** (our definition; `[speedup]` in elastic.toml). A job on
g GPUs of type t, evenly on n nodes in r racks, runs at

    speed = base[t] * (g/n)^(1-a) * n^(1-b) * r^(-b)

with a = -log2(1 - loss_in_node) and b = -log2(1 - loss_across_nodes): each
doubling inside a node keeps `1 - loss_in_node` of the efficiency, each
doubling of nodes, and again of racks, `1 - loss_across_nodes`. base[t] is
`types[t]` (1 for types that are not named): the speed is relative to one GPU
of a type that counts 1. Where the job's gradient bytes, its computing and the
speed of a tier's links are known (`CommunicationCost`, links.py), what that tier's stated loss
would cost is replaced by the part of its time in which the job computes.

**With reports** the speed is in samples/s and three things are fitted in log
space: base[t] for every measured type (the others keep their configured ratio
to the measured ones), one communication parameter theta that raises or lowers
all losses together (least squares with the stated curve as prior: measured
speeds are believed to 3.5 %, the stated losses to a factor of three), and at last a correction that
makes the curve exact in every measured shape and fades out with the distance
from it in doublings of GPUs, nodes and racks (inverse-square weights; half gone
one doubling away).

**Hostile reports.** A measurement counts per GPU at most `CEILING` times the
rate per GPU of the smallest measured shape of that type, and losses stay in
[0, 1]. So in GPUs on given nodes the fitted curve rises and is concave; with a
toll, and at the measured corrections, it need not be, therefore decisions use
`concave_envelope`. A toll only ever lowers a speed, and only its own job's.

>>> from slurm_elastic.config.schema import SpeedupSettings
>>> model = SpeedModel.fit(SpeedupSettings(loss_in_node=0.0, loss_across_nodes=0.5), ())
>>> model.speeds("a100", [1, 4, 8], [1, 1, 2]).tolist()
[1.0, 4.0, 4.0]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.config.schema import SpeedupSettings
from slurm_elastic.core.plan import Measurement
from slurm_elastic.models.links import CommunicationCost

Floats = NDArray[np.float64]

#: No report is believed that scales better than this times linear.
CEILING = 1.1
#: Standard deviations believed in the fit of theta: of a measured log2 speed, and of theta.
_NOISE = 0.05
_DOUBT = 2.0
#: Loss per doubling that theta can reach for where the configuration states (nearly) none.
_LEAST_SENSITIVITY = 0.03
#: The least log2 of the part of its time in which a job computes.
_LEAST_LOG = -40.0
#: Squared doublings below which a shape counts as the measured one.
_NEAR = 1e-12


class SpeedModel:
    """The speed of one job in any shape; immutable, hence shared between equal jobs.

    Attributes:
        measured: whether speeds are in samples/s; else relative to one GPU of a type counting 1.
        unit: how to show a speed to people.
        theta: the fitted communication parameter; 0 is the stated curve.
        toll: what the links cost the job; None: the stated losses count.
    """

    def __init__(
        self,
        *,
        bases: Mapping[str, float],
        other: Mapping[str, float],
        scale: float,
        losses: tuple[float, float, float],
        theta: float = 0.0,
        points: Mapping[str, tuple[Floats, Floats, Floats, Floats]] | None = None,
        toll: CommunicationCost | None = None,
    ) -> None:
        self._bases = dict(bases)
        self._other = other
        self._scale = scale
        self._losses = losses
        self._points = points or {}
        self.toll = toll
        self.theta = theta
        self.measured = bool(self._bases)
        self.unit = "samples/s" if self.measured else "times one GPU"

    @classmethod
    def fit(
        cls,
        stated: SpeedupSettings,
        measurements: tuple[Measurement, ...],
        toll: CommunicationCost | None = None,
    ) -> SpeedModel:
        """Return the model for these measurements; impossible ones are left out."""
        return _fit(
            stated.loss_in_node,
            stated.loss_across_nodes,
            tuple(sorted(stated.types.items())),
            tuple(_plain(m) for m in measurements if _sane(m)),
            toll,
        )

    def base(self, gpu_type: str) -> float:
        """Return the speed of one GPU of this type, before the correction at measured shapes."""
        fitted = self._bases.get(gpu_type)
        return self._scale * self._other.get(gpu_type, 1.0) if fitted is None else fitted

    def speeds(
        self,
        types: str | Sequence[str],
        gpus: ArrayLike,
        nodes: ArrayLike = 1,
        racks: ArrayLike = 1,
        *,
        share: float = 1.0,
    ) -> Floats:
        """Predict the speed of each shape.

        Args:
            types: one type for all shapes, or one per shape.
            gpus: GPUs of each shape, > 0.
            nodes: nodes they are spread over, evenly.
            racks: racks that those nodes are in.
            share: part of those racks' uplinks that the job gets; counts with a toll only.

        Returns:
            samples/s, or relative speeds when nothing was measured (see `measured`).
        """
        g, n, r = (np.asarray(v, dtype=np.float64) for v in (gpus, nodes, racks))
        if isinstance(types, str):
            return self._of_type(types, g, n, r, share)
        g, n, r = np.broadcast_arrays(g, n, r)
        out = np.empty(g.shape)
        names = np.asarray(types, dtype=object)
        for name in sorted(set(types)):
            at = names == name
            out[at] = self._of_type(name, g[at], n[at], r[at], share)
        return out

    def speed(
        self, gpu_type: str, gpus: int, nodes: int = 1, racks: int = 1, *, share: float = 1.0
    ) -> float:
        """Predict the speed of one shape; 0 for no GPUs."""
        if gpus <= 0:
            return 0.0
        inside, across, between = self._losses
        log_g, log_n, log_r = math.log2(gpus), math.log2(nodes), math.log2(racks)
        log_speed = (1 - inside) * (log_g - log_n) + (1 - across) * log_n - between * log_r
        if self.toll is not None:
            part = self.toll.part(gpu_type, gpus, nodes, racks, share=share)
            log_speed += max(_LEAST_LOG, math.log2(part)) if part > 0 else _LEAST_LOG
        if gpu_type in self._points:
            total, weights = 0.0, 1.0
            for at_g, at_n, at_r, residual in zip(*self._points[gpu_type], strict=True):
                apart = (log_g - at_g) ** 2 + (log_n - at_n) ** 2 + (log_r - at_r) ** 2
                weight = 1.0 / max(apart, _NEAR)
                total += weight * residual
                weights += weight
            log_speed += float(total / weights)
        return self.base(gpu_type) * math.exp2(log_speed)

    def _of_type(self, gpu_type: str, g: Floats, n: Floats, r: Floats, share: float) -> Floats:
        log_g, log_n, log_r = np.log2(g), np.log2(n), np.log2(r)
        log_speed = _shape(log_g, log_n, log_r, self._losses)
        if self.toll is not None:
            log_speed = log_speed + _log_part(self.toll, gpu_type, g, n, r, share=share)
        points = self._points.get(gpu_type)
        if points is not None:
            at_g, at_n, at_r, residual = points
            distance = (log_g[..., None] - at_g) ** 2 + (log_n[..., None] - at_n) ** 2
            distance = distance + (log_r[..., None] - at_r) ** 2
            weight = 1.0 / np.maximum(distance, _NEAR)
            log_speed = log_speed + weight @ residual / (weight.sum(axis=-1) + 1.0)
        return np.asarray(self.base(gpu_type) * np.exp2(log_speed), dtype=np.float64)


def concave_envelope(x: Floats, y: Floats) -> NDArray[np.int64]:
    """Return indices of the points on the least concave curve above (x, y), as far as it rises.

    Between two kept points no point lies above their connecting line, so
    stepping along kept points meets marginal gains that only fall. Points from
    the highest one on are dropped.

    Args:
        x: ascending, distinct.
        y: any values of the same length.
    """
    vertices: NDArray[np.int64] = np.arange(int(np.argmax(y)) + 1)
    while len(vertices) > 2:
        slopes = np.diff(y[vertices]) / np.diff(x[vertices])
        # A point below the line between its neighbours is below the envelope: all go at once.
        dents = np.flatnonzero(slopes[1:] > slopes[:-1] + 1e-12 * np.abs(slopes[:-1])) + 1
        if not len(dents):
            break
        vertices = np.delete(vertices, dents)
    return vertices


def _sane(m: Measurement) -> bool:
    return (
        m.steps > 0
        and m.gpus > 0
        and 0 < m.racks <= m.nodes <= m.gpus
        and math.isfinite(m.samples_per_s)
        and 1e-9 < m.samples_per_s < 1e15
    )


def _plain(m: Measurement) -> Measurement:
    """Return a measurement without the fields of a toll: with them equal models would differ."""
    return replace(m, compute_s=None, sync_s=None, reports=0, exchange="") if m.reports else m


@lru_cache(maxsize=8192)
def _fit(
    loss_in_node: float,
    loss_across_nodes: float,
    rates: tuple[tuple[str, float], ...],
    measurements: tuple[Measurement, ...],
    toll: CommunicationCost | None,
) -> SpeedModel:
    across = _exponent(loss_across_nodes)
    stated = np.array([_exponent(loss_in_node), across, across])
    if toll is not None:
        links = toll.links
        tiers = (links.inside(), links.rack, links.spine)
        stated[[speed is not None for speed in tiers]] = 0.0
    other = dict(rates)
    if not measurements:
        return SpeedModel(bases={}, other=other, scale=1.0, losses=_triple(stated), toll=toll)
    names = sorted({m.gpu_type for m in measurements})
    groups = [
        sorted(
            (m for m in measurements if m.gpu_type == name),
            key=lambda m: (m.gpus, m.nodes, m.racks),
        )
        for name in names
    ]
    shapes = [
        np.array([[m.gpus, m.nodes, m.racks] for m in group], dtype=np.float64).T
        for group in groups
    ]
    logs = [np.log2(shape) for shape in shapes]
    tolls = [
        0.0 if toll is None else _log_part(toll, name, *shape)
        for name, shape in zip(names, shapes, strict=True)
    ]
    log_s = [_believed(group) for group in groups]

    sensitivity = np.maximum(stated, _LEAST_SENSITIVITY)
    numerator = denominator = 0.0
    for (g, n, r), paid, s in zip(logs, tolls, log_s, strict=True):
        x = -(sensitivity[0] * (g - n) + sensitivity[1] * n + sensitivity[2] * r)
        y = s - _shape(g, n, r, stated) - paid
        numerator += float(np.sum((x - x.mean()) * (y - y.mean())))
        denominator += float(np.sum((x - x.mean()) ** 2))
    theta = numerator / (denominator + (_NOISE / _DOUBT) ** 2)
    fitted = np.clip(stated + theta * sensitivity, 0.0, 1.0)

    bases: dict[str, float] = {}
    points = {}
    offsets = []
    for name, (g, n, r), paid, s in zip(names, logs, tolls, log_s, strict=True):
        residual = s - _shape(g, n, r, fitted) - paid
        offset = float(residual.mean())
        bases[name] = 2.0**offset
        offsets.append(offset - math.log2(other.get(name, 1.0)))
        points[name] = (g, n, r, residual - offset)
    return SpeedModel(
        bases=bases,
        other=other,
        scale=2.0 ** (sum(offsets) / len(offsets)),
        losses=_triple(fitted),
        theta=theta,
        points=points,
        toll=toll,
    )


def _exponent(loss: float) -> float:
    return 1.0 if loss >= 0.5 else -math.log2(1 - loss)


def _triple(losses: Floats) -> tuple[float, float, float]:
    inside, across, between = losses.tolist()
    return inside, across, between


def _shape(
    log_g: Floats, log_n: Floats, log_r: Floats, losses: Floats | tuple[float, float, float]
) -> Floats:
    grown = (1 - losses[0]) * (log_g - log_n) + (1 - losses[1]) * log_n
    return np.asarray(grown - losses[2] * log_r)


def _log_part(
    toll: CommunicationCost, gpu_type: str, g: Floats, n: Floats, r: Floats, *, share: float = 1.0
) -> Floats:
    """Return log2 of the part of its time in which the job computes, at least `_LEAST_LOG`."""
    parts = toll.parts(gpu_type, g, n, r, share=share)
    return np.asarray(np.log2(np.maximum(parts, 2.0**_LEAST_LOG)))


def _believed(group: Sequence[Measurement]) -> Floats:
    """Return log2 speeds of one type's measurements, smallest shape first, at most `CEILING`."""
    rates = [m.samples_per_s / m.gpus for m in group]
    return np.log2(
        [min(rate, CEILING * rates[0]) * m.gpus for rate, m in zip(rates, group, strict=True)]
    )
