"""Targets promised to a job in one round that it can take only in a later one.

When jobs give up GPUs so that another one grows, that one waits until they are free. The promise
keeps its target over the rounds in between, so that the change that paid for the others' losses
does happen; it is dropped when the target no longer fits or pays, or after `PATIENCE` times
`keep_s`.

Promises are part of a round's state: job key → type, shares, until (epoch s).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Plan
from slurm_elastic.placement.assignment import JobOutcome
from slurm_elastic.placement.pending_claims import PATIENCE

Promise = Mapping[str, Any]


def valid(promised: Mapping[str, Promise], at: float) -> dict[str, Promise]:
    """Return the promises that have not expired."""
    return {key: p for key, p in promised.items() if p["until"] > at}


def allocation(promise: Promise) -> Allocation:
    """Return the promised target."""
    return Allocation.of(promise["gpu_type"], {n: int(g) for n, g in promise["shares"]})


def deferred(
    plan: Plan, outcomes: Iterable[JobOutcome], earlier: Mapping[str, Promise], config: Config
) -> dict[str, Promise]:
    """Return the targets of this round that could not begin; earlier promises keep their time."""
    promised: dict[str, Promise] = {}
    for outcome in outcomes:
        job, target = outcome.round_job.job, outcome.target
        if target is None or plan.decision[job.job_id].target == target:
            continue
        until = plan.time + PATIENCE * config.resize.keep_s
        promised[job.key] = {
            "gpu_type": target.gpu_type,
            "shares": [list(share) for share in target.shares],
            "until": earlier.get(job.key, {}).get("until", until),
        }
    return promised
