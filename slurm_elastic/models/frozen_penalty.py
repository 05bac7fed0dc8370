"""Cost of no longer training the front layers: the frozen penalty, our definition.

No published formula is known, so this is ours. Plain descent lowers the loss, to first
order, by lr x |G|^2 in a step, G the true gradient; a layer's part of it is |G_l|^2. Not
training layers 1 to n therefore loses this fraction of the descent:

    penalty(n) = (sum of |G_l|^2 over l <= n) / (sum of |G_l|^2 over all l)

What a step measures is |g_l|^2 = |G_l|^2 + noise, and in a converged layer nearly all of it
is noise. The product of two steps' gradients, g_l . g'_l over different samples, has the
expectation |G_l|^2 without it (as long as the parameters hardly move in between). `Descent`
averages these products and adds one standard error, so that little knowledge is a high
penalty. Adam's scaling and momentum are not counted.

Layers that are frozen have no gradient, so a later freeze is judged among those that still
train, and penalties compound: keeping 99 % of what keeps 98 % keeps 97.02 %.

Standard library only: imported inside jobs.

>>> descent = Descent(layers=3)
>>> for _ in range(LEAST): descent.add([0.01, 0.49, 0.5])
>>> [round(descent.penalty(n), 3) for n in (0, 1, 2, 3)]
[0.0, 0.01, 0.5, 1.0]
>>> round(compound(0.02, 0.01), 4)
0.0298
>>> [cap(12, epoch) for epoch in range(5)]
[0, 4, 7, 9, 10]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

#: Weight of the past in the averages: about the last twenty products count.
SMOOTHING = 0.9
#: Products that are needed before a penalty is other than 1.
LEAST = 8


class Descent:
    """Share of each training layer in the descent of the loss.

    Args:
        layers: those that train, in the order of the forward pass; at least one.
    """

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self._mean = [0.0] * layers
        self._square = [0.0] * layers
        self._weight = self._weight2 = 0.0
        self._count = 0

    def add(self, products: Sequence[float]) -> None:
        """Add one product of two steps' gradients for each layer; left out if one is not finite."""
        if len(products) != self.layers:
            raise ValueError(f"{len(products)} products for {self.layers} layers")
        sums = list(accumulate(products))
        if not all(map(math.isfinite, sums)):
            return  # an overflow of half precision
        new = 1 - SMOOTHING
        self._mean = [SMOOTHING * m + new * s for m, s in zip(self._mean, sums, strict=True)]
        self._square = [
            SMOOTHING * m + new * s * s for m, s in zip(self._square, sums, strict=True)
        ]
        self._weight = SMOOTHING * self._weight + new
        self._weight2 = SMOOTHING**2 * self._weight2 + new**2
        self._count += 1

    def penalty(self, n: int) -> float:
        """Return the part of the descent, 0 to 1, that freezing the first `n` layers loses."""
        if n == 0:
            return 0.0
        total = self._mean[-1]
        if self._count < LEAST or total <= 0:
            return 1.0
        mean = self._mean[n - 1] / self._weight
        spread = max(0.0, self._square[n - 1] / self._weight - mean * mean)
        error = math.sqrt(spread * self._weight2) / self._weight
        return min(1.0, max(0.0, (mean + error) * self._weight / total))

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and lists, for JSON."""
        return {
            "mean": self._mean,
            "square": self._square,
            "weight": [self._weight, self._weight2],
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`, for the same number of layers."""
        self._mean, self._square = list(state["mean"]), list(state["square"])
        self._weight, self._weight2 = state["weight"]
        self._count = state["count"]


def compound(first: float, second: float) -> float:
    """Return the penalty of two freezes, the second relative to the layers left by the first."""
    return 1 - (1 - first) * (1 - second)


def choose(certified: int, penalties: Mapping[int, float], *, max_penalty: float) -> int:
    """Return the longest prefix to freeze, of those whose penalty is known.

    Args:
        certified: layers that may be frozen at most.
        penalties: by the number of layers; only these and 0, which costs nothing, are chosen.
        max_penalty: fraction of useful progress that freezing may cost.

    >>> choose(3, {1: 0.002, 3: 0.02}, max_penalty=0.005)
    1
    """
    allowed = [n for n, p in penalties.items() if 0 < n <= certified and p <= max_penalty]
    return max(allowed, default=0)


def cap(layers: int, epoch: int, *, alpha: float = 1 / 3) -> int:
    """Return the most layers that may be frozen after this many epochs: PipeTransformer (ICML'21).

    Each epoch a fraction `alpha` of those that still train may freeze: layers x
    (1 - (1 - alpha)^epoch), rounded up, but never all of them.
    """
    # The smallest excess over a whole number is rounding.
    return min(layers - 1, math.ceil(layers * (1 - (1 - alpha) ** epoch) - 1e-9))
