"""The search behind `throughput.fit`: its objective with an analytic gradient, bounds and starts.

A fit has 2 to 20 points and seven parameters, so plain Python numbers beat
arrays: one evaluation costs one or two microseconds per point.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.models.optimiser import Bounds, minimize

Floats = NDArray[np.float64]
Objective = Callable[[Sequence[float]], tuple[float, list[float]]]

#: Least value of every parameter but gamma, and the seconds a lone replica communicates.
TINY = 1e-8
#: Sia's start: alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma.
PUBLISHED = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
#: Bounds of gamma.
GAMMA = (1.0, 10.0)
_TOLERANCE = 1e-5


class FitLink(enum.IntEnum):
    """What a step's gradients travel over."""

    NONE = 0
    INSIDE = 1
    ACROSS = 2


_INSIDE, _ACROSS = int(FitLink.INSIDE), int(FitLink.ACROSS)


@dataclass(frozen=True, slots=True)
class FitPoint:
    """One measurement, as the objective wants it.

    Attributes:
        extra: replicas beyond two, at least `TINY`.
        log_compute, log_step: natural logarithms of the measured seconds.
    """

    link: FitLink
    extra: float
    micro_batch: int
    log_compute: float
    log_step: float

    @classmethod
    def measured(
        cls, *, nodes: int, replicas: int, micro_batch: int, step_s: float, micro_step_s: float
    ) -> FitPoint:
        """The point of one measured configuration."""
        link = FitLink.NONE if replicas == 1 else FitLink.INSIDE if nodes == 1 else FitLink.ACROSS
        extra = max(replicas - 2, TINY)
        return cls(link, extra, micro_batch, math.log(micro_step_s), math.log(step_s))


def objective(points: Sequence[FitPoint]) -> Objective:  # noqa: PLR0915 - one formula
    """The function theta -> (objective, its gradient); formula in `throughput.fit`.

    Entries of theta: alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma.
    The gradient of a root mean square that is exactly zero counts as zero.
    """
    count = len(points)
    groups = _by_network(points)
    log, exp, sqrt = math.log, math.exp, math.sqrt

    def evaluate(theta: Sequence[float]) -> tuple[float, list[float]]:
        ac, bc, an, bn, ar, br, gamma = theta
        squares_compute = squares_step = 0.0
        # Sums of residual times slope, by: T_acc, the same in T_opt, networks, gamma.
        c0 = c1 = o0 = o1 = n0 = n1 = r0 = r1 = g0 = 0.0
        for link, extra, members in groups:
            if link == _ACROSS:
                network = an + bn * extra
            elif link == _INSIDE:
                network = ar + br * extra
            else:
                network = TINY + TINY * extra
            log_network = log(network)
            pull = 0.0
            for m, log_compute, log_step in members:
                compute = ac + bc * m
                log_c = log(compute)
                ratio = log_network - log_c
                # Powers are relative to the larger of both times: none overflows.
                if ratio > 0:
                    less = exp(-gamma * ratio)
                    total = 1.0 + less
                    share = less / total
                    rest = 1.0 / total
                    over = ratio + log(total) / gamma
                else:
                    less = exp(gamma * ratio)
                    total = 1.0 + less
                    share = 1.0 / total
                    rest = less / total
                    over = log(total) / gamma
                off = log_c - log_compute
                squares_compute += off * off
                off /= compute
                c0 += off
                c1 += off * m
                off = log_c + over - log_step
                squares_step += off * off
                g0 += off * (rest * ratio - over)
                pull += off * rest
                off *= share / compute
                o0 += off
                o1 += off * m
            pull /= network
            if link == _INSIDE:
                r0 += pull
                r1 += pull * extra
            elif link == _ACROSS:
                n0 += pull
                n1 += pull * extra
        rms_compute, rms_step = sqrt(squares_compute / count), sqrt(squares_step / count)
        by_compute = 1 / (count * rms_compute) if rms_compute > 0 else 0.0
        by_step = 1 / (count * rms_step) if rms_step > 0 else 0.0
        qn, qr = bn / an, br / ar
        value = rms_compute + rms_step + 1e-3 * (gamma - 1) ** 2 + 1e-2 * (qn * qn + qr * qr)
        return value, [
            by_compute * c0 + by_step * o0,
            by_compute * c1 + by_step * o1,
            by_step * n0 - 2e-2 * qn * qn / an,
            by_step * n1 + 2e-2 * qn / an,
            by_step * r0 - 2e-2 * qr * qr / ar,
            by_step * r1 + 2e-2 * qr / ar,
            by_step * g0 / gamma + 2e-3 * (gamma - 1),
        ]

    return evaluate


def _by_network(
    points: Sequence[FitPoint],
) -> list[tuple[int, float, list[tuple[int, float, float]]]]:
    """(link, extra, [(micro-batch, log compute, log step), ...]) of the points that share T_net."""
    groups: dict[tuple[int, float], list[tuple[int, float, float]]] = {}
    for p in points:
        group = groups.setdefault((int(p.link), p.extra), [])
        group.append((p.micro_batch, p.log_compute, p.log_step))
    return [(link, extra, members) for (link, extra), members in groups.items()]


def bounds(points: Sequence[FitPoint], *, overlap: bool) -> tuple[Floats, Floats, Floats]:
    """(start, lower, upper) as in Sia's artifact: what cannot be told apart is fixed.

    alpha_c is half the measured time if all points have one micro-batch; what no
    point travels over is fixed at `TINY`; so are both betas below three replicas.
    """
    start, lower, upper = np.array(PUBLISHED), np.full(7, TINY), np.full(7, np.inf)
    lower[6], upper[6] = GAMMA if overlap else (1.0, 1.0)
    fixed: dict[int, float] = {}
    if len({p.micro_batch for p in points}) == 1:
        fixed[0] = sum(math.exp(p.log_compute) for p in points) / len(points) / 2
    if not any(p.link is FitLink.ACROSS for p in points):
        fixed |= {2: TINY, 3: TINY}
    if not any(p.link is FitLink.INSIDE for p in points):
        fixed |= {4: TINY, 5: TINY}
    if not any(p.extra >= 1 for p in points):
        fixed |= {3: TINY, 5: TINY}
    for index, value in fixed.items():
        start[index] = lower[index] = upper[index] = value
    return np.clip(start, lower, upper), lower, upper


def published(points: Sequence[FitPoint], *, overlap: bool) -> list[float]:
    """The theta that Sia's artifact finds: L-BFGS-B from its one start, to its tolerance.

    It often stops well above the minimum, and the artifact's decisions rest on that.

    Args:
        points: at least one.
        overlap: whether gamma may leave 1.
    """
    start, lower, upper = bounds(points, overlap=overlap)
    evaluate = objective(points)

    def lean(theta: Floats) -> tuple[float, Floats]:
        value, gradient = evaluate(theta.tolist())
        return value, np.array(gradient)

    found = minimize(
        lean, start, jac=True, method="L-BFGS-B", bounds=Bounds(lower, upper), tol=_TOLERANCE
    )
    theta: list[float] = found.x.tolist()
    return theta
