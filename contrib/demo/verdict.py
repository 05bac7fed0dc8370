"""The verdict: what sacct and the jobs' own logs prove. Pure.

Nothing that the controller says of itself is looked at. Each check gives the
faults it found, none if it holds, and in a few words what it saw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from contrib.demo.accounting import Attempt, Change
from contrib.demo.logs import Log

TOLERANCE = 1e-4
_TITLES = {
    "grow": "a job grew",
    "shrink": "a job shrank",
    "move": "a job moved",
    "preempt": "a job was preempted and resumed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One thing that has to hold."""

    name: str
    faults: tuple[str, ...] = ()
    saw: str = ""

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that the verdict looks at.

    Attributes:
        elastic, rigid: names of the jobs that were to be submitted.
        attempts: from sacct, by job.
        changes: between them.
        logs: of the elastic jobs.
        references: logs of the same trainings in one process, uninterrupted.
        library: names of the elastic jobs that use the library.
        wants: kinds of change that the scene was made for.
    """

    elastic: tuple[str, ...]
    rigid: tuple[str, ...]
    attempts: Mapping[str, Sequence[Attempt]]
    changes: Sequence[Change]
    logs: Mapping[str, Log] = field(default_factory=dict)
    references: Mapping[str, Log] = field(default_factory=dict)
    library: tuple[str, ...] = ()
    wants: tuple[str, ...] = ()


def judge(evidence: Evidence) -> tuple[Check, ...]:
    """All checks, in the order in which people read them."""
    return (
        completed(evidence),
        *(happened(evidence.changes, kind) for kind in evidence.wants),
        *(every_sample_once(name, evidence.logs.get(name, Log())) for name in evidence.library),
        *(
            same_losses(name, evidence.logs.get(name, Log()), evidence.references.get(name, Log()))
            for name in evidence.elastic
        ),
        as_allocated(evidence),
        undisturbed(evidence),
    )


def completed(evidence: Evidence) -> Check:
    """Every job that was to be submitted ended well, by itself."""
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
        odd = {a.state for a in attempts[:-1]} - {"REQUEUED"}
        faults += [f"a run of {name} ended {state}" for state in sorted(odd)]
    return Check(
        name="all jobs completed",
        faults=tuple(faults),
        saw=f"{len(evidence.elastic)} elastic, {len(evidence.rigid)} rigid",
    )


def happened(changes: Sequence[Change], kind: str) -> Check:
    """At least one change of this kind."""
    found = [c for c in changes if c.kind == kind]
    return Check(
        name=_TITLES[kind],
        faults=() if found else ("sacct shows none",),
        saw=", ".join(_change(c) for c in found),
    )


def every_sample_once(name: str, log: Log) -> Check:
    """A job of the library trained on every sample once per epoch and computed no step twice."""
    return Check(
        name=f"{name}: every sample exactly once per epoch, no step twice",
        faults=log.faults if log.losses or log.faults else ("it wrote no log",),
        saw=f"{len(log.losses)} steps",
    )


def same_losses(name: str, log: Log, reference: Log) -> Check:
    """The loss of every step equals that of the uninterrupted training."""
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
    return Check(name=title, faults=tuple(faults), saw=f"largest difference {worst:.1e}")


def as_allocated(evidence: Evidence) -> Check:
    """Each run trained with one rank for each GPU that sacct shows for it."""
    faults = []
    runs = 0
    for name in evidence.library:
        attempts = [a for a in evidence.attempts.get(name, ()) if a.ran]
        for run, worlds in evidence.logs.get(name, Log()).worlds.items():
            runs += 1
            had = attempts[run].gpus if run < len(attempts) else 0
            if worlds != {had}:
                ranks = " and ".join(map(str, sorted(worlds)))
                faults.append(f"run {run} of {name} had {had} GPUs and trained with {ranks} ranks")
    return Check(
        name="logs and sacct agree on the GPUs of each run",
        faults=tuple(faults) if runs else ("no run wrote a step",),
        saw=f"{runs} runs",
    )


def undisturbed(evidence: Evidence) -> Check:
    """Rigid jobs ran once, from their start to their end."""
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
        saw=f"{len(evidence.rigid)} jobs",
    )


def _change(change: Change) -> str:
    """`gpt 8 → 4`."""
    before, after = change.before, change.after
    if change.kind == "preempt":
        return f"{change.name} waited {change.waited_s:.0f} s while {change.meanwhile} ran"
    if change.kind == "move":
        return f"{change.name} {','.join(before.nodes)} → {','.join(after.nodes)}"
    return f"{change.name} {before.gpus} → {after.gpus}"


def summary(evidence: Evidence) -> list[str]:
    """What each job went through, one line each."""
    lines = []
    for name in (*evidence.elastic, *evidence.rigid):
        runs = [a for a in evidence.attempts.get(name, ()) if a.ran]
        shapes = " → ".join(f"{a.gpus} {a.gpu_type} {','.join(a.nodes)}" for a in runs)
        seconds = sum((a.end or 0) - (a.start or 0) for a in runs if a.end)
        gpu_s = sum(((a.end or 0) - (a.start or 0)) * a.gpus for a in runs if a.end)
        lines.append(f"{name:8} {shapes or 'never ran'}   {seconds:.0f} s, {gpu_s:.0f} GPU s")
    return lines
