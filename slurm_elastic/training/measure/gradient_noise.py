"""Noise of the gradient: its squared norm and its variance, from values that a step computes.

McCandlish et al., "An Empirical Model of Large-Batch Training" (2018), appendix
A.1: the expected squared norm of a gradient over b samples is |G|^2 + S/b, with
the true gradient G and the trace S of the covariance of one sample's gradient.
So two batch sizes, small b and large B, give both without bias:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)
    S     = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

The large batch is the step's. The small one is each rank's first micro-batch,
averaged over the ranks. A single rank that takes its batch at once has no
smaller one; there two consecutive steps count as two samples at equal
parameters (Pollux, OSDI'21, section 3.1): they are the small batches, and
their mean is the large one. |G|^2 and S are averaged separately, and reported
as Pollux states them: `sqr` = |G|^2 and `var` = S / initial batch.

Gradients are those before clipping, without weights of the optimizer (Pollux
divides by Adam's second moments).

>>> noise = GradientNoise(initial_batch=32)
>>> for _ in range(LEAST): noise.add(small=3.0, small_batch=8.0, large=1.5, large_batch=32.0)
>>> noise.fields()
{'grad_sqr': 1.0, 'grad_var': 0.5}
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

#: Weight of the past in the averages, to which every `step_times.EVERY`th step contributes.
SMOOTHING = 0.95
#: Measured steps that the averages need before they are reported.
LEAST = 8


class GradientNoise:
    """Averages of |G|^2 and S over the measured steps.

    Args:
        initial_batch: the global batch at which the variance is stated.
    """

    def __init__(self, initial_batch: int) -> None:
        self._initial_batch = initial_batch
        self._sqr = self._trace = self._weight = 0.0
        self._count = 0

    def add(self, *, small: float, small_batch: float, large: float, large_batch: float) -> None:
        """Add a step's squared norms of the mean gradients over two numbers of samples.

        Args:
            small: over `small_batch` samples.
            small_batch: may be a harmonic mean.
            large: over `large_batch` samples.
            large_batch: more than `small_batch`; else the step is ignored.
        """
        if not (math.isfinite(small) and math.isfinite(large)) or large_batch <= small_batch:
            return  # an overflow of half precision, or the ranks' shares are one sample each
        sqr = (large_batch * large - small_batch * small) / (large_batch - small_batch)
        trace = (small - large) / (1 / small_batch - 1 / large_batch)
        self._sqr = SMOOTHING * self._sqr + (1 - SMOOTHING) * sqr
        self._trace = SMOOTHING * self._trace + (1 - SMOOTHING) * trace
        self._weight = SMOOTHING * self._weight + (1 - SMOOTHING)
        self._count += 1

    def state(self) -> dict[str, float]:
        """Return the state as JSON values."""
        return {
            "sqr": self._sqr,
            "trace": self._trace,
            "weight": self._weight,
            "count": self._count,
        }

    def restore(self, state: object) -> None:
        """Restore a state that `state` returned; anything else is ignored.

        |G|^2 and S depend on the training, not on the batch or the number of ranks.
        """
        if not isinstance(state, Mapping):
            return
        values = [state.get(name) for name in ("sqr", "trace", "weight", "count")]
        numbers = [float(v) for v in values if isinstance(v, int | float) and math.isfinite(v)]
        if len(numbers) == len(values) and numbers[2] > 0 and numbers[3] > 0:
            self._sqr, self._trace, self._weight = numbers[:3]
            self._count = int(numbers[3])

    def fields(self) -> dict[str, float]:
        """Return a report's fields; none before `LEAST` steps, or if the noise is too large."""
        if self._count < LEAST or self._trace <= 0:
            return {}
        # The estimate of |G|^2 can be negative where the noise is much larger.
        sqr = max(0.0, self._sqr / self._weight)
        var = self._trace / self._weight / self._initial_batch
        if not 0 < sqr + var < 1e30:
            return {}
        return {"grad_sqr": float(f"{sqr:.6g}"), "grad_var": float(f"{var:.6g}")}


class ConsecutiveSteps:
    """Noise from the gradients of two consecutive steps, for one rank without micro-batches.

    It keeps a copy of the gradients from one step to the next, only where memory is left.
    """

    def __init__(self, noise: GradientNoise) -> None:
        self._noise = noise
        self._kept: list[torch.Tensor] | None = None
        self._kept_sqr = 0.0
        self._kept_count = 0

    def observe(self, gradients: Sequence[torch.Tensor], count: int, *, keep: bool) -> None:
        """Observe the mean gradients over `count` samples, of every step in order.

        Args:
            gradients: of all parameters, before clipping.
            count: samples behind them.
            keep: whether to compare them with those of the next step.
        """
        former, self._kept = self._kept, None
        if former is None and not keep:
            return
        sqr = float(squared_norm(gradients))
        if former is not None and len(former) == len(gradients) and count == self._kept_count:
            product = float(dot(former, gradients))
            mean = (self._kept_sqr + sqr + 2 * product) / 4
            self._noise.add(
                small=(self._kept_sqr + sqr) / 2,
                small_batch=count,
                large=mean,
                large_batch=2 * count,
            )
        if keep and room_for(gradients):
            self._kept = [g.clone() for g in gradients]
            self._kept_sqr, self._kept_count = sqr, count


def squared_norm(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of all squares, in float32 for tensors of any type, on their device."""
    norms = [
        # Of float64, torch refuses to compute in less.
        torch.linalg.vector_norm(t, dtype=max(t.dtype, torch.float32, key=_bytes)).float()
        for t in tensors
    ]
    return torch.stack(norms).square().sum() if norms else torch.zeros(())


def _bytes(dtype: torch.dtype) -> int:
    return int(dtype.itemsize)


def dot(first: Iterable[torch.Tensor], second: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the sum of the elementwise products, in float32, on the tensors' device."""
    products = [
        # torch.dot needs no intermediate tensor.
        torch.dot(a.reshape(-1), b.reshape(-1))
        if a.dtype == torch.float32
        else (a * b).sum(dtype=torch.float32)
        for a, b in zip(first, second, strict=True)
    ]
    return torch.stack(products).sum() if products else torch.zeros(())


def room_for(gradients: Sequence[torch.Tensor]) -> bool:
    """Return whether a copy fits into memory twice."""
    if not gradients or gradients[0].device.type != "cuda":
        return True
    device = gradients[0].device
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.max_memory_allocated(device)
    copy_bytes = sum(g.numel() * g.element_size() for g in gradients)
    return bool(free + max(0, cached) > 2 * copy_bytes)
