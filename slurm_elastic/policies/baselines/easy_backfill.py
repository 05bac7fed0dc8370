"""EASY backfill: a reservation for the first waiting job, and earlier starts that do not delay it.

Lifka, JSSPP 1995; the idea of Slurm's `sched/backfill`: the first job without room gets the
earliest moment at which running jobs leave enough GPUs of one type; others may go before it if that
does not delay it: they end before, or leave enough.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import Pool, RigidRequest, Shape, waits


@dataclass(slots=True)
class _Promise:
    """Promise to the first waiting job: `gpu_type` from `begins` on; `spare` GPUs are left over."""

    job_id: str
    gpu_type: str
    begins: float
    spare: int


class Backfill:
    """Starts jobs in the order in which they are offered.

    Args:
        pool: free GPUs; those of started jobs are taken from it.
        ends: expected end (epoch s), GPU type and GPUs of each running job; infinity: not known.
    """

    def __init__(self, pool: Pool, ends: Iterable[tuple[float, str, int]]) -> None:
        self._pool = pool
        self._ends = list(ends)
        self._promise: _Promise | None = None

    def start(self, request: RigidRequest, end: float) -> tuple[Shape | None, Reason]:
        """Return the shape in which a job starts, None if it waits, and the reason.

        Args:
            request: the next job in the order.
            end: its expected end, if it starts now.
        """
        promise = self._promise
        fitting = [s for s in request.shapes if self._pool.room(s)]
        chosen = next((s for s in fitting if _harmless(s, end, promise)), None)
        if chosen:
            self._pool.take(chosen)
            self._ends.append((end, *chosen))
            if promise and chosen[0] == promise.gpu_type and end >= promise.begins:
                promise.spare -= chosen[1]
            return chosen, Reason("fills-gap", job=promise.job_id) if promise else _TURN
        reason = waits(request)
        if fitting and promise:
            reason = Reason("would-delay-job", job=promise.job_id)
        if promise is None and request.shapes:
            self._promise = _promised(request, self._pool, self._ends)
        return None, reason


_TURN = Reason("its-turn")


def _harmless(shape: Shape, end: float, promise: _Promise | None) -> bool:
    if promise is None or shape[0] != promise.gpu_type:
        return True
    return end < promise.begins or shape[1] <= promise.spare


def _promised(
    request: RigidRequest, pool: Pool, ends: Iterable[tuple[float, str, int]]
) -> _Promise | None:
    """Return the earliest time, as far as known, at which one of its shapes has room."""
    earliest: _Promise | None = None
    order = sorted(ends)
    for kind, gpus in request.shapes:
        free, begins = pool.free.get(kind, 0), math.inf
        for end, of_kind, given_back in order:
            if of_kind == kind:
                free += given_back
                if free >= gpus:
                    begins = end
                    break
        if earliest is None or begins < earliest.begins:
            spare = max(0, free - gpus) if math.isfinite(begins) else 0
            earliest = _Promise(request.job.display_id, kind, begins, spare)
    return earliest
