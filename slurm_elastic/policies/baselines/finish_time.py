"""Estimated finish times of jobs at their requested size, and finish-time fairness.

Themis (NSDI'20, section 3.2) divides a job's finish time in the shared cluster by that alone on
1/N of it:

    rho = T_sh / T_id,    T_sh = age + what is left,    T_id = whole training / share of its GPUs

with N the mean number of jobs over its life. What is left follows from the work done and the
reported progress: `done (1 - progress) / progress`, in seconds on the job's fastest type. Of a job
without progress only a guess is known: the mean of the others, or an hour. Its rho has no
bound, so that it comes first (section 4.1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.policies.baselines.rigid import (
    RigidRequest,
    Shape,
    arrival,
    elapsed,
    gpus_of,
    rates,
)
from slurm_elastic.policies.policy_protocol import Question

#: Assumed length of a job's training while no job's is known.
_GUESS_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishEstimate:
    """Estimates of one job; seconds of training on its fastest type.

    Attributes:
        speeds: of each shape, in multiples of the fastest.
        age_s: since its first submission.
        total_s: of the whole training.
        progress: done part of it, 0 to 1.
        share: GPUs of its part of the cluster.
        known: whether progress was reported; else `total_s` is a guess.
    """

    request: RigidRequest
    speeds: Mapping[Shape, float]
    age_s: float
    total_s: float
    progress: float
    share: float
    known: bool

    @property
    def left_s(self) -> float:
        """Seconds of training that are left on the fastest type."""
        return self.total_s * max(0.0, 1.0 - self.progress)

    @property
    def alone_s(self) -> float:
        """Seconds from start to end alone on its share of the cluster."""
        gpus = min((g for _, g in self.speeds), default=1)
        mean = sum(1.0 / s for s in self.speeds.values()) / max(1, len(self.speeds))
        return self.total_s * max(mean, 1.0) * max(1.0, gpus / max(self.share, 1e-9))

    def rho(self, shape: Shape | None, *, wait_s: float = 0.0) -> float:
        """Return finish-time fairness if the job gets a shape now, or waits, then the fastest."""
        speed = self.speeds.get(shape, 1.0) if shape else 1.0
        shared_s = self.age_s + wait_s + self.left_s / max(speed, 1e-9)
        return shared_s / max(self.alone_s, 1e-9)


def account(
    question: Question, state: Mapping[str, Any], all_requests: Sequence[RigidRequest]
) -> tuple[list[FinishEstimate], dict[str, Any]]:
    """Return the estimates of all requests, and the state for the next round."""
    now, since = question.snapshot.time, state.get("time")
    earlier: Mapping[str, Sequence[float]] = state.get("jobs", {})
    since_last, of_run = elapsed(question, since), elapsed(question, None)
    per_node = question.snapshot.per_node
    count = len(all_requests)
    step_s = max(0.0, now - since) if since is not None else 0.0
    rows: dict[str, list[float]] = {}
    table: list[tuple[RigidRequest, dict[Shape, float], list[float]]] = []
    for request in all_requests:
        raw = rates(request, question, per_node) if request.shapes else {}
        fastest = max(raw.values(), default=0.0)
        speeds = {s: r / fastest for s, r in raw.items() if r > 0}
        key = request.job.key
        done_s, total, seconds = earlier.get(key, (0.0, 0.0, 0.0))
        held_s = (since_last if key in earlier else of_run).get(key, 0.0)
        if request.present:
            done_s += held_s * _speed(speeds, request.present)
        row = [done_s, total + count * step_s, seconds + step_s]
        rows[key] = row
        table.append((request, speeds, row))
    totals = {
        request.job.key: row[0] / request.record.progress
        for request, _, row in table
        if request.record.progress and row[0] > 0
    }
    guess_s = sum(totals.values()) / len(totals) if totals else _GUESS_S
    gpus = sum(gpus_of(question.snapshot).values())
    estimates = [
        FinishEstimate(
            request=request,
            speeds=speeds,
            age_s=max(0.0, now - arrival(request.job)),
            total_s=totals.get(request.job.key, guess_s),
            progress=request.record.progress or 0.0,
            share=gpus / max(1.0, row[1] / row[2] if row[2] > 0 else float(count)),
            known=request.job.key in totals,
        )
        for request, speeds, row in table
    ]
    return estimates, {"time": now, "jobs": rows}


def _speed(speeds: Mapping[Shape, float], present: Shape) -> float:
    """Return the speed of what a job holds; of another size that of its type."""
    if present in speeds:
        return speeds[present]
    of_type = [s for (kind, _), s in speeds.items() if kind == present[0]]
    return of_type[0] if of_type else 1.0


def by_fairness(estimates: Sequence[FinishEstimate]) -> list[FinishEstimate]:
    """Return the estimates, the furthest from its fair finish first; new jobs before all."""
    return sorted(
        estimates,
        key=lambda e: (
            -(e.rho(None) if e.known else math.inf),
            arrival(e.request.job),
            e.request.job.job_id,
        ),
    )
