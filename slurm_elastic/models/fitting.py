"""The search behind `throughput.fit`: its objective with an analytic gradient, bounds and starts.

A fit has 2 to 20 points and seven parameters, so plain Python numbers beat
arrays: one evaluation costs one or two microseconds per point.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
#: Tolerance of Sia's search.
_PUBLISHED_TOLERANCE = 1e-5
#: Tolerance of ours, and the residuals (of logarithms) that it rounds the objective by in turn.
_TOLERANCE = 1e-8
_ROUNDINGS = (0.3, 1e-3)
#: Least alpha (s): below half a microsecond the least beta/alpha (1e-8/alpha) would restrict the
#: fit.
_LEAST_ALPHA = 5e-7
#: Weight of the square of gamma - 1, which draws gamma to 1 where nothing else tells it.
_GAMMA_WEIGHT = 1e-3
#: Weight of T_net where it was measured: it tells what steps leave open, and moves no fit away from
#: them (our choice; docs/adr/0027-exposed-exchange-in-models.md).
_NETWORK_WEIGHT = 0.05
#: Bounds of the logarithms of seconds, and of beta/alpha: wide, but nothing overflows.
_LOG_MOST = 20.0
_MOST_GROWTH = 1e6


class FitLink(enum.IntEnum):
    """Links that a step's gradients cross."""

    NONE = 0
    INSIDE = 1
    ACROSS = 2


_INSIDE, _ACROSS = int(FitLink.INSIDE), int(FitLink.ACROSS)


@dataclass(frozen=True, slots=True)
class FitPoint:
    """One measurement, in the form that the objective uses.

    Attributes:
        extra: replicas beyond two, at least `TINY`.
        log_compute, log_step: natural logarithms of the measured seconds.
        log_network: that of T_net; None: it was not measured by itself.
    """

    link: FitLink
    extra: float
    micro_batch: int
    log_compute: float
    log_step: float
    log_network: float | None = None

    @classmethod
    def measured(
        cls,
        *,
        nodes: int,
        replicas: int,
        micro_batch: int,
        step_s: float,
        micro_step_s: float,
        exchange_s: float | None = None,
    ) -> FitPoint:
        """Return the point of one measured configuration.

        Where more than the exchange is exposed, ranks also wait for slower ones; T_net contains
        that.
        """
        link = FitLink.NONE if replicas == 1 else FitLink.INSIDE if nodes == 1 else FitLink.ACROSS
        extra = max(replicas - 2, TINY)
        log_network = None
        if exchange_s is not None and link is not FitLink.NONE:
            log_network = math.log(max(exchange_s, step_s - micro_step_s))
        times = math.log(micro_step_s), math.log(step_s)
        return cls(link, extra, micro_batch, *times, log_network)


def objective(points: Sequence[FitPoint], *, rounding: float = 0.0) -> Objective:
    """Return the function theta -> (objective, its gradient); formula in `throughput.fit`.

    Args and entries of theta: as of `_step_objective`.
    """
    measured = [p for p in points if p.log_network is not None]
    if not measured:
        return _step_objective(points, rounding=rounding, gamma_weight=_GAMMA_WEIGHT)
    # T_net and the steps together tell gamma.
    steps = _step_objective(points, rounding=rounding, gamma_weight=0.0)
    return _with_network(steps, measured, rounding)


def _with_network(
    evaluate_steps: Objective, points: Sequence[FitPoint], rounding: float
) -> Objective:
    """Add the weighted RMSE(log T_net, log measured) to an objective.

    Args:
        evaluate_steps: objective of all points.
        points: those whose T_net was measured.
        rounding: as of `objective`.
    """
    # Entries 4 and 5 of theta are alpha and beta inside a node, 2 and 3 those across.
    rows = [(4 if p.link is FitLink.INSIDE else 2, p.extra, p.log_network or 0.0) for p in points]
    count, rounding_square = len(points), rounding * rounding

    def evaluate(theta: Sequence[float]) -> tuple[float, list[float]]:
        value, gradient = evaluate_steps(theta)
        squares, slopes = 0.0, [0.0] * 7
        for alpha, extra, log_network in rows:
            network = theta[alpha] + theta[alpha + 1] * extra
            residual = math.log(network) - log_network
            squares += residual * residual
            slopes[alpha] += residual / network
            slopes[alpha + 1] += residual / network * extra
        rms = math.sqrt(squares / count + rounding_square)
        scale = _NETWORK_WEIGHT / (count * rms) if rms > 0 else 0.0
        slopes = [g + scale * s for g, s in zip(gradient, slopes, strict=True)]
        return value + _NETWORK_WEIGHT * rms, slopes

    return evaluate


def _step_objective(  # noqa: PLR0915 - one formula
    points: Sequence[FitPoint], *, rounding: float, gamma_weight: float
) -> Objective:
    """Return the function theta -> (objective of steps and micro-steps, its gradient).

    Entries of theta: alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, gamma.
    The gradient of a root mean square that is exactly zero counts as zero.

    Args:
        points: measurements, at least one.
        rounding: added in square to both mean squares. A root mean square has a kink where all
            its residuals are zero; this rounds the kink, so that a search can pass along it.
        gamma_weight: of the square of gamma - 1.
    """
    count = len(points)
    rounding_square = rounding * rounding
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
            network_gradient = 0.0
            for m, log_compute, log_step in members:
                compute = ac + bc * m
                log_c = log(compute)
                ratio = log_network - log_c
                # Powers are relative to the larger of both times: none overflows.
                if ratio > 0:
                    power = exp(-gamma * ratio)
                    total = 1.0 + power
                    share = power / total
                    rest = 1.0 / total
                    extra_log = ratio + log(total) / gamma
                else:
                    power = exp(gamma * ratio)
                    total = 1.0 + power
                    share = 1.0 / total
                    rest = power / total
                    extra_log = log(total) / gamma
                residual = log_c - log_compute
                squares_compute += residual * residual
                residual /= compute
                c0 += residual
                c1 += residual * m
                residual = log_c + extra_log - log_step
                squares_step += residual * residual
                g0 += residual * (rest * ratio - extra_log)
                network_gradient += residual * rest
                residual *= share / compute
                o0 += residual
                o1 += residual * m
            network_gradient /= network
            if link == _INSIDE:
                r0 += network_gradient
                r1 += network_gradient * extra
            elif link == _ACROSS:
                n0 += network_gradient
                n1 += network_gradient * extra
        rms_compute, rms_step = (
            sqrt(squares_compute / count + rounding_square),
            sqrt(squares_step / count + rounding_square),
        )
        by_compute = 1 / (count * rms_compute) if rms_compute > 0 else 0.0
        by_step = 1 / (count * rms_step) if rms_step > 0 else 0.0
        qn, qr = bn / an, br / ar
        value = (
            rms_compute + rms_step + gamma_weight * (gamma - 1) ** 2 + 1e-2 * (qn * qn + qr * qr)
        )
        return value, [
            by_compute * c0 + by_step * o0,
            by_compute * c1 + by_step * o1,
            by_step * n0 - 2e-2 * qn * qn / an,
            by_step * n1 + 2e-2 * qn / an,
            by_step * r0 - 2e-2 * qr * qr / ar,
            by_step * r1 + 2e-2 * qr / ar,
            by_step * g0 / gamma + 2 * gamma_weight * (gamma - 1),
        ]

    return evaluate


def _by_network(
    points: Sequence[FitPoint],
) -> list[tuple[int, float, list[tuple[int, float, float]]]]:
    """Group points that share T_net: (link, extra, [(micro-batch, log compute, log step), ...])."""
    groups: dict[tuple[int, float], list[tuple[int, float, float]]] = {}
    for p in points:
        group = groups.setdefault((int(p.link), p.extra), [])
        group.append((p.micro_batch, p.log_compute, p.log_step))
    return [(link, extra, members) for (link, extra), members in groups.items()]


def bounds(points: Sequence[FitPoint], *, overlap: bool) -> tuple[Floats, Floats]:
    """Return lower and upper bounds of theta, as in Sia's artifact.

    Both are equal for what the points cannot tell apart: alpha_c is half the measured
    time if all points have one micro-batch; what no point travels over is fixed at
    `TINY`; so are both betas below three replicas.
    """
    lower, upper = np.full(7, TINY), np.full(7, np.inf)
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
        lower[index] = upper[index] = value
    return lower, upper


def search(points: Sequence[FitPoint], *, overlap: bool) -> list[float]:
    """Return the theta at the minimum that L-BFGS-B finds from a start that the points suggest.

    Our definition. It searches in coordinates in which the objective is tame,

        log alpha_c, log beta_c, log alpha_n, beta_n/alpha_n, log alpha_r, beta_r/alpha_r, gamma

    with rounded kinks: much at first, which leads past most local minima, then hardly. At the
    start half of the measured time grows with the batch, and an all-reduce takes as long as
    computing.

    Args:
        points: at least one.
        overlap: whether gamma may leave 1.
    """
    if len(points) == 1 and points[0].link is FitLink.NONE:
        # Anything between the two measured times is optimal: take what predicts the step.
        (p,) = points
        alpha = math.exp(p.log_compute) / 2
        beta = max((math.exp(p.log_step) - alpha) / p.micro_batch, TINY)
        return [alpha, beta, TINY, TINY, TINY, TINY, 1.0]
    lone = all(p.link is FitLink.NONE for p in points)
    lower, upper = _coordinate_bounds(*bounds(points, overlap=overlap and not lone))
    seconds = math.fsum(math.exp(p.log_compute) for p in points) / len(points)
    micro_batch = sum(p.micro_batch for p in points) / len(points)
    half, whole = math.log(seconds / 2), math.log(seconds)
    start = [half, half - math.log(micro_batch), whole, 0.1, whole, 0.1, 1.5]
    at = np.clip(start, lower, upper)
    for rounding in _ROUNDINGS:
        at = _minimum(
            _in_coordinates(objective(points, rounding=rounding)),
            at,
            Bounds(lower, upper),
            options={"ftol": _TOLERANCE, "gtol": 1e-7},
        )
    return [max(value, TINY) for value in _theta(at)]


def _minimum(
    evaluate: Callable[[Floats], tuple[float, Floats]], start: Floats, limits: Bounds, **more: Any
) -> Floats:
    """Return where L-BFGS-B ends, from this start."""
    place, gradient = b"", start

    def value_at(at: Floats) -> float:
        nonlocal place, gradient
        place = at.tobytes()
        value, gradient = evaluate(at)
        return value

    def gradient_at(at: Floats) -> Floats:
        if at.tobytes() != place:
            value_at(at)
        return gradient

    # scipy asks for both at the same place. Its own way to keep the second (jac=True) compares
    # places by array functions, which take as long as to evaluate the pair.
    found: Floats = minimize(
        value_at, start, jac=gradient_at, method="L-BFGS-B", bounds=limits, **more
    ).x
    return found


def _theta(at: Floats) -> tuple[float, ...]:
    """Return theta at these coordinates of `search`."""
    log_alpha_c, log_beta_c, log_alpha_n, growth_n, log_alpha_r, growth_r, gamma = at.tolist()
    alpha_n, alpha_r = math.exp(log_alpha_n), math.exp(log_alpha_r)
    return (
        math.exp(log_alpha_c),
        math.exp(log_beta_c),
        alpha_n,
        alpha_n * growth_n,
        alpha_r,
        alpha_r * growth_r,
        gamma,
    )


def _in_coordinates(evaluate: Objective) -> Callable[[Floats], tuple[float, Floats]]:
    """Return an objective of theta as one of the coordinates of `search`."""

    def evaluate_at(at: Floats) -> tuple[float, Floats]:
        theta = _theta(at)
        value, slope = evaluate(theta)
        alpha_c, beta_c, alpha_n, beta_n, alpha_r, beta_r, _ = theta
        by_alpha_c, by_beta_c, by_alpha_n, by_beta_n, by_alpha_r, by_beta_r, by_gamma = slope
        return value, np.array(
            (
                by_alpha_c * alpha_c,
                by_beta_c * beta_c,
                by_alpha_n * alpha_n + by_beta_n * beta_n,
                by_beta_n * alpha_n,
                by_alpha_r * alpha_r + by_beta_r * beta_r,
                by_beta_r * alpha_r,
                by_gamma,
            )
        )

    return evaluate_at


def _coordinate_bounds(lower: Floats, upper: Floats) -> tuple[Floats, Floats]:
    """Return the bounds of theta as those of the coordinates of `search`."""
    fixed = lower == upper
    least, most = lower.copy(), upper.copy()
    for index in (0, 1, 2, 4):
        least[index] = math.log(lower[index])
        most[index] = least[index] if fixed[index] else _LOG_MOST
    for alpha, beta in ((2, 3), (4, 5)):
        if not fixed[alpha]:
            least[alpha] = math.log(_LEAST_ALPHA)
        least[beta], most[beta] = 0.0, 0.0 if fixed[beta] else _MOST_GROWTH
    return least, most


def published(points: Sequence[FitPoint], *, overlap: bool) -> list[float]:
    """Return the theta that Sia's artifact finds: L-BFGS-B from its one start, to its tolerance.

    It often stops well above the minimum, and the artifact's decisions rest on that.

    Args:
        points: at least one.
        overlap: whether gamma may leave 1.
    """
    lower, upper = bounds(points, overlap=overlap)
    evaluate = objective(points)

    def evaluate_arrays(theta: Floats) -> tuple[float, Floats]:
        value, gradient = evaluate(theta.tolist())
        return value, np.array(gradient)

    theta: list[float] = _minimum(
        evaluate_arrays,
        np.clip(PUBLISHED, lower, upper),
        Bounds(lower, upper),
        tol=_PUBLISHED_TOLERANCE,
    ).tolist()
    return theta
