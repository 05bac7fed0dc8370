"""Policy `elastic_batch`: GPUs and batches together, by an exact dynamic program.

After IBM's "Effective Elastic Scaling of Deep Learning Workloads" (MASCOTS 2020, arXiv
2006.13878). Every `interval_s`:

1. GPUs of jobs that ended are free;
2. jobs that arrived are admitted in order of submission, as long as every admitted job can have
   its least size; then the others wait (`queue`), or are rejected for good (`drop`);
3. the sum of scaling factors (value_rows.py) over the admitted jobs is maximised
   (division.py). A job whose GPUs do not change is not touched.

Our definitions, where the paper says nothing: each GPU type is a pool of its own, since factors of
different types cannot be compared: a running job stays on its type, a new one goes to the first
type of its directive that can admit it, else to the one where its fair share is fastest. A running
job is never stopped. A job that can never run as it asks does not block those behind it. Between
two divisions each job keeps, or still gets, what the last one gave, unless that is impossible.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.baselines.rigid import arrival
from slurm_elastic.policies.elastic_batch.batch_proposals import (
    BatchProposals,
    BatchQuestion,
    BatchTarget,
)
from slurm_elastic.policies.elastic_batch.division import Floats, divide
from slurm_elastic.policies.elastic_batch.value_rows import ValueRow, ValueRows
from slurm_elastic.policies.policy_protocol import Capabilities, Question
from slurm_elastic.policies.sia.goodput_rows import Candidate

#: Least gain of a change, in GPUs of the job's type, so that ties change nothing.
TIE = 1e-6
#: Least gain of another batch on unchanged GPUs, a part of the job's speed.
BATCH_GAIN = 0.01
#: Tolerance of the interval: rounds may come this much early.
_EARLY_S = 1e-6


@dataclass(slots=True)
class _Pool:
    """The GPUs of one type while they are divided.

    Attributes:
        free: GPUs that elastic jobs may have.
        least_sum: sum of its members' least sizes.
        closed: a job waits for GPUs of it: none behind that job is admitted.
    """

    free: int
    least_sum: int = 0
    closed: bool = False
    members: list[tuple[Candidate, ValueRow]] = field(default_factory=list)

    def room(self, row: ValueRow) -> bool:
        return 0 < row.least <= self.free - self.least_sum

    def add(self, job: Candidate, row: ValueRow) -> None:
        self.members.append((job, row))
        self.least_sum += row.least


class ElasticBatch:
    """The policy; its state is the last division, its time, and the jobs rejected."""

    def __init__(self, config: Config) -> None:
        self._config = config.elastic_batch
        self._restart_s = config.resize.restart_s
        self._rows = ValueRows(config.elastic_batch)
        self.capabilities = Capabilities(
            binding_proposals=True,
            batch_chosen_by="policy",
            initial_measurements=config.elastic_batch.analysed,
        )

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; see the module."""
        alive = {job.key for job in question.snapshot.jobs}
        self._rows.forget(alive)
        batch_question = BatchQuestion(question, self._rows)
        targets = {k: BatchTarget(*t) for k, t in state.get("targets", {}).items() if k in alive}
        reasons = {
            k: reason
            for k, t in state.get("why", {}).items()
            if k in alive and (reason := Reason.from_json(t)) is not None
        }
        dropped = [k for k in state.get("dropped", ()) if k in alive]
        dropped = dropped if self._config.mode == "drop" else []
        at = float(state.get("at", -np.inf))
        if self._due(batch_question, at, targets, dropped):
            at = batch_question.now
            self._divide(batch_question, targets, reasons, dropped)
        answers = BatchProposals(
            batch_question, targets, reasons, dropped, at + self._config.interval_s
        )
        return tuple(answers.proposal(job) for job in batch_question.jobs), {
            "at": at,
            "targets": {k: [t.gpu_type, t.gpus, t.batch] for k, t in sorted(targets.items())},
            "why": {k: r.to_json() for k, r in sorted(reasons.items())},
            "dropped": sorted(dropped),
        }

    # --- when ---

    def _due(
        self,
        batch_question: BatchQuestion,
        at: float,
        targets: Mapping[str, BatchTarget],
        dropped: list[str],
    ) -> bool:
        """Return whether GPUs are divided now."""
        now = batch_question.now
        if now - at >= self._config.interval_s - _EARLY_S:
            return True
        left = dict(batch_question.question.capacity)
        spare = dict(left)
        waiting = []
        for job in batch_question.jobs:
            target = targets.get(job.job.key)
            if target is None and job.held is not None:
                target = BatchTarget(job.held.gpu_type, job.held.gpus, 0)
            elif target is not None:
                row = batch_question.row(job, target.gpu_type)
                if row is None or not row.allows(target.gpus):
                    return True
            if target is None:
                waiting.append(job)
                continue
            row = batch_question.row(job, target.gpu_type)
            left[target.gpu_type] = left.get(target.gpu_type, 0) - target.gpus
            least = min(row.least or target.gpus, target.gpus) if row else target.gpus
            spare[target.gpu_type] = spare.get(target.gpu_type, 0) - least
        if min(left.values(), default=0) < 0:
            return True
        return any(
            self._overdue(job, now) and row.least and row.least <= spare.get(kind, 0)
            for job in waiting
            if job.job.key not in dropped
            for kind, row in batch_question.rows(job)
        )

    def _overdue(self, job: Candidate, now: float) -> bool:
        guard = self._config.starvation_s
        return guard > 0 and job.held is None and now - arrival(job.job) >= guard

    # --- division ---

    def _divide(
        self,
        batch_question: BatchQuestion,
        targets: dict[str, BatchTarget],
        reasons: dict[str, Reason],
        dropped: list[str],
    ) -> None:
        """Divide the GPUs; targets, reasons and rejected jobs are changed in place."""
        pools = {t: _Pool(free) for t, free in sorted(batch_question.question.capacity.items())}
        new = self._present(batch_question, pools, targets)
        old_targets = dict(targets)
        for job in batch_question.jobs:
            targets.pop(job.job.key, None)
            reasons.pop(job.job.key, None)
        new = [job for job in new if job.job.key not in dropped]
        now = batch_question.now
        new.sort(key=lambda j: (not self._overdue(j, now), arrival(j.job), j.job.job_id))
        for job in new:
            refused = self._admit(batch_question, job, pools, guarded=self._overdue(job, now))
            if refused:
                reasons[job.job.key] = refused
                if self._config.mode == "drop":
                    dropped.append(job.job.key)
        for kind, pool in pools.items():
            targets.update(self._solve(kind, pool, batch_question, old_targets))

    def _present(
        self,
        batch_question: BatchQuestion,
        pools: dict[str, _Pool],
        targets: Mapping[str, BatchTarget],
    ) -> list[Candidate]:
        """Put jobs that run, or were admitted before, into their pools; return the others."""
        new: list[Candidate] = []
        waiting: list[Candidate] = []
        short: list[tuple[Candidate, ValueRow]] = []
        for job in batch_question.jobs:
            if job.held is None:
                (waiting if job.job.key in targets else new).append(job)
                continue
            pool = pools.setdefault(job.held.gpu_type, _Pool(0))
            row = batch_question.row(job, job.held.gpu_type)
            if row is not None and 0 < row.least <= job.held.gpus:
                pool.add(job, row)
                continue
            pool.free -= job.held.gpus
            if row is not None and row.least:
                short.append((job, row))
        for job, row in short:  # their present shape is not allowed: the least, if possible
            assert job.held is not None
            pool = pools[job.held.gpu_type]
            pool.free += job.held.gpus
            if pool.room(row):
                pool.add(job, row)
            else:
                pool.free -= job.held.gpus
        for job in waiting:
            kind = targets[job.job.key].gpu_type
            row = batch_question.row(job, kind)
            if row is not None and kind in pools and pools[kind].room(row):
                pools[kind].add(job, row)
            else:
                new.append(job)
        return new

    def _admit(
        self,
        batch_question: BatchQuestion,
        job: Candidate,
        pools: Mapping[str, _Pool],
        *,
        guarded: bool,
    ) -> Reason | None:
        """Put a new job into a pool, or return why not."""
        rows = [(kind, row) for kind, row in batch_question.rows(job) if row.least]
        if not rows:
            return Reason("request-impossible", reason=batch_question.why_never(job))
        good = [
            (kind, row)
            for kind, row in rows
            if kind in pools and pools[kind].room(row) and (guarded or not pools[kind].closed)
        ]
        if not good:
            for kind, _ in rows:
                if kind in pools:
                    pools[kind].closed = True
            return Reason("earlier-jobs-first", shapes=[(kind, row.least) for kind, row in rows])
        if not job.directive.types:
            good.sort(key=lambda kr: -_fair(pools[kr[0]], kr[1]))
        pools[good[0][0]].add(job, good[0][1])
        return None

    def _solve(
        self,
        kind: str,
        pool: _Pool,
        batch_question: BatchQuestion,
        old_targets: Mapping[str, BatchTarget],
    ) -> Iterator[tuple[str, BatchTarget]]:
        """Divide one pool."""
        if not pool.members:
            return
        widest = max(row.top for _, row in pool.members)
        values = np.full((len(pool.members), widest + 1), -np.inf)
        for i, (job, row) in enumerate(pool.members):
            values[i, : row.top + 1] = row.value
            held = job.held.gpus if job.held else 0
            if row.allows(held):
                values[i, : row.top + 1] *= self._worth_changing(job, kind, row.top)
                values[i, held] = row.value[held] + TIE
        division = divide(values, pool.free)
        assert division is not None, "every member's least was added up"
        for (job, row), gpus in zip(pool.members, division.gpus.tolist(), strict=True):
            target = BatchTarget(kind, gpus, int(row.batch[gpus]))
            old_target = old_targets.get(job.job.key)
            if old_target and (old_target.gpu_type, old_target.gpus) == (kind, gpus):
                target = self._batch(batch_question, job, row, target, old_target)
            yield job.job.key, target

    def _worth_changing(self, job: Candidate, kind: str, top: int) -> Floats:
        """Return the part of the interval left after a change to each number of GPUs up to `top`.

        1: changes are free.
        """
        if not self._config.restart_cost:
            return np.ones(top + 1)
        lost = np.full(top + 1, job.record.change_s(self._restart_s))
        if job.held is not None and job.held.gpu_type == kind:
            costs_s = job.record.costs_s(job.job, range(top + 1), self._restart_s)
            lost = np.array(list(costs_s.values()))
        left: Floats = 1 - lost / np.maximum(np.maximum(self._config.interval_s, lost), 1.0)
        return np.maximum(left, 1e-3, out=left)

    def _batch(
        self,
        batch_question: BatchQuestion,
        job: Candidate,
        row: ValueRow,
        target: BatchTarget,
        old_target: BatchTarget,
    ) -> BatchTarget:
        """Return the batch on unchanged GPUs: the present one unless another is better."""
        if (
            self._config.batch != "elastic"
            or not target.batch
            or old_target.batch in (0, target.batch)
        ):
            return target
        worth = self._rows.worth(
            job, old_target.gpu_type, old_target.gpus, old_target.batch, batch_question.per_node
        )
        return old_target if worth * (1 + BATCH_GAIN) >= row.value[target.gpus] else target


def _fair(pool: _Pool, row: ValueRow) -> float:
    """Return the samples/s of a job on its even share of a pool."""
    share = max(row.least, pool.free // (len(pool.members) + 1))
    return row.unit_rate * float(row.value[row.within(share)])
