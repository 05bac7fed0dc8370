"""Settings of running jobs that need no restart: the batch, and how many layers to freeze.

Batch: with `batch=MIN-MAX`, unless the policy leaves it alone, the one with the best goodput on
what the job holds (`GoodputModel.best`), as whole micro-batches of all replicas. It is only
changed for `MIN_GAIN`. It at most doubles at a time, and micro-batches at most double what was
measured: models are accurate only near what was measured. A change without a restart loses only
prefetched samples. A batch that the policy chooses
(`Alternative.batch`) is reached by the same steps.

Frozen layers: of what the job's library certifies, as many as `max-penalty` allows
(`models.frozen_penalty.choose`). Under a policy that predicts frozen layers (icefrog), those of the
best effective progress on what the job holds (`models.effective_progress.prefix`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from slurm_elastic.core.application import JobClass, Learned
from slurm_elastic.core.cluster import Allocation, Job, JobState, Snapshot
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Decision, JobRecord
from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report
from slurm_elastic.models.frozen_penalty import choose as choose_frozen

#: Goodput that a change of the batch must gain, so that noise in estimates changes nothing.
MIN_GAIN = 0.05
#: Largest batch tried, by the present one; and micro-batch, by the largest that was measured.
_STRETCH = 2
#: Micro-batches of this size and larger are multiples of eight.
_EIGHTS = 12


@dataclass(frozen=True, slots=True)
class BatchChoice:
    """Decision about the batch of one job.

    Attributes:
        batch: samples per step.
        present: samples per step now.
        limits: smallest and largest that its directive allows.
        gain: goodput at `batch` over that at `present`, less 1; 0 where nothing was predicted.
        reason: why it changes or not; None: nothing to say.
    """

    batch: int
    present: int
    limits: tuple[int, int]
    gain: float = 0.0
    reason: Reason | None = None


class SettingsSender(Protocol):
    """Sender of settings to jobs, such as `OrderOutbox.tell`."""

    def __call__(self, job_id: int, *, run: int, **values: int | None) -> bool:
        """Set values for a job from this attempt on; return whether any of them is new."""
        ...


def choose(
    learned: Learned | None,
    held: Allocation,
    present: int,
    *,
    limits: tuple[int, int],
    per_node: Mapping[str, int],
) -> BatchChoice:
    """Return the batch that a job is to have on an allocation; pure.

    Args:
        learned: of the job; None or another class than adaptive: only the limits count.
        held: what it holds, or is about to.
        present: its batch, samples per step.
        limits: smallest and largest allowed.
        per_node: GPUs per node of each type.
    """
    low, high = limits
    inside = max(low, min(present, high))
    stays = BatchChoice(inside, present, limits)
    if inside != present:
        stays = _because(stays, Reason("batch-limits", least=low, most=high))
    if learned is None or learned.application.job_class is not JobClass.ADAPTIVE:
        return stays
    if learned.application.on(held.gpu_type) is None or not learned.observations:
        return stays
    if learned.noise is None:
        return stays if stays.reason else _because(stays, Reason("noise-unknown"))
    reach = min(high, _STRETCH * max(inside, learned.application.initial_batch))
    goodput = {
        b: _goodput(learned, held, b, per_node)
        for b in (inside, *_tried(learned, held, (low, reach), per_node))
    }
    best, present_goodput = max(goodput, key=lambda b: (goodput[b], -b)), goodput[inside]
    if best == inside or goodput[best] <= 0:
        return stays
    if present_goodput <= 0:
        reason = Reason("batch-does-not-fit", batch=inside)
        return BatchChoice(best, present, limits, reason=reason)
    gain = goodput[best] / present_goodput - 1
    if gain < MIN_GAIN:
        if stays.reason:
            return stays
        reason = Reason("batch-gains-little", batch=best, gain=max(0.0, gain), min_gain=MIN_GAIN)
        return _because(stays, reason)
    reason = Reason("batch-goodput", gain=gain, present=inside)
    return BatchChoice(best, present, limits, gain, reason)


def restrict_to_order(
    learned: Learned, held: Allocation, present: int, *, batch: int, limits: tuple[int, int]
) -> BatchChoice:
    """Return the next step towards a batch that the policy chose; pure.

    Args:
        learned: of the job.
        held: what it holds, or is about to.
        present: its batch, samples per step.
        batch: the policy's.
        limits: smallest and largest that the directive allows.
    """
    low, high = limits
    profile = learned.application.on(held.gpu_type)
    replicas = max(1, held.gpus // (profile.unit if profile else 1))
    reach = _STRETCH * max(present, learned.application.initial_batch)
    # A library that accumulates splits a share that does not fit; others take it at once.
    if learned.observations and not learned.application.accumulation:
        share = max(o.micro_batch for o in learned.observations)
        reach = min(reach, replicas * learned.application.micro_batches * _STRETCH * share)
    next_batch = max(low, min(batch, high, max(reach, present)))
    even = next_batch - next_batch % replicas
    next_batch = even if even >= low else next_batch
    reason = Reason("batch-by-policy", batch=batch, gpus=held.gpus)
    return BatchChoice(
        next_batch, present, limits, reason=reason if next_batch != present else None
    )


def _because(choice: BatchChoice, reason: Reason) -> BatchChoice:
    return dataclasses.replace(choice, reason=reason)


def _tried(
    learned: Learned, held: Allocation, limits: tuple[int, int], per_node: Mapping[str, int]
) -> Iterator[int]:
    """Yield batches that may be the best within the limits, in whole micro-batches.

    The published model accumulates at least once on a lone replica with more than the initial
    batch, because it could not measure the noise otherwise. Here the noise is always measured:
    both are tried.
    """
    # It brings scipy, 50 MB: not every site's policy needs it.
    from slurm_elastic.models.goodput import GoodputModel  # noqa: PLC0415

    application = learned.application
    profile = application.on(held.gpu_type)
    assert profile is not None
    replicas = held.gpus // profile.unit
    most = min(profile.most, _STRETCH * max(o.micro_batch for o in learned.observations))
    for accumulation in sorted({application.accumulation, False}):
        tried = dataclasses.replace(application, accumulation=accumulation)
        model = GoodputModel.of(dataclasses.replace(learned, application=tried), per_node=per_node)
        goodput, micro, more = model.best(
            held.gpu_type, len(held.nodes), held.gpus, max_batch=limits[1], most=most
        )
        if not replicas or float(goodput) <= 0:
            continue
        pieces = replicas * application.micro_batches * (1 + int(more))
        within = min(most, limits[1] // pieces)
        size = min(int(micro), within)
        for batch in (pieces * _even(size, within), pieces * size):
            if batch >= limits[0]:
                yield batch
                break


def _even(size: int, most: int) -> int:
    """Return a micro-batch near `size` that is a multiple of eight, which suits the hardware."""
    if size < _EIGHTS:
        return size
    nearest = 8 * round(size / 8)
    return nearest if nearest <= most else most - most % 8


def _goodput(learned: Learned, held: Allocation, batch: int, per_node: Mapping[str, int]) -> float:
    """Return the goodput predicted at exactly this batch; 0: it does not fit."""
    from slurm_elastic.models.goodput import GoodputModel  # noqa: PLC0415

    fixed = dataclasses.replace(learned.application, job_class=JobClass.STRONG_SCALING, batch=batch)
    model = GoodputModel.of(dataclasses.replace(learned, application=fixed), per_node=per_node)
    return float(model.goodputs(held.gpu_type, len(held.nodes), held.gpus))


def frozen(
    report: Report,
    directive: Directive,
    *,
    learned: Learned | None = None,
    held: Allocation | None = None,
) -> int | None:
    """Return the number of certified layers to freeze; None: the job's own choice.

    Without `freeze=auto` it is the job's own choice: its script may have chosen.

    Args:
        report: the newest.
        directive: in force.
        learned: with `prefixes` of this report, where the policy counts with them.
        held: what the job holds.
    """
    if report.kind != "library" or report.certified is None:
        return None
    if directive.freeze != "auto" or not report.certified:
        return None
    if learned is not None and held is not None:
        # They bring scipy, 50 MB: not every site's policy needs it.
        from slurm_elastic.models import effective_progress  # noqa: PLC0415
        from slurm_elastic.models.goodput import GoodputModel  # noqa: PLC0415

        return effective_progress.prefix(
            GoodputModel.of(learned),
            learned,
            gpu_type=held.gpu_type,
            nodes=len(held.nodes),
            gpus=held.gpus,
        )
    penalties = {0: 0.0}
    if report.frozen and report.penalty is not None:
        penalties[report.frozen] = report.penalty
    if report.certified_penalty is not None:
        penalties[report.certified] = report.certified_penalty
    return choose_frozen(report.certified, penalties, max_penalty=directive.max_penalty)


class BatchTuner:
    """Batches and frozen layers of running jobs.

    Args:
        tell: sends them.
        policy_chooses: whether the policy chooses batches (`Capabilities.batch_chosen_by`); jobs
            for which it names none are left alone.

    Attributes:
        choices: what the last round decided of each job's batch, for `explain`.
    """

    def __init__(self, tell: SettingsSender, *, policy_chooses: bool = False) -> None:
        self._tell = tell
        self._policy_chooses = policy_chooses
        self.choices: dict[int, BatchChoice] = {}

    def round(
        self,
        snapshot: Snapshot,
        records: Mapping[int, JobRecord],
        reports: Mapping[int, Report],
        *,
        act: bool,
        leave: Collection[int] = (),
        decided: Mapping[int, Decision] | None = None,
    ) -> list[tuple[Job, BatchChoice]]:
        """Decide on the batch of every running job that reports.

        Args:
            snapshot: of the round.
            records: of its elastic jobs.
            reports: the newest of each job.
            act: whether settings are sent, or only kept for `explain`.
            leave: jobs that are about to get other GPUs.
            decided: by job, for policies that choose batches.

        Returns:
            New settings that were sent now.
        """
        self.choices, sent = {}, []
        for job in snapshot.jobs:
            record, report = records.get(job.job_id), reports.get(job.job_id)
            if record is None or report is None or job.state is not JobState.RUNNING:
                continue
            if record.in_transition or record.held or job.allocation is None:
                continue
            if job.job_id in leave:
                continue
            decision = (decided or {}).get(job.job_id)
            ordered = decision.batch if decision else None
            if self._policy_chooses and ordered is None and _elastic(job):
                continue
            choice = self._choice(record, report, job, job.allocation, (snapshot, ordered))
            if choice is None:
                if act:  # an earlier order may stand
                    self._tell(job.job_id, run=job.run, batch=None)
                continue
            self.choices[job.job_id] = choice
            changes = act and choice.batch != choice.present
            if changes and self._tell(job.job_id, run=job.run, batch=choice.batch):
                sent.append((job, choice))
        return sent

    def ahead(
        self,
        decisions: Iterable[Decision],
        snapshot: Snapshot,
        records: Mapping[int, JobRecord],
        reports: Mapping[int, Report],
    ) -> None:
        """Set the best batch for jobs on their way to other GPUs, from their next attempt on.

        Args:
            decisions: of changes that have just begun.
            snapshot: as for `round`.
            records: as for `round`.
            reports: as for `round`.
        """
        for decision in decisions:
            job, report = snapshot.job[decision.job_id], reports.get(decision.job_id)
            record = records.get(decision.job_id)
            if record is None or report is None or decision.target is None:
                continue
            if self._policy_chooses and decision.batch is None:
                continue
            where = snapshot, decision.batch
            choice = self._choice(record, report, job, decision.target, where)
            if choice and choice.batch != choice.present:
                self._tell(job.job_id, run=job.run + 1, batch=choice.batch)

    def answer_report(
        self,
        job: Job,
        report: Report,
        *,
        directive: Directive | None,
        learned: Learned | None = None,
    ) -> None:
        """Answer a report of certified layers with how many of them to freeze.

        Args:
            job: running.
            report: of its present attempt.
            directive: in force.
            learned: see `frozen`.
        """
        if directive is not None and report.run == job.run:
            layers = frozen(report, directive, learned=learned, held=job.allocation)
            self._tell(job.job_id, run=job.run, frozen=layers)

    def _choice(
        self,
        record: JobRecord,
        report: Report,
        job: Job,
        held: Allocation,
        where: tuple[Snapshot, int | None],
    ) -> BatchChoice | None:
        """Return the decision; None: the directive or the job does not let the batch change."""
        snapshot, ordered = where
        directive = job.directive
        if directive is None or directive.batch is None or report.kind != "library":
            return None
        if not report.global_batch:
            return None
        if self._policy_chooses and ordered and record.learned is not None:
            present, limits = report.global_batch, directive.batch
            return restrict_to_order(record.learned, held, present, batch=ordered, limits=limits)
        return choose(
            record.learned,
            held,
            report.global_batch,
            limits=directive.batch,
            per_node=snapshot.per_node,
        )


def _elastic(job: Job) -> bool:
    """Return whether its directive lets its batch be chosen."""
    return job.directive is not None and job.directive.batch is not None
