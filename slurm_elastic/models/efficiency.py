"""Statistical efficiency of a training step, from its gradient noise.

Pollux (OSDI'21, section 3.1), taken over by Sia (SOSP'23, section 3.1). With the
squared norm `sqr` and the variance `var` of the gradient at the initial batch
B0, one step at batch B is worth

    gain(B) = (var + sqr) / (var B0/B + sqr)        steps at the initial batch

and a sample at batch B is worth efficiency(B) = gain(B) B0/B samples at B0.

>>> float(gain(4096, initial_batch=128, noise=Noise(sqr=0.0, var=1.0)))
32.0
>>> float(efficiency(256, initial_batch=128, noise=Noise(sqr=1.0, var=0.0)))
0.5
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from slurm_elastic.core.application import Noise

Floats = NDArray[np.float64]


def gain(batch: ArrayLike, *, initial_batch: float, noise: Noise) -> Floats:
    """Return the steps at the initial batch that one step at each batch is worth.

    Args:
        batch: global batches, > 0; any shape.
        initial_batch: the batch at which the noise is stated.
        noise: latest statistics; without signal and variance a step is worth one step.
    """
    scale = np.asarray(batch, dtype=np.float64) / initial_batch
    return np.asarray(efficiency(batch, initial_batch=initial_batch, noise=noise) * scale)


def efficiency(batch: ArrayLike, *, initial_batch: float, noise: Noise) -> Floats:
    """Return progress per sample relative to the initial batch, in (0, 1] from that batch up."""
    scale = np.asarray(batch, dtype=np.float64) / initial_batch
    sqr, var = weights(noise)
    return np.asarray(1.0 / (var + sqr * scale))


def weights(noise: Noise | None) -> tuple[float, float]:
    """Scale (sqr, var) to sum 1; if not measured (0, 1), under which each batch is efficient.

    Raises:
        ValueError: a statistic is negative or not finite; names it.
    """
    if noise is None:
        return 0.0, 1.0
    for name in ("sqr", "var"):
        value = getattr(noise, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"gradient noise: {name}={value} must be finite and not negative")
    largest = max(noise.sqr, noise.var)
    if largest == 0.0:
        return 1.0, 0.0
    # Divided by the larger one first: the sum of two huge statistics may overflow.
    sqr, var = noise.sqr / largest, noise.var / largest
    return sqr / (sqr + var), var / (sqr + var)
