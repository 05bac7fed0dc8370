"""The search behind `throughput.fit`: its objective with an analytic gradient, bounds and starts.

A fit has 2 to 20 points and seven parameters, so plain Python numbers beat
arrays: one evaluation costs about a microsecond per point.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize

Floats = NDArray[np.float64]
Objective = Callable[[Sequence[float]], tuple[float, list[float]]]

#: Least value of every parameter but gamma, and the seconds a lone replica communicates.
TINY = 1e-8
#: Sia's start: alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma.
PUBLISHED = (0.1, 0.01, 0.1, 0.01, 0.1, 0.01, 1.001)
#: Bounds of gamma.
GAMMA = (1.0, 10.0)
_TOLERANCE = 1e-5


class Link(enum.IntEnum):
    """What a step's gradients travel over."""

    NONE = 0
    INSIDE = 1
    ACROSS = 2


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement, as the objective wants it.

    Attributes:
        extra: replicas beyond two, at least `TINY`.
        log_compute, log_step: natural logarithms of the measured seconds.
    """

    link: Link
    extra: float
    micro_batch: int
    log_compute: float
    log_step: float

    @classmethod
    def measured(
        cls, *, nodes: int, replicas: int, micro_batch: int, step_s: float, micro_step_s: float
    ) -> Point:
        """The point of one measured configuration."""
        link = Link.NONE if replicas == 1 else Link.INSIDE if nodes == 1 else Link.ACROSS
        extra = max(replicas - 2, TINY)
        return cls(link, extra, micro_batch, math.log(micro_step_s), math.log(step_s))


def objective(points: Sequence[Point]) -> Objective:  # noqa: PLR0915 - one formula
    """The function theta -> (objective, its gradient); formula in `throughput.fit`.

    Entries of theta: alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma.
    The gradient of a root mean square that is exactly zero counts as zero.
    """
    count = len(points)
    rows = [(int(p.link), p.extra, p.micro_batch, p.log_compute, p.log_step) for p in points]
    log, exp = math.log, math.exp

    def evaluate(theta: Sequence[float]) -> tuple[float, list[float]]:  # noqa: PLR0915
        ac, bc, an, bn, ar, br, gamma = theta
        squares_compute = squares_step = 0.0
        terms = []
        for link, extra, m, log_compute, log_step in rows:
            compute = ac + bc * m
            if link == 0:
                network = TINY + TINY * extra
            elif link == 1:
                network = ar + br * extra
            else:
                network = an + bn * extra
            log_c = log(compute)
            ratio = log(network) - log_c
            # Both powers relative to compute^gamma or network^gamma, so that none overflows.
            if ratio > 0:
                share = exp(-gamma * ratio)
                total = 1.0 + share
                share /= total
                over = ratio + log(total) / gamma
                d_gamma = -(share * ratio + log(total) / gamma) / gamma
            else:
                network_share = exp(gamma * ratio)
                total = 1.0 + network_share
                share = 1.0 / total
                over = log(total) / gamma
                d_gamma = ((1.0 - share) * ratio - over) / gamma
            off_compute = log_c - log_compute
            off_step = log_c + over - log_step
            squares_compute += off_compute * off_compute
            squares_step += off_step * off_step
            terms.append(
                (
                    link,
                    extra,
                    m,
                    off_compute / compute,
                    off_step,
                    share / compute,
                    (1.0 - share) / network,
                    d_gamma,
                )
            )
        rmse_compute = math.sqrt(squares_compute / count)
        rmse_step = math.sqrt(squares_step / count)
        across, inside = bn / an, br / ar
        value = (
            rmse_compute
            + rmse_step
            + 1e-3 * (gamma - 1) ** 2
            + 1e-2 * (across * across + inside * inside)
        )
        by_compute = 1 / (count * rmse_compute) if rmse_compute > 0 else 0.0
        by_step = 1 / (count * rmse_step) if rmse_step > 0 else 0.0
        d_ac = d_bc = 0.0
        d_an, d_bn = -2e-2 * across * across / an, 2e-2 * across / an
        d_ar, d_br = -2e-2 * inside * inside / ar, 2e-2 * inside / ar
        d_g = 2e-3 * (gamma - 1)
        for link, extra, m, off, off_step, compute_weight, network_weight, d_gamma in terms:
            pull = by_step * off_step
            slope = by_compute * off + pull * compute_weight
            d_ac += slope
            d_bc += slope * m
            d_g += pull * d_gamma
            if link == 1:
                slope = pull * network_weight
                d_ar += slope
                d_br += slope * extra
            elif link == 2:
                slope = pull * network_weight
                d_an += slope
                d_bn += slope * extra
        return value, [d_ac, d_bc, d_an, d_bn, d_ar, d_br, d_g]

    return evaluate


def bounds(points: Sequence[Point], *, overlap: bool) -> tuple[Floats, Floats, Floats]:
    """(start, lower, upper) as in Sia's artifact: what cannot be told apart is fixed.

    alpha_c is half the measured time if all points have one micro-batch; what no
    point travels over is fixed at `TINY`; so are both betas below three replicas.
    """
    start, lower, upper = np.array(PUBLISHED), np.full(7, TINY), np.full(7, np.inf)
    lower[6], upper[6] = GAMMA if overlap else (1.0, 1.0)
    fixed: dict[int, float] = {}
    if len({p.micro_batch for p in points}) == 1:
        fixed[0] = sum(math.exp(p.log_compute) for p in points) / len(points) / 2
    if not any(p.link is Link.ACROSS for p in points):
        fixed |= {2: TINY, 3: TINY}
    if not any(p.link is Link.INSIDE for p in points):
        fixed |= {4: TINY, 5: TINY}
    if not any(p.extra >= 1 for p in points):
        fixed |= {3: TINY, 5: TINY}
    for index, value in fixed.items():
        start[index] = lower[index] = upper[index] = value
    return np.clip(start, lower, upper), lower, upper


def published(points: Sequence[Point], *, overlap: bool) -> list[float]:
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
