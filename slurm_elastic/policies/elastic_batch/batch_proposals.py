"""Questions to `elastic_batch`, and its proposals once GPUs are divided."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from slurm_elastic.core.plan import Alternative, Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import arrival, gpus_of
from slurm_elastic.policies.elastic_batch.value_rows import ValueRow, ValueRows
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate

#: Smaller sizes offered when the chosen one finds no place.
_SMALLER = 4


@dataclass(frozen=True, slots=True)
class BatchTarget:
    """Target of a job in a division: GPUs of a type, and samples per step (0: its own)."""

    gpu_type: str
    gpus: int
    batch: int


class BatchQuestion:
    """One question, its jobs in order of submission, and their rows.

    Attributes:
        per_node: GPUs of the largest node of each type.
        totals: GPUs of each type, in use or not.
    """

    def __init__(self, question: Question, rows: ValueRows) -> None:
        self.question = question
        self.per_node = question.snapshot.per_node
        self.totals = gpus_of(question.snapshot)
        self._rows = rows
        jobs = [
            Candidate(job, record, directive, question.models[job.job_id])
            for job, record, directive in question.elastic()
        ]
        self.jobs = sorted(jobs, key=lambda j: (arrival(j.job), j.job.job_id))

    @property
    def now(self) -> float:
        """Time of the question (epoch s)."""
        return self.question.snapshot.time

    def row(self, job: Candidate, kind: str) -> ValueRow | None:
        """Return a job's row on a type; None: it can never run there."""
        most = max(self.totals.get(kind, 0), job.held.gpus if job.held else 0)
        return self._rows.row(job, kind, per_node=self.per_node, most=most, seed=self.question.seed)

    def rows(self, job: Candidate) -> Iterator[tuple[str, ValueRow]]:
        """Return its rows on the types that it may have, the preferred first."""
        for kind in job.directive.types or tuple(self.totals):
            row = self.row(job, kind)
            if row is not None:
                yield kind, row

    def why_never(self, job: Candidate) -> Reason:
        """Return why a job can run on no number of GPUs."""
        sizes = {t: job.directive.sizes(t) for t in job.directive.types or tuple(self.totals)}
        if not any(legal and legal[0] <= self.totals.get(t, 0) for t, legal in sizes.items()):
            return Reason("too-few-in-cluster", gpus=job.directive.min_gpus)
        return Reason("batch-exceeds-memory")


@dataclass(frozen=True, slots=True)
class BatchProposals:
    """Proposals after a division.

    Attributes:
        question: the one that is answered.
        targets: of the division, by job key; `reasons`: of jobs without a target.
        dropped: keys of jobs rejected for good.
        next_s: when GPUs are divided next (epoch s).
    """

    question: BatchQuestion
    targets: Mapping[str, BatchTarget]
    reasons: Mapping[str, Reason]
    dropped: Collection[str]
    next_s: float

    def proposal(self, job: Candidate) -> Proposal:
        """Rank a job's target, smaller sizes, present shape; of a pending one its least size."""
        key, held = job.job.key, job.held
        target = self.targets.get(key)
        if target is None:
            ranked = [self._stays(job) if held else self._waits(key)]
            return Proposal(job_id=job.job.job_id, alternatives=tuple(ranked))
        row = self.question.row(job, target.gpu_type)
        assert row is not None
        present = held.gpus if held and held.gpu_type == target.gpu_type else 0
        ranked = [_size(row, target, self._chosen(row, target))]
        if present != target.gpus:
            floor = row.value[present] if row.allows(present) else -np.inf
            smaller = np.flatnonzero(row.value[: target.gpus] > floor)
            for gpus in smaller[::-1][:_SMALLER].tolist():
                ranked.append(_at(row, target.gpu_type, gpus, Reason("next-size")))
        if held is not None and present != target.gpus:
            reason = Reason("assigned-not-free")
            ranked.append(
                _at(row, held.gpu_type, held.gpus, reason)
                if present
                else Alternative(gpu_type=held.gpu_type, gpus=held.gpus, value=0.0, reason=reason)
            )
        if held is None:
            if row.least not in [a.gpus for a in ranked]:
                ranked.append(_at(row, target.gpu_type, row.least, Reason("min-for-now")))
            wait_reason = Reason("gpus-not-free", gpus=target.gpus, gpu_type=target.gpu_type)
            ranked.append(Alternative(gpu_type="", gpus=0, value=0.0, reason=wait_reason))
        return Proposal(job_id=job.job.job_id, alternatives=tuple(ranked))

    def _chosen(self, row: ValueRow, target: BatchTarget) -> Reason:
        return Reason(
            "largest-sum",
            gpus=target.gpus,
            gpu_type=target.gpu_type,
            times=row.value[target.gpus],
            batch=target.batch or None,
        )

    def _stays(self, job: Candidate) -> Alternative:
        """Propose the present shape of a running job without a target."""
        assert job.held is not None
        kind, gpus = job.held.gpu_type, job.held.gpus
        row = self.question.row(job, kind)
        cause = self._next() if row is not None and row.least else self.question.why_never(job)
        reason = Reason("keeps-until-divided", reason=cause)
        return Alternative(gpu_type=kind, gpus=gpus, value=0.0, reason=reason)

    def _waits(self, key: str) -> Alternative:
        """Propose to wait, with the reason."""
        cause = self.reasons.get(key)
        if key not in self.dropped:
            return Alternative(gpu_type="", gpus=0, value=0.0, reason=cause or self._next())
        reason = Reason("turned-away", reason=cause)
        return Alternative(gpu_type="", gpus=0, value=0.0, reason=reason, dropped=True)

    def _next(self) -> Reason:
        return Reason("next-division", at=self.next_s)


def _size(row: ValueRow, target: BatchTarget, reason: Reason) -> Alternative:
    return Alternative(
        gpu_type=target.gpu_type,
        gpus=target.gpus,
        value=float(row.value[target.gpus]),
        reason=reason,
        batch=target.batch or None,
    )


def _at(row: ValueRow, kind: str, gpus: int, reason: Reason) -> Alternative:
    batch = int(row.batch[gpus]) if row.allows(gpus) else 0
    value = float(row.value[gpus]) if row.allows(gpus) else 0.0
    return Alternative(gpu_type=kind, gpus=gpus, value=value, reason=reason, batch=batch or None)
