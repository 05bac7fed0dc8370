"""Short runs on one GPU of types on which nothing is known of a job: Sia's bootstrap, live.

Sia profiles every job on one GPU of each type before it runs (SOSP'23, section 3.2). Live a job
measures a type by an ordinary change to one idle GPU of it, in its first rounds:

- nothing was measured on the type by the job or its application, which was measured elsewhere;
- the job may run on one GPU there, and is small: it holds one GPU, or is to start on one;
- after the program's solution a GPU of the type is left over: no job gives one up for it;
- no other job of the application measures the type now, and the job has not measured as many
  types as `[goodput] profiles` allows;
- where its length is known, it has many times `profile_s` left.

It stays there until its first report, at most `profile_s`. Where a job is to start, another type
costs nothing; a running job pays for a requeue.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slurm_elastic.config.policy_settings import GoodputSettings
from slurm_elastic.core.application import TypeProfile
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.goodput_rows import Candidate
from slurm_elastic.policies.sia.round_arrays import Floats, Ints, RoundArrays

#: Least time that a job must have left, in multiples of `profile_s`, if it is known.
_LEAST_LEFT = 10.0

#: Entry of each job: `tried` types, and while it measures one: `type`, and `since` when it was seen
#: there.
Entries = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class TypeProfiles:
    """Measurements of types in one round; made by `account`.

    Attributes:
        staying: column of each row that goes on measuring a type.
        entries: of all jobs, for the next round.
    """

    question: Question
    arrays: RoundArrays
    settings: GoodputSettings
    staying: dict[int, int]
    entries: Entries
    _begun: dict[int, int] = field(default_factory=dict)

    def begin(self, choice: Ints, remaining: Floats) -> Ints:
        """Return the columns of all jobs, those that begin to measure a type included.

        Args:
            choice: [J] column of each job, as the program solved it; -1: none.
            remaining: [J] work left; NaN: unknown.
        """
        solved = choice.copy()
        if self.settings.profiles:
            self._choose(choice, remaining)
            for row, column in self._begun.items():
                solved[row] = column
        return solved

    def measured_type(self, row: int, choice: int) -> str | None:
        """Return the type that a job measures in the column that was chosen; None: it does not."""
        if choice < 0 or choice not in (self._begun.get(row), self.staying.get(row)):
            return None
        columns = self.arrays.configurations
        return str(columns.types[int(columns.kind[choice])])

    def _choose(self, choice: Ints, remaining: Floats) -> None:
        """Choose the jobs that begin to measure a type; note them in the entries."""
        arrays, entries = self.arrays, self.entries
        columns, jobs = arrays.configurations, arrays.candidates
        single = (columns.gpus == 1) & (columns.nodes == 1)
        idle = {name: self.question.capacity.get(name, 0) for name in columns.types}
        for row, column in enumerate(choice.tolist()):
            # What a job gives up is not free yet.
            for at in {column, int(arrays.held[row])} - {-1}:
                idle[columns.types[columns.kind[at]]] -= int(columns.gpus[at])
        busy = {
            _purpose(job, entries[job.job.key].get("type"))
            for job in jobs
            if job.job.key in entries
        }
        for row, job in enumerate(jobs):
            entry = entries.get(job.job.key, {"tried": []})
            if "type" in entry or len(entry["tried"]) >= self.settings.profiles:
                continue
            if not self._may(row, int(choice[row]), float(remaining[row])):
                continue
            for column in np.flatnonzero(single & arrays.valid[row]).tolist():
                name = columns.types[columns.kind[column]]
                purpose = _purpose(job, name)
                if not _is_unknown(job, name) or name in entry["tried"] or purpose in busy:
                    continue
                if column == choice[row]:  # it starts there anyhow
                    break
                if idle[name] > 0:
                    self._begun[row] = column
                    idle[name] -= 1
                    busy.add(purpose)
                    tried = [*entry["tried"], name]
                    entries[job.job.key] = {"tried": tried, "type": name}
                    break

    def _may(self, row: int, choice: int, remaining: float) -> bool:
        """Return whether a job is small, and has time enough left."""
        arrays = self.arrays
        job, held, gpus = arrays.candidates[row], int(arrays.held[row]), arrays.configurations.gpus
        if choice < 0:
            return False
        if held < 0:
            return job.held is None and not job.job.run and int(gpus[choice]) == 1
        if int(gpus[held]) != 1:
            return False
        if math.isnan(remaining):
            return True
        left_s = remaining / float(arrays.goodput[row, held])
        return left_s >= _LEAST_LEFT * self.settings.profile_s


def account(
    question: Question,
    arrays: RoundArrays,
    settings: GoodputSettings,
    state: Mapping[str, Mapping[str, Any]],
) -> TypeProfiles:
    """Return the measurements that go on, and end those that are done.

    Args:
        question: of this round.
        arrays: of this round.
        settings: `[goodput]`.
        state: entries of the last round, by job.
    """
    present = {job.key for job in question.snapshot.jobs} if state else ()
    entries: Entries = {key: dict(entry) for key, entry in state.items() if key in present}
    staying: dict[int, int] = {}
    now = question.snapshot.time
    for row, job in enumerate(arrays.candidates if entries else ()):
        entry = entries.get(job.job.key)
        if entry is None or "type" not in entry:
            continue
        held, gpu_type = job.held, entry["type"]
        is_there = held is not None and held.gpu_type == gpu_type and arrays.held[row] >= 0
        since = entry.setdefault("since", now) if is_there else now
        if is_there and not _measured(job, gpu_type) and now - since < settings.profile_s:
            staying[row] = int(arrays.held[row])
        else:  # measured, too late, or it found no place
            entries[job.job.key] = {"tried": entry["tried"]}
    return TypeProfiles(question, arrays, settings, staying, entries)


def _purpose(job: Candidate, gpu_type: str | None) -> tuple[str, str, str | None]:
    """Return the owner, application and type of a measurement: one at a time."""
    name = job.learned.application.name if job.learned else job.job.name
    return job.job.user, name, gpu_type


def _measured(job: Candidate, gpu_type: str) -> bool:
    return job.learned is not None and any(o.gpu_type == gpu_type for o in job.learned.observations)


def _is_unknown(job: Candidate, gpu_type: str) -> bool:
    """Return whether nothing was measured on a type, though something was elsewhere."""
    is_rigid = job.rigid or job.directive.min_gpus == job.directive.max_gpus
    if job.learned is None or not job.learned.observations or is_rigid:
        return False
    profile: TypeProfile | None = job.learned.application.on(gpu_type)
    if profile is None or not (profile.single is None or profile.estimated):
        return False
    return not _measured(job, gpu_type)
