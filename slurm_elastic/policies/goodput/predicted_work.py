"""Work that jobs have left by their predicted run time, where they report no progress.

A predicted run time (docs/durations.md) is a distribution for the GPUs that a job asked for. In the
job's unit of goodput it is a distribution of its work: times the goodput on these GPUs, averaged
over the types on which it may run. What the job has done so far is counted from its predicted
goodput over the rounds in which it ran; the rest is the mean of what such jobs have left that
have done at least as much.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate
from slurm_elastic.policies.sia.round_arrays import Floats, RoundArrays

#: Entries of an account: goodput at the last round, and work done.
_GOODPUT, _DONE = range(2)


def account(
    question: Question, arrays: RoundArrays, remaining: Floats, state: Mapping[str, Any]
) -> tuple[Floats, dict[str, Any]]:
    """Return the [J] remaining work, unknown entries predicted where possible, and the account.

    Args:
        question: of this round.
        arrays: of this round.
        remaining: [J] work left as reported; NaN: unknown.
        state: the account of the last round, {} in the first.
    """
    now, last = question.snapshot.time, state.get("time")
    elapsed = now - last if last is not None else 0.0
    old: Mapping[str, Any] = state.get("jobs", {})
    filled = remaining.copy()
    rows: dict[str, list[float]] = {}
    for row, (job, held) in enumerate(zip(arrays.candidates, arrays.held.tolist(), strict=True)):
        key = job.job.key
        goodput = float(arrays.goodput[row, held]) if held >= 0 else 0.0
        entry = old.get(key, (0.0, 0.0))
        done = entry[_DONE] + entry[_GOODPUT] * max(0.0, elapsed)
        rows[key] = [goodput, done]
        length = job.record.length
        per_second = _requested_goodput(arrays, row, job)
        if length is None or not math.isnan(filled[row]) or per_second <= 0:
            continue
        age_s = done / per_second
        filled[row] = max(length.given(age_s).mean - age_s, 0.0) * per_second
    present = {job.key for job in question.snapshot.jobs}
    # A job that was not asked about was changing: it has done nothing since.
    kept = {k: [0.0, e[_DONE]] for k, e in old.items() if k in present and k not in rows}
    return filled, {"time": now, "jobs": {**kept, **rows}}


def _requested_goodput(arrays: RoundArrays, row: int, job: Candidate) -> float:
    """Return the goodput on the GPUs that a job asked for, on average over its types."""
    application = job.learned.application if job.learned else None
    requested = application.gpus if application and application.gpus else max(1, job.job.gpus)
    columns, of_types = arrays.configurations, []
    for kind in range(len(columns.types)):
        (valid,) = np.nonzero(arrays.valid[row] & (columns.kind == kind))
        if len(valid):
            nearest = valid[np.argmin(np.abs(columns.gpus[valid] - requested))]
            scale = requested / columns.gpus[nearest]
            of_types.append(float(arrays.goodput[row, nearest]) * float(scale))
    return sum(of_types) / len(of_types) if of_types else 0.0
