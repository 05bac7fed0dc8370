"""Nice values of pending rigid jobs by predicted GPU time, where the site allows it.

Only the nice value is written, and only that of jobs that wait for GPUs or their turn, and to which
nobody else has given one. What is written is kept in the ledger first: a value that is neither 0
nor in the ledger is not ours, and stays. So also after the loss of the ledger no job gets more than
`[durations] rigid_nice`. A job that runs keeps its value, which has no effect then; should it be
requeued, the ledger has the value. Where an administrator has set a job's priority, Slurm ignores
its nice value: after two tries the job is left alone.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.reason import Reason
from slurm_elastic.placement.starts.predicted_nice import added_nice
from slurm_elastic.slurm.scontrol import Scontrol, ScontrolError, SlurmUnreachableError
from slurm_elastic.slurm.slurm_settings import read_settings

#: Key of the ledger.
_KEPT = "rigid_nice"
#: Jobs whose nice value is written in one round, and tries for one value.
_MOST_WRITES, _MOST_TRIES = 20, 2
#: Reasons of pending jobs that wait for GPUs or for their turn.
_WAITING = ("Priority", "Resources")
_MULTIFACTOR = "priority/multifactor"
#: The limit of running tasks in the id of a pending array.
_TASK_LIMIT = re.compile(r"%\d+(?=\]$)")


@dataclasses.dataclass(frozen=True, slots=True)
class _Write:
    """A nice value that is to be written, and the GPU seconds from which it follows."""

    job: Job
    nice: int
    gpu_seconds: float


class RigidNice:
    """Nice values of the rigid jobs of one cluster.

    Args:
        config: of the site.
        scontrol: all writes.
        ledger: keeps what was written.
        log: structlog logger.
        read: reads the settings of slurm.conf; returns them, and why there are none.
    """

    def __init__(
        self,
        config: Config,
        scontrol: Scontrol,
        ledger: Ledger,
        log: Any,
        *,
        read: Callable[..., tuple[Mapping[str, str], str]] = read_settings,
    ) -> None:
        self.config = config
        self._scontrol, self._ledger, self._log, self._read = scontrol, ledger, log, read
        #: Values written, by array or job id; None: not read yet.
        self._kept: dict[str, tuple[int, ...]] | None = None
        #: (nice value before, value written, tries) by job id.
        self._tries: dict[int, tuple[int, int, int]] = {}
        self._priority_type = ""

    def round(
        self, snapshot: Snapshot, predict: Callable[[Job], float | None], *, acts: bool
    ) -> Reason | None:
        """Write nice values that are due, or give them back where the site allows it no longer.

        Args:
            snapshot: of this round.
            predict: returns the expected run time of a job in seconds; None: nothing is known.
            acts: whether the controller writes at all.

        Returns:
            Why nothing is written although the site allows it; None: nothing prevents it.
        """
        settings = self.config.durations
        allowed = settings.predict and settings.rigid_nice > 0
        kept = self._load()
        if not acts or not (allowed or kept):
            return None
        if allowed and self._type() != _MULTIFACTOR:
            return Reason("nice-not-counted", error=self._priority_type or "unknown")
        rigid = [j for j in snapshot.jobs if j.submission is None and j.companion is None]
        known = {_array_id(job) for job in rigid}
        self._tries = {i: tries for i, tries in self._tries.items() if i in snapshot.job}
        changed = {key: value for key, value in kept.items() if key in known}
        writes = self._due(rigid, changed, snapshot.time, predict if allowed else None)
        if changed != kept:
            self._kept = changed
            self._ledger.put(_KEPT, changed)
        for write in writes:
            self._write(write)
        return None

    def _due(
        self,
        jobs: Iterable[Job],
        kept: dict[str, tuple[int, ...]],
        now: float,
        predict: Callable[[Job], float | None] | None,
    ) -> list[_Write]:
        """Return the values to be written, and add them to those that are kept."""
        writes: list[_Write] = []
        for job in jobs:
            ours = kept.get(_array_id(job), ())
            is_ours = job.nice == 0 or job.nice in ours
            if job.state is not JobState.PENDING or not is_ours or len(writes) == _MOST_WRITES:
                continue
            nice, gpu_seconds = 0, 0.0
            if predict is not None:
                waits = job.gpus and job.priority and job.reason in _WAITING
                length = predict(job) if waits else None
                if length is None:
                    continue
                gpu_seconds = length * job.gpus
                most = self.config.durations.rigid_nice
                nice = added_nice(gpu_seconds, now - job.submit_time, most)
            if nice == job.nice or not self._may_try(job, nice):
                continue
            if nice and nice not in ours:
                kept[_array_id(job)] = (*ours, nice)
            writes.append(_Write(job, nice, gpu_seconds))
        return writes

    def _may_try(self, job: Job, nice: int) -> bool:
        """Count the tries of one value; Slurm may ignore it."""
        before, last, tries = self._tries.get(job.job_id, (job.nice, nice, 0))
        if (before, last) != (job.nice, nice):
            tries = 0
        self._tries[job.job_id] = job.nice, nice, tries + 1
        return tries < _MOST_TRIES

    def _write(self, write: _Write) -> None:
        job = write.job
        named = dataclasses.replace(job, display_id=_TASK_LIMIT.sub("", job.display_id))
        try:
            self._scontrol.update(named, {"Nice": str(write.nice)})
        except SlurmUnreachableError:
            raise
        except ScontrolError as error:  # it has ended, or started
            self._log.debug(f"JobId={job.display_id} Action=nice Error={error}")
            return
        self._log.info(
            f"JobId={job.display_id} Action=nice From={job.nice} To={write.nice}"
            f" PredictedGpuSeconds={write.gpu_seconds:.0f}"
        )

    def _load(self) -> dict[str, tuple[int, ...]]:
        if self._kept is None:
            stored = self._ledger.get(_KEPT, {})
            rows = stored.items() if isinstance(stored, dict) else ()
            self._kept = {key: tuple(row) for key, row in rows if isinstance(row, list)}
        return self._kept

    def _type(self) -> str:
        """Return PriorityType; asked until slurmctld has answered."""
        if not self._priority_type:
            settings, _ = self._read(timeout_s=self.config.slurm.timeout_s)
            self._priority_type = settings.get("PriorityType", "")
        return self._priority_type


def _array_id(job: Job) -> str:
    """Return the id of a job's array, from which a task has its nice value, or of the job."""
    return job.display_id.partition("_")[0]
