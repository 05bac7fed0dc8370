"""Measurements of an application's jobs as one pool, and a new job's part in it: shrinkage.

Jobs of one application are alike but not equal: one user doubles a layer, another one reads other
data. So a job's times are those of its application times a deviation of its own,

    log time_j(x) = log time(x) + d_j,      d_j ~ N(0, spread^2)

one d for steps and one for micro-steps. `pooled` takes the deviations out of the measurements of
earlier jobs and estimates the spread between them (empirical Bayes; Efron and Morris 1973).
`merged` gives a job the pool's points, moved by its own deviation as far as its measurements
show one:

    d_j = mean difference * spread^2 / (spread^2 + noise^2 / points)

Its own measurements count first. A job without any takes the pool as it is; where jobs are
equal, all deviations are zero and the pool is that of one job.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from slurm_elastic.core.application import Observation

#: Standard deviation of one comparison of logarithms of seconds.
_NOISE = 0.05
#: Spread that is assumed first, and the jobs that this counts for.
_FIRST_SPREAD, _FIRST_JOBS = 0.1, 1
#: Micro-batches apart by more than this factor are not compared; by less than that are as good
#: as equal.
_LOG_NEAR, _LOG_EQUAL = math.log(1.5), math.log(1.05)
#: Deviations are rounded to this, so that noise does not trigger a new fit.
_STEP = 0.02

_Key = tuple[str, int, int, str, int]
_Pair = tuple[float, float]
#: Type, nodes, GPUs, kind of the exchange's schedule.
_Shape = tuple[str, int, int, str]
#: Ascending (log micro-batch, log step, log micro-step) of each shape.
_Curves = dict[_Shape, list[tuple[float, float, float]]]


@dataclass(frozen=True, slots=True)
class ApplicationPool:
    """Measurements of an application without the deviations of its jobs.

    Attributes:
        points: at most one per configuration, times of a mean job.
        spread: standard deviation between jobs, of logarithms of steps and of micro-steps.
    """

    points: tuple[Observation, ...] = ()
    spread: _Pair = (_FIRST_SPREAD, _FIRST_SPREAD)
    _curves: _Curves = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        curves: _Curves = {}
        for o in self.points:
            _add(curves, o)
        object.__setattr__(self, "_curves", curves)

    def difference(self, own: Iterable[Observation]) -> tuple[_Pair, int]:
        """Return the mean logarithm of own over the pool's seconds, and of how many points."""
        return _difference(own, self._curves)


def pooled(jobs: Iterable[Sequence[Observation]]) -> ApplicationPool:
    """Return the pool of these jobs' own measurements; the order of jobs decides ties."""
    points: list[Observation] = []
    curves: _Curves = {}
    deviations: list[_Pair] = []
    for observations in jobs:
        deviation = (0.0, 0.0)
        difference, count = _difference(observations, curves)
        if count:
            deviation = _shrunk(difference, _spread(deviations), count)
            deviations.append(deviation)
        for o in observations:
            if _distance(curves.get(_shape(o), ()), math.log(o.micro_batch)) >= _LOG_EQUAL:
                points.append(_moved(o, deviation, -1.0))
                _add(curves, points[-1])
    # The first job's times are those of no mean job; the first of `jobs` deviates by 0.
    mean = tuple(sum(d[i] for d in deviations) / (len(deviations) + 1) for i in range(2))
    around = [(d[0] - mean[0], d[1] - mean[1]) for d in [(0.0, 0.0), *deviations]]
    return ApplicationPool(
        tuple(_moved(o, (_rounded(mean[0]), _rounded(mean[1])), 1.0) for o in points),
        _spread(around if deviations else []),
    )


def merged(own: Sequence[Observation], pool: ApplicationPool) -> tuple[Observation, ...]:
    """Return a job's own measurements, and those of its application moved by its deviation."""
    if not pool.points:
        return tuple(own)
    deviation = (0.0, 0.0)
    difference, count = pool.difference(own)
    if count:
        deviation = _shrunk(difference, pool.spread, count)
    # The pool's order stays: fits that rest on its first points stay the same.
    points = {_key(o): _moved(o, deviation, 1.0) for o in pool.points}
    points.update((_key(o), o) for o in own)
    return tuple(points.values())


def own_deviation(own: Iterable[Observation], pool: ApplicationPool) -> float:
    """Return the standard deviation of what is not known of a job's deviation in steps.

    That of the jobs of the application, as long as the job is not measured in a shape of theirs.
    """
    if not pool.points:
        return 0.0
    _, count = pool.difference(own)
    variance = pool.spread[0] ** 2
    if count:
        noise = _NOISE**2 / count
        variance *= noise / (variance + noise)
    return max(_STEP, round(math.sqrt(variance) / _STEP) * _STEP)


def _key(o: Observation) -> _Key:
    return *_shape(o), o.micro_batch


def _shape(o: Observation) -> _Shape:
    return o.gpu_type, o.nodes, o.gpus, o.exchange


def _add(curves: _Curves, o: Observation) -> None:
    point = (math.log(o.micro_batch), math.log(o.step_s), math.log(o.micro_step_s))
    bisect.insort(curves.setdefault(_shape(o), []), point)


def _rounded(value: float) -> float:
    return round(value / _STEP) * _STEP


def _moved(o: Observation, deviation: _Pair, sign: float) -> Observation:
    if deviation == (0.0, 0.0):
        return o
    step_s = o.step_s * math.exp(sign * deviation[0])
    micro_step_s = o.micro_step_s * math.exp(sign * deviation[1])
    return replace(o, step_s=max(step_s, micro_step_s), micro_step_s=micro_step_s)


def _shrunk(difference: _Pair, spread: _Pair, count: int) -> _Pair:
    noise = _NOISE**2 / count
    first, second = (d * s**2 / (s**2 + noise) for d, s in zip(difference, spread, strict=True))
    return _rounded(first), _rounded(second)


def _spread(deviations: Sequence[_Pair]) -> _Pair:
    """Return the standard deviation of deviations, with the first assumption as a prior."""
    first, second = (
        math.sqrt(
            (_FIRST_JOBS * _FIRST_SPREAD**2 + sum(d[i] ** 2 for d in deviations))
            / (_FIRST_JOBS + len(deviations))
        )
        for i in range(2)
    )
    return first, second


def _difference(own: Iterable[Observation], curves: _Curves) -> tuple[_Pair, int]:
    """Return the mean logarithm of own seconds over those of curves, and of how many points.

    Between two micro-batches of a curve the logarithms are interpolated.
    """
    step, micro_step, count = 0.0, 0.0, 0
    for o in own:
        curve = curves.get(_shape(o))
        expected = _at(curve, math.log(o.micro_batch)) if curve else None
        if expected is not None:
            step += math.log(o.step_s) - expected[0]
            micro_step += math.log(o.micro_step_s) - expected[1]
            count += 1
    return ((step / count, micro_step / count) if count else (0.0, 0.0)), count


def _at(curve: Sequence[tuple[float, float, float]], log_batch: float) -> _Pair | None:
    """Return the logarithms on a curve; None: no point of it is near."""
    if _distance(curve, log_batch) > _LOG_NEAR:
        return None
    i = bisect.bisect_left(curve, (log_batch,))
    if i < len(curve) and curve[i][0] == log_batch:
        return curve[i][1], curve[i][2]
    if i in (0, len(curve)):
        return None  # beyond the curve's ends nothing is compared
    (x0, a0, b0), (x1, a1, b1) = curve[i - 1], curve[i]
    part = (log_batch - x0) / (x1 - x0)
    return a0 + part * (a1 - a0), b0 + part * (b1 - b0)


def _distance(curve: Sequence[tuple[float, float, float]], log_batch: float) -> float:
    """Return how far the curve's nearest micro-batch is, in logarithms; inf: it has none."""
    i = bisect.bisect_left(curve, (log_batch,))
    return min((abs(log_batch - x) for x, _, _ in curve[max(i - 1, 0) : i + 1]), default=math.inf)
