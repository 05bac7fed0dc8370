"""Checks of a run of the demo against sacct and the jobs' own logs. Pure.

Nothing that the controller reports is used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from contrib.demo import sacct
from contrib.demo.sacct import Attempt, Change
from contrib.demo.training_logs import TrainingLog

TOLERANCE = 1e-4
_TITLES = {
    "grow": "a job grew",
    "shrink": "a job shrank",
    "move": "a job moved",
    "preempt": "a job was preempted and resumed",
    "in-place": "a job grew or shrank in place, in one run",
}
#: Seconds after the end of a job in which its companions end.
_ENDING_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Result of one check.

    Attributes:
        name: condition that has to hold.
        faults: what contradicts it; () if it holds.
        details: what was found, in a few words.
    """

    name: str
    faults: tuple[str, ...] = ()
    details: str = ""

    @property
    def holds(self) -> bool:
        """Whether the condition holds."""
        return not self.faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that the checks use.

    Attributes:
        elastic, rigid: names of the jobs of the scenario.
        attempts: attempts of each job and of its companions, from sacct.
        changes: changes of the elastic jobs' GPUs.
        logs: logs of the elastic jobs.
        references: logs of the same trainings in one process, uninterrupted.
        library: names of the elastic jobs that use the training library.
        expected_changes: kinds of change that the scenario must show.
    """

    elastic: tuple[str, ...]
    rigid: tuple[str, ...]
    attempts: Mapping[str, Sequence[Attempt]]
    changes: Sequence[Change]
    logs: Mapping[str, TrainingLog] = field(default_factory=dict)
    references: Mapping[str, TrainingLog] = field(default_factory=dict)
    library: tuple[str, ...] = ()
    expected_changes: tuple[str, ...] = ()


def evaluate(evidence: Evidence) -> tuple[Check, ...]:
    """Return all checks, in the order in which they are shown."""
    return (
        all_completed(evidence),
        *(change_occurred(evidence.changes, kind) for kind in evidence.expected_changes),
        *(
            every_sample_once(name, evidence.logs.get(name, TrainingLog()))
            for name in evidence.library
        ),
        *(
            same_losses(
                name,
                evidence.logs.get(name, TrainingLog()),
                evidence.references.get(name, TrainingLog()),
            )
            for name in evidence.elastic
        ),
        ranks_match_gpus(evidence),
        companions_end(evidence),
        rigid_jobs_undisturbed(evidence),
    )


def all_completed(evidence: Evidence) -> Check:
    """Check that every job of the scenario completed."""
    names = (*evidence.elastic, *evidence.rigid)
    faults = []
    for name in names:
        attempts = evidence.attempts.get(name, ())
        if not attempts:
            faults.append(f"{name} was never submitted")
            continue
        last = attempts[-1]
        if last.state != "COMPLETED" or last.exit_code != "0:0":
            faults.append(f"{name} ended {last.state} with exit code {last.exit_code}")
        states = {a.state for a in attempts[:-1]} - {"REQUEUED"}
        faults += [f"a run of {name} ended {state}" for state in sorted(states)]
    return Check(
        name="all jobs completed",
        faults=tuple(faults),
        details=f"{len(evidence.elastic)} elastic, {len(evidence.rigid)} rigid",
    )


def change_occurred(changes: Sequence[Change], kind: str) -> Check:
    """Check that at least one change of this kind occurred."""
    matching = [c for c in changes if (c.in_place if kind == "in-place" else c.kind == kind)]
    return Check(
        name=_TITLES[kind],
        faults=() if matching else ("sacct shows none",),
        details=", ".join(_change(c) for c in matching),
    )


def every_sample_once(name: str, log: TrainingLog) -> Check:
    """Check that a job trained on every sample once per epoch and computed no step twice."""
    return Check(
        name=f"{name}: every sample exactly once per epoch, no step twice",
        faults=log.faults if log.losses or log.faults else ("it wrote no log",),
        details=f"{len(log.losses)} steps",
    )


def same_losses(name: str, log: TrainingLog, reference: TrainingLog) -> Check:
    """Check that the loss of every step equals that of the uninterrupted training."""
    title = f"{name}: losses equal an uninterrupted run's"
    if not reference.losses:
        return Check(name=title, faults=("the uninterrupted run wrote none",))
    faults = []
    if log.losses.keys() != reference.losses.keys():
        faults.append(f"{len(log.losses)} steps, the uninterrupted run has {len(reference.losses)}")
    both = log.losses.keys() & reference.losses.keys()
    # numpy's maximum, unlike Python's, does not lose a NaN.
    worst = float(np.max([abs(log.losses[s] - reference.losses[s]) for s in both], initial=0.0))
    if math.isnan(worst) or worst > TOLERANCE:
        faults.append(f"they differ by up to {worst:.1e}, more than {TOLERANCE:g}")
    return Check(name=title, faults=tuple(faults), details=f"largest difference {worst:.1e}")


def ranks_match_gpus(evidence: Evidence) -> Check:
    """Check that each run trained with one rank for each GPU that sacct shows for it."""
    faults = []
    runs = 0
    for name, parts in sacct.with_companions(evidence.attempts, evidence.library).items():
        for run, worlds in evidence.logs.get(name, TrainingLog()).worlds.items():
            runs += 1
            had = {part.gpus for part in parts if part.ran and part.run == run}
            if worlds != had:
                gpus, ranks = (" and ".join(map(str, sorted(n))) for n in (had, worlds))
                faults.append(
                    f"run {run} of {name} had {gpus or 0} GPUs and trained with {ranks} ranks"
                )
    return Check(
        name="logs and sacct agree on the GPUs of each run",
        faults=tuple(faults) if runs else ("no run wrote a step",),
        details=f"{runs} runs",
    )


def companions_end(evidence: Evidence) -> Check:
    """Check that no companion runs longer than the run of the job to which it belongs."""
    faults = []
    count = 0
    for name in evidence.elastic:
        runs = [a for a in evidence.attempts.get(name, ()) if a.ran]
        for companion in evidence.attempts.get(name + sacct.COMPANION, ()):
            if not companion.ran:
                continue
            count += 1
            base = [r for r in runs if (r.start or 0.0) <= (companion.start or 0.0)]
            last = (base[-1].end or 0.0) if base else 0.0
            if companion.end is None or companion.end > last + _ENDING_S:
                faults.append(f"companion {companion.job_id} of {name} ran longer than it")
    return Check(
        name="no companion outlived its job",
        faults=tuple(faults),
        details=f"{count} companions",
    )


def rigid_jobs_undisturbed(evidence: Evidence) -> Check:
    """Check that rigid jobs ran once, from start to end."""
    faults = []
    for name in evidence.rigid:
        attempts = evidence.attempts.get(name, ())
        if len(attempts) > 1:
            faults.append(f"{name} ran {len(attempts)} times")
        if any(a.suspended for a in attempts):
            faults.append(f"{name} was suspended")
    return Check(
        name="rigid jobs ran exactly once, undisturbed",
        faults=tuple(faults),
        details=f"{len(evidence.rigid)} jobs",
    )


def _change(change: Change) -> str:
    """Return a change in a few words, as `gpt 8 → 4`."""
    before, after = change.before, change.after
    if change.kind == "preempt":
        return f"{change.name} waited {change.waited_s:.0f} s while {change.preempted_by} ran"
    if change.kind == "move":
        return f"{change.name} {','.join(before.nodes)} → {','.join(after.nodes)}"
    return f"{change.name} {before.gpus} → {after.gpus}"


def summary(evidence: Evidence) -> list[str]:
    """Return one line per job with the shapes of its runs."""
    lines = []
    names = (*evidence.elastic, *evidence.rigid)
    parts = sacct.with_companions(evidence.attempts, names)
    for name in names:
        runs = [a for a in parts.get(name, ()) if a.ran]
        shapes = " → ".join(f"{a.gpus} {a.gpu_type} {','.join(a.nodes)}" for a in runs)
        seconds = sum((a.end or 0) - (a.start or 0) for a in runs if a.end)
        gpu_s = sum(((a.end or 0) - (a.start or 0)) * a.gpus for a in runs if a.end)
        lines.append(f"{name:8} {shapes or 'never ran'}   {seconds:.0f} s, {gpu_s:.0f} GPU s")
    return lines
