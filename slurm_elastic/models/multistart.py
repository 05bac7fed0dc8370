"""Fits from several starts at once: a damped Newton method for sums of root mean squares.

Our definition. The published fit stops early (its tolerance is 1e-5 of the
objective and it has one start). Here all starts walk together, as rows of the same
arrays, in coordinates in which the objective of `throughput.fit` is tame:

    alpha_c, beta_c, log alpha_n, beta_n/alpha_n, log alpha_r, beta_r/alpha_r, gamma

A root mean square f of residuals r has the gradient J'r/(n f) and, but for the
curvature of r itself, the Hessian J'J/(n f) - grad grad'/f. The first term alone is
the Hessian of a parabola above f; it leads safely into the kink where f is 0. Each
iteration tries both with one damping, and the safe one with a larger damping, and
takes what is best. After a few iterations only the most promising start goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.models.fitting import (
    GAMMA,
    PUBLISHED,
    TINY,
    FitLink,
    FitPoint,
    objective,
    published,
)

Floats = NDArray[np.float64]

#: How many starts there are.
STARTS = 6
#: Iterations in all, and before all starts but the best are given up.
_MOST = 25
_TOGETHER = 5
#: The search ends with an iteration that improves the objective by less than this.
_ENOUGH = 1e-8
#: Damping at first, its factors after a good, a cautious and a failed iteration, and its bounds.
_DAMPING = 1e-2
_BOLD, _CAUTIOUS, _FAILED = 0.2, 3.0, 30.0
_LEAST_DAMPING, _MOST_DAMPING = 1e-12, 1e8
#: Objective from which on points are not explained.
_POOR = 0.5
_TRIED = np.array([1.0, 1.0, 30.0])
_LOG_TINY = math.log(TINY)
#: Below half a microsecond the bound of beta/alpha (1e-8/alpha) would begin to cost.
_LOG_ALPHA = math.log(5e-7)
_LOWER = np.array([TINY, TINY, _LOG_ALPHA, 0.0, _LOG_ALPHA, 0.0, GAMMA[0]])
_UPPER = np.array([1e9, 1e9, 20.0, 1e6, 20.0, 1e6, GAMMA[1]])
#: Second derivatives of the penalties 1e-3 (gamma-1)^2 and 1e-2 (beta/alpha)^2, and where they
#: are 0.
_PENALTY = np.array([0.0, 0.0, 0.0, 2e-2, 0.0, 2e-2, 2e-3])
_AT = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])


def search(points: Sequence[FitPoint], *, overlap: bool, starts: int) -> list[float]:
    """The theta of the least objective that these starts lead to; deterministic.

    Args:
        points: at least one.
        overlap: whether gamma may leave 1.
        starts: 1 to `STARTS`; the first is the published one.
    """
    if len(points) == 1 and points[0].link is FitLink.NONE:
        # Anything between the two measured times is optimal: take what predicts the step.
        (p,) = points
        alpha = math.exp(p.log_compute) / 2
        beta = max((math.exp(p.log_step) - alpha) / p.micro_batch, TINY)
        return [alpha, beta, TINY, TINY, TINY, TINY, 1.0]
    alone = all(p.link is FitLink.NONE for p in points)
    problem = _Problem(points, overlap=overlap and not alone)
    rows = _starts(points, problem.fixed)[:starts]
    if alone:
        rows = rows[1:2] or rows  # a line has one minimum, and nothing to overlap
    with np.errstate(all="ignore"):
        theta = _walk(problem, np.array(rows))
    ac, bc, log_n, growth_n, log_r, growth_r, gamma = theta.tolist()
    found = [ac, bc, math.exp(log_n), growth_n, math.exp(log_r), growth_r, gamma]
    for index, log_alpha in ((2, log_n), (4, log_r)):
        found[index + 1] = max(found[index + 1] * found[index], TINY)
        if index not in problem.fixed and log_alpha < _LOG_ALPHA + 3:
            found = _lifted(points, found, index)
    value = objective(points)(found)[0]
    if starts > 1 and not value < _POOR:
        # Points that no theta explains have many minima: the published search is asked as well.
        other = published(points, overlap=overlap)
        if not value <= objective(points)(other)[0]:
            return other
    return found


def _lifted(points: Sequence[FitPoint], theta: list[float], index: int) -> list[float]:
    """The best of some larger alphas: near 0 the bound of beta costs, which the walk ignores."""
    evaluate = objective(points)
    tried = [theta]
    for _ in range(8):
        higher = list(tried[-1])
        higher[index] *= 2
        tried.append(higher)
    return min(tried, key=lambda t: evaluate(t)[0])


@dataclass(slots=True)
class _Place:
    """Rows of coordinates and all that is known of the objective there.

    Shapes: theta (rows, 7), value (rows,), rms (rows, 2), residuals (rows, 1, 2 points),
    slopes (rows, 2 points, free); compute times come before step times.
    """

    theta: Floats
    value: Floats
    rms: Floats
    residuals: Floats
    slopes: Floats

    def take(self, rows: slice) -> _Place:
        return _Place(
            self.theta[rows],
            self.value[rows],
            self.rms[rows],
            self.residuals[rows],
            self.slopes[rows],
        )

    def put(self, rows: NDArray[np.int64], other: _Place, chosen: NDArray[np.int64]) -> None:
        self.theta[rows] = other.theta[chosen]
        self.value[rows] = other.value[chosen]
        self.rms[rows] = other.rms[chosen]
        self.residuals[rows] = other.residuals[chosen]
        self.slopes[rows] = other.slopes[chosen]


class _Problem:
    """The points of one fit, as matrices over the seven coordinates."""

    def __init__(self, points: Sequence[FitPoint], *, overlap: bool) -> None:
        self.count = len(points)
        self.targets = np.array([[p.log_compute for p in points], [p.log_step for p in points]])
        links = [p.link for p in points]
        across = [float(link is FitLink.ACROSS) for link in links]
        inside = [float(link is FitLink.INSIDE) for link in links]
        none = [0.0] * self.count
        self.compute = np.array(
            [[1.0] * self.count, [float(p.micro_batch) for p in points], *[none] * 5]
        )
        self.level = np.array([none, none, across, none, inside, none, none])
        extra = [p.extra for p in points]
        self.growth = np.array(
            [
                none,
                none,
                none,
                [on * e for on, e in zip(across, extra, strict=True)],
                none,
                [on * e for on, e in zip(inside, extra, strict=True)],
                none,
            ]
        )
        self.alone = np.array([_LOG_TINY if link is FitLink.NONE else 0.0 for link in links])
        self.fixed = _fixed(points, overlap=overlap)
        free = [i for i in range(7) if i not in self.fixed]
        self.free = np.array(free)
        self.blends = free[-1] == 6
        self.lower, self.upper = _LOWER[self.free], _UPPER[self.free]
        self.penalty, self.at = _PENALTY[self.free], _AT[self.free]
        self.free_compute = np.ascontiguousarray(self.compute[self.free].T)
        self.free_level = np.ascontiguousarray(self.level[self.free].T)
        self.free_growth = np.ascontiguousarray(self.growth[self.free].T)

    def at_rows(self, theta: Floats) -> _Place:
        """The objective and its slopes."""
        count = self.count
        compute = theta @ self.compute
        growth = theta @ self.growth
        growth += 1.0
        log_compute = np.log(compute)
        x = np.log(growth)
        x += theta @ self.level
        x += self.alone
        x -= log_compute
        gamma = theta[:, 6:]
        blend = np.logaddexp(0.0, gamma * x)
        share = np.exp(-blend)
        rest = 1.0 - share
        blend /= gamma
        residuals = np.empty((len(theta), 2, count))
        residuals[:] = log_compute[:, None]
        residuals[:, 1] += blend
        residuals -= self.targets
        rms = np.sqrt(np.einsum("bij,bij->bi", residuals, residuals) / count)
        slopes = np.empty((len(theta), 2 * count, len(self.free)))
        pure, mixed = slopes[:, :count], slopes[:, count:]
        np.divide(self.free_compute, compute[..., None], out=pure)
        np.divide(self.free_growth, growth[..., None], out=mixed)
        mixed += self.free_level
        mixed *= rest[..., None]
        mixed += share[..., None] * pure
        if self.blends:
            rest *= x
            rest -= blend
            rest /= gamma
            mixed[..., -1] = rest
        away = theta - _AT
        away *= away
        value = rms.sum(axis=1) + away @ (_PENALTY / 2)
        value[~np.isfinite(value)] = np.inf
        return _Place(theta, value, rms, residuals.reshape(-1, 1, 2 * count), slopes)

    def steps(self, place: _Place, damping: Floats) -> Floats:
        """Three places to try from each row, shape (rows, 3, free)."""
        rows, free = len(place.theta), len(self.free)
        here = place.theta[:, self.free]
        rms = np.maximum(place.rms, 1e-10)
        weights = np.repeat(1.0 / (self.count * rms), self.count, axis=1)
        slopes = place.slopes
        weighted = slopes * weights[..., None]
        halves = (rows, 2, self.count)
        pulls = place.residuals.reshape(*halves)[:, :, None] @ weighted.reshape(*halves, free)
        pulls = pulls[:, :, 0]
        gradient = pulls.sum(axis=1) + (here - self.at) * self.penalty
        safe = weighted.swapaxes(1, 2) @ slopes
        safe.reshape(rows, -1)[:, :: free + 1] += self.penalty
        radial = pulls / np.sqrt(rms)[..., None]
        curvature = np.empty((rows, 3, free, free))
        curvature[:] = safe[:, None]
        curvature[:, 0] -= (1 - 1e-9) * (radial.swapaxes(1, 2) @ radial)
        diagonal = curvature.reshape(rows, 3, -1)[..., :: free + 1]
        size = safe.reshape(rows, -1)[:, :: free + 1]
        # Coordinates that a bound holds stay where they are.
        held = (here <= self.lower) & (gradient > 0)
        held |= (here >= self.upper) & (gradient < 0)
        if held.any():
            loose = 1.0 - held
            curvature *= (loose[:, :, None] * loose[:, None])[:, None]
            gradient *= loose
            size = np.where(held, 1.0, size)
        diagonal += (damping[:, None] * _TRIED)[..., None] * size[:, None] + 1e-14
        towards = np.empty((rows, 3, free, 1))
        towards[..., 0] = -gradient[:, None]
        moves = np.linalg.solve(curvature, towards)[..., 0]
        moves += here[:, None]
        return np.asarray(np.minimum(np.maximum(moves, self.lower), self.upper))


def _walk(problem: _Problem, starts: Floats) -> Floats:
    """From rows of starts to the one place."""
    place = problem.at_rows(starts)
    damping = np.full(len(starts), _DAMPING)
    for _ in range(_TOGETHER if len(starts) > 1 else 0):
        tried, values = _try(problem, place, damping)
        choice = values.argmin(axis=1)
        chosen = np.arange(len(starts)) * 3 + choice
        better = values.ravel()[chosen] < place.value
        damping *= np.where(better, np.where(choice < 2, _BOLD, _CAUTIOUS), _FAILED)
        moved = np.flatnonzero(better)
        place.put(moved, tried, chosen[moved])
    best = int(place.value.argmin())
    place, damp = place.take(slice(best, best + 1)), float(damping[best])
    for _ in range(_MOST):
        damp = min(max(damp, _LEAST_DAMPING), _MOST_DAMPING)
        tried, values = _try(problem, place, np.array([damp]))
        choice = int(values.argmin())
        gained = float(place.value[0] - values[0, choice])
        if gained > 0:
            damp *= _BOLD if choice < 2 else _CAUTIOUS
            place = tried.take(slice(choice, choice + 1))
        else:
            damp *= _FAILED
        if gained < _ENOUGH:
            break
    return np.asarray(place.theta[0])


def _try(problem: _Problem, place: _Place, damping: Floats) -> tuple[_Place, Floats]:
    """Places after one step from each row, and their values, shape (rows, 3)."""
    rows = len(place.theta)
    theta = np.repeat(place.theta, 3, axis=0)
    theta[:, problem.free] = problem.steps(place, damping).reshape(3 * rows, -1)
    tried = problem.at_rows(theta)
    return tried, tried.value.reshape(rows, 3)


def _fixed(points: Sequence[FitPoint], *, overlap: bool) -> dict[int, float]:
    """Coordinates that these points do not tell, as in `fitting.bounds`."""
    fixed: dict[int, float] = {}
    if len({p.micro_batch for p in points}) == 1:
        fixed[0] = sum(math.exp(p.log_compute) for p in points) / len(points) / 2
    many = any(p.extra >= 1 for p in points)
    for index, link in ((2, FitLink.ACROSS), (4, FitLink.INSIDE)):
        if not any(p.link is link for p in points):
            fixed |= {index: _LOG_TINY, index + 1: 0.0}
        elif not many:
            fixed[index + 1] = 0.0
    if not overlap:
        fixed[6] = 1.0
    return fixed


def _starts(points: Sequence[FitPoint], fixed: dict[int, float]) -> list[list[float]]:
    """The published start, and guesses from the points: how long, how well hidden."""
    seconds = [math.exp(p.log_compute) for p in points]
    typical = sum(seconds) / len(seconds)
    middle = sum(p.micro_batch for p in points) / len(points)
    alpha, beta = typical / 2, typical / 2 / middle
    least, most = (pick(p.micro_batch for p in points) for pick in (min, max))
    if least < most:
        first, last = (
            _mean([s for s, p in zip(seconds, points, strict=True) if p.micro_batch == m])
            for m in (least, most)
        )
        beta = max((last - first) / (most - least), 1e-3 * typical / middle)
        alpha = max(first - beta * least, 1e-3 * typical)
    across, inside = (
        _mean(
            [
                max(math.exp(p.log_step) - s, 1e-2 * s)
                for s, p in zip(seconds, points, strict=True)
                if p.link is link
            ]
        )
        for link in (FitLink.ACROSS, FitLink.INSIDE)
    )
    a, b, c, _, r, _, gamma = PUBLISHED
    rows = [[a, b, math.log(c), 0.1, math.log(r), 0.1, gamma]]
    for times, hidden, growth, blend in (
        (1.0, 0.0, 0.1, 1.2),
        (1.0, 0.5, 0.05, 3.0),
        (0.14, 0.0, 0.5, 1.0),
        (1.0, 1.0, 0.05, 6.0),
        (1.0, 0.3, 0.1, 3.0),
    ):
        n, i = (math.log(max(times * s + hidden * typical, TINY)) for s in (across, inside))
        rows.append([alpha, beta, n, growth, i, growth, blend])
    for row in rows:
        for index, value in fixed.items():
            row[index] = value
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
