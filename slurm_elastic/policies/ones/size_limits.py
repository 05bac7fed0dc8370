"""Limits of ONES: how many GPUs a job may get, by the epochs that it has done (SC'21, published).

The limit of a job begins at one GPU. A job that has used it, at least `EPOCHS` epochs after it last
scaled, may get twice as many, at most four times what it asked for. The largest job loses room once
it holds half of the cluster and has run longer than the median; the limit of a job that is
stopped and not resumed is halved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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
        scaled_at: epochs that it had done when it last scaled.
    """

    requested: int
    limit: int = 1
    scaled_at: float = 0.0

    def room(self, held: int, epochs: float) -> int:
        """Return the GPUs that it may have before others get theirs; 0: it never ran.

        Args:
            held: GPUs that it holds.
            epochs: that it has done.
        """
        if held and epochs - self.scaled_at < EPOCHS:
            return held
        return min(self.limit, _MOST * self.requested) if held or epochs else 0

    def after_epochs(self, held: int, epochs: float, gpus: int) -> SizeLimit:
        """Return the limit of a running job that has done so many epochs."""
        if held < self.limit or epochs - self.scaled_at < EPOCHS:
            return self
        return replace(self, limit=min(gpus, 2 * self.limit))

    def stopped(self) -> SizeLimit:
        """Return the limit of a stopped job that a schedule does not resume."""
        return replace(self, limit=max(1, self.limit // 2))


def room_of_largest(
    held: Mapping[int, int], ran_s: Mapping[int, float], others_ran_s: Sequence[float], gpus: int
) -> tuple[int, int] | None:
    """Return the largest job and its lowered room, if it has half of the cluster for long.

    Args:
        held: GPUs of the running jobs that have done `EPOCHS` epochs.
        ran_s: run times of these.
        others_ran_s: run times of all other jobs that have run, also of those that have ended.
        gpus: of the cluster.
    """
    if not held:
        return None
    job = max(held, key=lambda j: (held[j], -j))
    middle = median([*(ran_s[j] for j in held), *others_ran_s])
    if held[job] < gpus // 2 or ran_s[job] <= middle or middle <= 0:
        return None
    room = max(1, math.floor(2 * held[job] / (1 + ran_s[job] / middle)))
    return job, room + room % 2
