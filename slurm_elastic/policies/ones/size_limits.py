"""Limits of ONES: how many GPUs a job may get, by the epochs that it has done (SC'21, published).

The limit of a job begins at one GPU. A job that has used it, at least `EPOCHS` epochs after it last
scaled, may get twice as many, at most four times what it asked for. The largest job loses room once
it holds half of the cluster and has run longer than the median; the limit of a job that is
stopped and not resumed is halved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import median

#: Epochs before a job is predicted, and between two doublings of its limit.
EPOCHS = 2
#: Most GPUs, in multiples of those that a job asked for.
_MOST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeLimit:
    """Limit of one job.

    Attributes:
        requested: GPUs that it asked for.
        limit: L.
        granted: room that it was given; None: what it holds, at least one GPU.
        scaled_at: epochs that it had done when it last scaled.
    """

    requested: int
    limit: int = 1
    granted: int | None = None
    scaled_at: float = 0.0

    def room(self, held: int) -> int:
        """Return the GPUs that the job may have in a schedule."""
        return max(1, held) if self.granted is None else max(1, self.granted)

    def after_epochs(self, held: int, epochs: float, gpus: int) -> SizeLimit:
        """Return the limit of a running job that has done so many epochs."""
        if held < self.limit or epochs - self.scaled_at < EPOCHS:
            return self
        limit = min(gpus, 2 * self.limit)
        return replace(self, limit=limit, granted=min(limit, _MOST * self.requested))

    def stopped(self) -> SizeLimit:
        """Return the limit of a job that was stopped and is not resumed."""
        return replace(self, limit=max(1, self.limit // 2))


def shrunk_largest(
    limits: Mapping[int, SizeLimit],
    held: Mapping[int, int],
    ran_s: Mapping[int, float],
    gpus: int,
) -> dict[int, SizeLimit]:
    """Return the limits with that of the largest running job lowered, if it has run for long."""
    result = dict(limits)
    running: Iterable[int] = [job for job, count in held.items() if count]
    if not running:
        return result
    job = max(running, key=lambda j: (held[j], -j))
    middle = median(ran_s[j] for j in running)
    if 2 * held[job] < gpus or ran_s[job] <= middle or middle <= 0:
        return result
    limit = max(1, math.floor(2 * held[job] / (1 + ran_s[job] / middle)))
    limit += limit % 2
    result[job] = replace(result[job], limit=limit, granted=limit)
    return result
