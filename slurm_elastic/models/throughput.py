"""Seconds per training step in any configuration: the seven-parameter model of one GPU type.

Sia (SOSP'23) takes it over from Pollux (OSDI'21, section 4.1). A replica needs

    T_acc(m)  = alpha_c + beta_c m                                one micro-step of m samples
    T_net     = alpha_r + beta_r max(R-2, 1e-8)                   R replicas on one node
                alpha_n + beta_n max(R-2, 1e-8)                   R replicas on several nodes
                1e-8                                              a single replica
    T_opt     = (T_acc^gamma + T_net^gamma)^(1/gamma)             the last micro-step, and the
                                                                  all-reduce that it overlaps
    T_iter    = s T_acc + T_opt                                   s accumulated micro-steps

gamma = 1 means no overlap, a large gamma a perfect one. `fit` finds the seven
numbers of one job on one GPU type from what it measured there.

>>> from slurm_elastic.core.application import Observation
>>> seen = Observation("t4", nodes=1, gpus=1, micro_batch=8, step_s=0.2, micro_step_s=0.2)
>>> model = fit((seen,))
>>> model.throughput(nodes=1, replicas=[1, 2], micro_batch=8).round(3).tolist()
[40.0, 80.0]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.core.application import Observation
from slurm_elastic.models import fitting
from slurm_elastic.models.fitting import FitLink, FitPoint

Floats = NDArray[np.float64]

#: Seconds of communication of a single replica; also the least of alpha and beta.
TINY = fitting.TINY
#: A type that never ran on several nodes pays this much more there than within one (artifact).
_ACROSS = 1.1


@dataclass(frozen=True, slots=True)
class ThroughputParameters:
    """Parameters theta of one job on one GPU type.

    Attributes:
        alpha_c, beta_c: seconds of a micro-step, and seconds more per sample.
        alpha_n, beta_n: seconds of an all-reduce across nodes, and more per replica beyond two.
        alpha_r, beta_r: the same within one node.
        gamma: in [1, 10]; how well computation hides communication.
    """

    alpha_c: float
    beta_c: float
    alpha_n: float
    beta_n: float
    alpha_r: float
    beta_r: float
    gamma: float

    def lighter(self, *, compute: float, network: float) -> ThroughputParameters:
        """Return the parameters of a job that computes and sends less, as with frozen layers.

        Args:
            compute: part of the seconds per sample that is left.
            network: part of the seconds of an all-reduce that is left.
        """
        if compute == network == 1.0:
            return self
        return replace(
            self,
            beta_c=self.beta_c * compute,
            alpha_n=self.alpha_n * network,
            beta_n=self.beta_n * network,
            alpha_r=self.alpha_r * network,
            beta_r=self.beta_r * network,
        )

    def accumulation_time(self, micro_batch: ArrayLike) -> Floats:
        """Return the seconds of a micro-step of `micro_batch` samples, without communication."""
        return self.alpha_c + self.beta_c * np.asarray(micro_batch, dtype=np.float64)

    def network_time(self, nodes: ArrayLike, replicas: ArrayLike) -> Floats:
        """Return the seconds of one all-reduce, before any of it is hidden."""
        n, r = np.asarray(nodes), np.asarray(replicas, dtype=np.float64)
        extra = np.maximum(r - 2, TINY)
        across = self.alpha_n + self.beta_n * extra
        inside = self.alpha_r + self.beta_r * extra
        return np.where(r <= 1, TINY + TINY * extra, np.where(n <= 1, inside, across))

    def step_time(self, nodes: ArrayLike, replicas: ArrayLike, micro_batch: ArrayLike) -> Floats:
        """Return the seconds of a step without accumulation: T_opt. Arguments broadcast."""
        compute = self.accumulation_time(micro_batch)
        return self._blend(compute, self.network_time(nodes, replicas))

    def throughput(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        micro_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Return samples per second over all replicas. Arguments broadcast.

        Args:
            nodes: nodes of the configuration.
            replicas: over all nodes.
            micro_batch: samples per replica and micro-step.
            accumulation: micro-steps before the one that synchronises.
        """
        s = np.asarray(accumulation, dtype=np.float64)
        samples = np.asarray(replicas) * np.asarray(micro_batch) * (s + 1)
        return np.asarray(samples / self.iteration_time(nodes, replicas, micro_batch, s))

    def iteration_time(
        self,
        nodes: ArrayLike,
        replicas: ArrayLike,
        micro_batch: ArrayLike,
        accumulation: ArrayLike = 0,
    ) -> Floats:
        """Return the seconds of a step with its accumulated micro-steps: T_iter."""
        compute = self.accumulation_time(micro_batch)
        last = self._blend(compute, self.network_time(nodes, replicas))
        return np.asarray(np.asarray(accumulation) * compute + last)

    def _blend(self, compute: Floats, network: Floats) -> Floats:
        if self.gamma == 1.0:
            return np.asarray(compute + network)
        # The larger one is taken out, so that no power overflows.
        longer = np.maximum(compute, network)
        ratio = np.minimum(compute, network) / longer
        return np.asarray(longer * (1 + ratio**self.gamma) ** (1 / self.gamma))


def fit(
    observations: Sequence[Observation],
    *,
    unit: int = 1,
    overlap: bool = True,
    compat: bool = False,
) -> ThroughputParameters:
    """Return the parameters that explain these measurements best; equal input, equal answer.

    Minimises, with the parameters bounded and fixed as in Sia's artifact
    (`fitting.bounds`),

        RMSE(log T_acc, log measured) + RMSE(log T_opt, log measured)
        + 1e-3 (gamma-1)^2 + 1e-2 ((beta_n/alpha_n)^2 + (beta_r/alpha_r)^2)

    and, where the exchange alone was measured, 0.05 RMSE(log T_net, log measured) over these
    points in place of 1e-3 (gamma-1)^2: with T_acc and T_net known a step tells gamma, else many
    pairs of T_net and gamma explain it.

    Before a job ran across nodes these are taken 1.1 times as slow as one node:
    scaling is assumed to be good until it is measured.

    Args:
        observations: of one GPU type, at least one; of equal configurations the first counts.
        unit: GPUs per replica.
        overlap: whether communication may hide behind computation; False fixes gamma at 1.
        compat: search as Sia's artifact does, which often stops early.

    Raises:
        ValueError: none given, several GPU types, or an invalid value; names the field.
    """
    return _fit(tuple(observations), unit, overlap, compat)


def objective(
    parameters: ThroughputParameters, observations: Sequence[Observation], *, unit: int = 1
) -> float:
    """Return the value that `fit` minimises, at these parameters."""
    points = _points(tuple(observations), unit)
    theta = list(astuple(parameters))
    if not any(p.link is FitLink.ACROSS for p in points):
        theta[2] = theta[3] = TINY  # what fit set afterwards is not part of its objective
    return fitting.objective(points)(theta)[0]


@lru_cache(maxsize=8192)
def _fit(
    observations: tuple[Observation, ...], unit: int, overlap: bool, compat: bool
) -> ThroughputParameters:
    points = _points(observations, unit)
    search = fitting.published if compat else fitting.search
    theta = search(points, overlap=overlap)
    if not any(p.link is FitLink.ACROSS for p in points):
        theta[2] = max(theta[2], _ACROSS * theta[4])
        theta[3] = max(theta[3], _ACROSS * theta[5])
    return ThroughputParameters(*theta)


def _points(observations: tuple[Observation, ...], unit: int) -> tuple[FitPoint, ...]:
    if not observations:
        raise ValueError("no observations to fit: at least one is needed")
    if len({o.gpu_type for o in observations}) > 1:
        names = ", ".join(sorted({o.gpu_type for o in observations}))
        raise ValueError(f"observations of several GPU types ({names}): fit each type by itself")
    points: dict[tuple[int, int, int], FitPoint] = {}
    for o in observations:
        check(o, unit)
        replicas = o.gpus // unit
        points.setdefault(
            (o.nodes, replicas, o.micro_batch),
            FitPoint.measured(
                nodes=o.nodes,
                replicas=replicas,
                micro_batch=o.micro_batch,
                step_s=o.step_s,
                micro_step_s=o.micro_step_s,
                exchange_s=o.exchange_s,
            ),
        )
    return tuple(points.values())


def check(observation: Observation, unit: int = 1) -> None:
    """Reject an invalid measurement.

    Args:
        observation: to check.
        unit: GPUs per replica; it ran on whole replicas.

    Raises:
        ValueError: names the field, its value and what it must be.
    """
    o = observation
    if (
        0 < o.step_s < math.inf
        and 0 < o.micro_step_s < math.inf
        and type(o.nodes) is type(o.gpus) is type(o.micro_batch) is int
        and min(o.nodes, o.gpus, o.micro_batch) >= 1
        and o.gpus % unit == 0
    ):
        return  # the usual case, on a hot path
    for name in ("nodes", "gpus", "micro_batch"):
        value = getattr(o, name)
        if not (isinstance(value, int | np.integer) and value >= 1):
            raise ValueError(f"observation on {o.gpu_type}: {name}={value} must be an integer >= 1")
    for name in ("step_s", "micro_step_s"):
        value = getattr(o, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(
                f"observation on {o.gpu_type}: {name}={value} must be positive, finite seconds"
            )
    if o.gpus % unit:
        raise ValueError(
            f"observation on {o.gpu_type}: gpus={o.gpus} is not a multiple of the {unit} GPUs "
            "of one replica"
        )
