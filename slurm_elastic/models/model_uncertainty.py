"""Uncertainty of the goodput models about a configuration: a relative standard deviation.

Our own definition, of the logarithm of a step's seconds, so that 0.1 reads as "about 10 %":

    deviation^2 = (2 residual)^2 + (0.15 doublings)^2 + type^2 + job^2

- *residual*: posterior standard deviation of the Gaussian process of step_residuals.py: small
  where the job was measured, its amplitude far from all measurements. It depends on where was
  measured, not on what, and so holds for models without residuals, too.
- *doublings* of the replicas beyond the most that were measured. This factor, and that of the
  residual, make the deviation as large as the errors on Sia's published profiles
  (`python -m benchmarks.controller.fits`).
- *type*: where nothing was measured on a type, the curve is borrowed from another one, by a ratio
  of speeds that is measured on one GPU at best.
- *job*: where times of other jobs of the application are used, the standard deviation of the job's
  own deviation from them (application_pool.py).

The gradient noise, and with it the efficiency of batches, is taken as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from slurm_elastic.core.application import Learned, Observation
from slurm_elastic.models import bootstrap, step_residuals

_RESIDUAL = 2.0
_PER_DOUBLING = 0.15
#: Standard deviation of the ratio of two types' speeds (our choice).
_TYPE = 0.2


def goodput_deviation(
    learned: Learned, gpu_type: str, nodes: int, gpus: int, micro_batch: int
) -> float | None:
    """Return the relative standard deviation of the predicted goodput of one configuration.

    Args:
        learned: measurements of the job.
        gpu_type: a type of its application.
        nodes: of the configuration.
        gpus: over all its nodes.
        micro_batch: samples per replica and micro-step.

    Returns:
        None: nothing was measured yet, or the job cannot run on this type.
    """
    application, observations = learned.application, learned.observations
    profile = application.on(gpu_type)
    source: str | None = gpu_type
    if all(o.gpu_type != gpu_type for o in observations):
        source = bootstrap.source(application, observations, compat=False)
    lender = application.on(source) if source is not None else None
    if profile is None or lender is None:
        return None
    steps = step_deviation(
        [o for o in observations if o.gpu_type == source],
        unit=lender.unit,
        nodes=nodes,
        replicas=max(1, gpus // profile.unit),
        micro_batch=micro_batch,
    )
    borrowed = 0.0 if source == gpu_type else _TYPE
    return math.hypot(steps, borrowed, learned.deviation)


def step_deviation(
    observations: Sequence[Observation],
    *,
    unit: int = 1,
    nodes: int,
    replicas: int,
    micro_batch: int,
) -> float:
    """Return the relative standard deviation of a step's seconds, by the measurements of one type.

    Args:
        observations: of one GPU type, at least one.
        unit: GPUs per replica.
        nodes: of the configuration.
        replicas: over all its nodes.
        micro_batch: samples per replica and micro-step.
    """
    residual = step_residuals.posterior_deviation(
        observations, unit=unit, nodes=nodes, replicas=replicas, micro_batch=micro_batch
    )
    most = max(o.gpus // unit for o in observations)
    doublings = max(0.0, math.log2(replicas / most))
    return math.hypot(_RESIDUAL * residual, _PER_DOUBLING * doublings)
