"""Work that jobs have left, estimated from the progress that they report.

A job that reports its progress (a fraction of its training) states its length with it: over the
rounds in which it ran, progress and predicted goodput show how much work all of it is. A job
without progress has no estimate, and is treated without one.

The account of each job travels in the policy's state: JSON, equal state gives equal answers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.round_arrays import Floats, RoundArrays

#: Entries of an account: progress and goodput at the last round, then sums over the rounds:
#: work predicted, and progress made.
_PROGRESS, _GOODPUT, _WORK, _MADE = range(4)
#: Part of the sums that is kept with each round: old predictions were made with older models.
_KEEP = 0.98


def account(
    question: Question, arrays: RoundArrays, state: Mapping[str, Any]
) -> tuple[Floats, dict[str, Any]]:
    """Return the [J] remaining work in each job's unit of goodput, NaN: unknown, and the account.

    Args:
        question: of this round.
        arrays: of this round.
        state: the account of the last round, {} in the first.
    """
    now, last = question.snapshot.time, state.get("time")
    elapsed = now - last if last is not None else 0.0
    jobs: dict[str, Any] = state.get("jobs", {})
    asked = set(state.get("asked", ()))
    remaining = np.full(len(arrays.candidates), math.nan)
    rows: dict[str, list[float]] = {}
    for row, (job, held) in enumerate(zip(arrays.candidates, arrays.held.tolist(), strict=True)):
        progress = job.record.progress
        if progress is None:
            continue
        goodput = float(arrays.goodput[row, held]) if held >= 0 else 0.0
        old = jobs.get(job.job.key)
        work, made = (old[_WORK], old[_MADE]) if old else (0.0, 0.0)
        # A job that was not asked about was changing: its time did not all go into training.
        if old and job.job.key in asked and elapsed > 0:
            gained = progress - old[_PROGRESS]
            if gained > 0 and old[_GOODPUT] > 0:
                work = _KEEP * work + old[_GOODPUT] * elapsed
                made = _KEEP * made + gained
        rows[job.job.key] = [progress, goodput, work, made]
        if made > 0:
            remaining[row] = work / made * max(0.0, 1.0 - progress)
    present = {job.key for job in question.snapshot.jobs}
    kept = {key: entry for key, entry in jobs.items() if key in present and key not in rows}
    return remaining, {"time": now, "asked": sorted(rows), "jobs": {**kept, **rows}}
