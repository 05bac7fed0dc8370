"""Stalls of a training, computed from the step times of different runs. Pure.

By the differences of STASH (ICDCS 2023), numbered as in `slurm_elastic.profiler.profiling_plan`;
per step, with equally many samples per GPU:

    interconnect = RUN1 (one node) - RUN0
    network      = RUN1 (n nodes) - RUN1 (one node, the same GPUs, else one node's part of them)
    prep         = RUN3 - RUN1
    fetch        = RUN2 - RUN3

Waiting that overlaps with computing is not included. Each difference is taken within a repeat, and
the median over the repeats counts: other work on a node makes some runs slower and none faster.
Within a run it is the mean over its steps, as a loader may wait in one step for the next ten. Our
definition of *none*: a difference below the one-sided 95 % quantile of Student's t times its
standard error, or below `FLOOR` of the larger step; of a single repeat, whose error is unknown,
below `FLOOR_ALONE`.

>>> shape = ProfiledShape(1, 2)
>>> steps = {MissingTime(ONE, r, "synthetic"): 0.10 + r / 1e4 for r in (1, 2, 3)}
>>> steps |= {MissingTime(shape, r, "synthetic"): 0.15 + r / 1e4 for r in (1, 2, 3)}
>>> _, two = configurations(steps, gpu_type="a100", batch=8)
>>> round(two.interconnect.seconds, 6), round(two.s, 3), two.prep
(0.05, 0.667, None)
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.job.profile_request import COLD, SYNTHETIC, WARM
from slurm_elastic.profiler.profile_file import MeasuredTime, ProfiledConfiguration
from slurm_elastic.profiler.profiling_plan import ONE, MissingTime, ProfiledShape

#: Fractions of a step.
FLOOR, FLOOR_ALONE = 0.02, 0.05
#: One-sided 95 % quantiles of Student's t, by degrees of freedom.
_T = {1: 6.31, 2: 2.92, 3: 2.35, 4: 2.13, 5: 2.02, 6: 1.94, 7: 1.89, 8: 1.86, 9: 1.83}
_T_MANY = 1.8
#: Standard error of a median over that of a mean, of normally distributed values.
_MEDIAN = 1.2533

#: Seconds of a step by repeat.
_Steps = dict[int, float]


class NotMeasuredError(InvalidInputError):
    """The run on one GPU, with which all others are compared, was not measured."""


def configurations(
    steps: Mapping[MissingTime, float], *, gpu_type: str, batch: int
) -> tuple[ProfiledConfiguration, ...]:
    """Return the times of each measured shape, sorted by shape.

    Args:
        steps: seconds per step of each measurement. Without any on synthetic data those on warm
            data replace them, and `prep` is None.
        gpu_type: of all GPUs, or "".
        batch: samples per GPU and step.

    Raises:
        NotMeasuredError: there is no measurement on one GPU.
    """
    base = SYNTHETIC if any(n.block == SYNTHETIC for n in steps) else WARM
    one_gpu = _steps_by_repeat(steps, ONE, base)
    if not one_gpu:
        raise NotMeasuredError("no run on one GPU has succeeded")
    shapes = sorted({n.shape for n in steps})
    return tuple(
        _configured(steps, shape, base, one_gpu, gpu_type=gpu_type, batch=batch)
        for shape in shapes
        if _steps_by_repeat(steps, shape, base)
    )


def reference(
    shape: ProfiledShape, measured: Mapping[MissingTime, float], base: str
) -> ProfiledShape | None:
    """Return the one-node shape with which a shape of several nodes is compared, or None."""
    for gpus in (shape.gpus, shape.per_node):
        if _steps_by_repeat(measured, ProfiledShape(1, gpus), base):
            return ProfiledShape(1, gpus)
    return None


def _configured(
    steps: Mapping[MissingTime, float],
    shape: ProfiledShape,
    base: str,
    one_gpu: _Steps,
    *,
    gpu_type: str,
    batch: int,
) -> ProfiledConfiguration:
    all_gpus, warm, cold = (_steps_by_repeat(steps, shape, block) for block in (base, WARM, COLD))
    interconnect: MeasuredTime | None = MeasuredTime(0.0, 0.0)
    network: MeasuredTime | None = MeasuredTime(0.0, 0.0)
    if shape.nodes > 1:
        one_node_shape = reference(shape, steps, base)
        interconnect = (
            difference(_steps_by_repeat(steps, one_node_shape, base), one_gpu)
            if one_node_shape
            else None
        )
        network = (
            difference(all_gpus, _steps_by_repeat(steps, one_node_shape, base))
            if one_node_shape
            else None
        )
        if one_node_shape is None:  # the two cannot be separated: all of it is the network's
            network = difference(all_gpus, one_gpu)
    elif shape.gpus > 1:
        interconnect = difference(all_gpus, one_gpu)
    return ProfiledConfiguration(
        gpu_type=gpu_type,
        nodes=shape.nodes,
        gpus=shape.gpus,
        batch=batch,
        repeats=len(all_gpus),
        compute=middle(one_gpu),
        interconnect=interconnect,
        network=network,
        prep=None if base == WARM else difference(warm, all_gpus),
        fetch=difference(cold, warm),
    )


def difference(longer: _Steps, shorter: _Steps) -> MeasuredTime | None:
    """Return the difference of two runs, 0 below its noise; None: they share no repeat."""
    repeats = sorted(longer.keys() & shorter.keys())
    if not repeats:
        return None
    median = middle({r: longer[r] - shorter[r] for r in repeats})
    step = statistics.fmean(max(longer[r], shorter[r]) for r in repeats)
    if len(repeats) == 1:
        least = FLOOR_ALONE * step
    else:
        least = max(FLOOR * step, _T.get(len(repeats) - 1, _T_MANY) * median.spread)
    return median if median.seconds >= least else MeasuredTime(0.0, median.spread)


def middle(steps: _Steps) -> MeasuredTime:
    """Return the median over the repeats, with its standard error."""
    values = list(steps.values())
    if len(values) == 1:
        return MeasuredTime(values[0], math.nan)
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return MeasuredTime(statistics.median(values), spread * (_MEDIAN if len(values) > 2 else 1.0))


def _steps_by_repeat(
    steps: Mapping[MissingTime, float], shape: ProfiledShape | None, block: str
) -> _Steps:
    return {n.repeat: s for n, s in steps.items() if (n.shape, n.block) == (shape, block)}
