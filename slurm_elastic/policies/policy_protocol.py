"""The protocol of a policy, and how policies are found.

A policy is pure: the same snapshot, records, state and seed give the same
proposals. What it wants to remember (attained service, timers, shares) it
returns as state, a JSON-serialisable mapping that the controller keeps.
Sites add policies through the entry point group `slurm_elastic.policies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol

from slurm_elastic.config.schema import Config
from slurm_elastic.core.cluster import Job, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import JobRecord, Proposal
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement.free_resources import FreeResources


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a policy is asked in one round.

    Attributes:
        jobs: ids of the elastic jobs to decide on: running, or waiting under our lease.
        capacity: GPUs by type that these jobs may hold together: free ones and their own,
            less those kept for others.
        models: speed of each job in any shape.
        later: what is free on each node when all that is under way has happened, for policies
            that choose places; to be copied before it is booked on. None: not told.
    """

    snapshot: Snapshot
    records: Mapping[int, JobRecord]
    models: Mapping[int, SpeedModel]
    jobs: tuple[int, ...]
    capacity: Mapping[str, int]
    seed: int = 0
    later: FreeResources | None = None

    def elastic(self) -> Iterator[tuple[Job, JobRecord, Directive]]:
        """Its jobs, what is known of them, and the directives now in force."""
        for job_id in self.jobs:
            job = self.snapshot.job[job_id]
            record = self.records.get(job_id) or JobRecord(job_id=job_id)
            if job.directive is not None:
                yield job, record, job.directive


class Policy(Protocol):
    """One published system, or our own.

    A policy with a true attribute `decisive` has already weighed what each change costs:
    placement carries its first alternatives out without judging them again. One with a false
    attribute `tunes` knows nothing of batches: jobs keep their users' under it, live and simulated.
    Simulations tell one with a true attribute `measures` (all but decisive ones) measured speeds.
    One with a true attribute `batches` chooses them itself (`Alternative.batch`). With a true
    attribute `analysed` simulated jobs begin with measured times
    (simulator/scalability_analyser.py). Under one with a true attribute `freezes` jobs freeze the
    prefix that it counts with (`models.effective.prefix`), else the longest that they may.
    """

    def __init__(self, config: Config) -> None: ...

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; the present shape among them."""
        ...


GROUP = "slurm_elastic.policies"


def known() -> tuple[str, ...]:
    """Names of the installed policies, sorted."""
    return tuple(sorted({e.name for e in entry_points(group=GROUP)}))


def load(config: Config) -> Policy:
    """The policy that the configuration names.

    Raises:
        KeyError: no such policy is installed.
    """
    (entry,) = [e for e in entry_points(group=GROUP) if e.name == config.controller.policy][:1]
    policy: Policy = entry.load()(config)
    return policy
