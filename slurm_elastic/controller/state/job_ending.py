"""End of a job, kept when Slurm no longer lists the job.

Slurm removes a job from its list `MinJobAge` seconds after its end. The text of `selastic explain`
for an ended job comes from the job's record in the ledger, written when the end is first seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from slurm_elastic.core.cluster import Allocation, Job, JobState
from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.core.plan import JobRecord
from slurm_elastic.core.submission import Submission


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEnding:
    """End of a job, and the fields that identify the job.

    Attributes:
        state: Slurm's name: COMPLETED, FAILED, TIMEOUT, CANCELLED, NODE_FAIL, …; "": not known.
        exit_code: of the last attempt, 128 + n for signal n.
        time: epoch s; None: not known.
        run: restart count of the last attempt.
        directive: the one that was in force; "" for none.
    """

    state: str
    exit_code: int
    time: float | None
    run: int
    display_id: str
    name: str
    user: str
    uid: int
    partition: str
    directive: str = ""
    submit_time: float = 0.0
    start_time: float | None = None

    @classmethod
    def of(cls, job: Job) -> Self:
        """Return the end of a job that Slurm shows as ended."""
        return cls(
            state=job.end_state,
            exit_code=job.exit_code,
            time=job.end_time,
            run=job.run,
            display_id=job.display_id,
            name=job.name,
            user=job.user,
            uid=job.uid,
            partition=job.partition,
            directive=str(job.directive or ""),
            submit_time=job.submit_time,
            start_time=job.start_time,
        )

    @classmethod
    def from_body(cls, body: object) -> Self | None:
        """Return it from the ledger's JSON, None without one; unknown fields are ignored."""
        if not isinstance(body, Mapping):
            return None
        names = {f.name for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {k: v for k, v in body.items() if k in names}
        try:
            return cls(**values)
        except TypeError:
            return None

    def job(self, job_id: int) -> Job:
        """Return the ended job as Slurm showed it."""
        try:
            submission = Submission(Directive.parse(self.directive)) if self.directive else None
        except DirectiveError:
            submission = None
        return Job(
            job_id=job_id,
            display_id=self.display_id,
            name=self.name,
            user=self.user,
            uid=self.uid,
            state=JobState.ENDED,
            partition=self.partition,
            submit_time=self.submit_time,
            start_time=self.start_time,
            end_time=self.time,
            run=self.run,
            submission=submission,
            exit_code=self.exit_code,
            end_state=self.state,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedJob:
    """Data of an ended job for `explain`.

    Attributes:
        record: as it was at the end.
        reported: whether the job ever reported to the controller.
        held: its last GPUs; None: none are recorded.
        runs: attempts that held GPUs; 0: it never started, or nothing is recorded.
    """

    job: Job
    record: JobRecord
    reported: bool = False
    held: Allocation | None = None
    runs: int = 0


def last_allocation(segment: Mapping[str, Any]) -> Allocation | None:
    """Return the GPUs of a segment of the ledger; None if it cannot be read."""
    shares: dict[str, int] = {}
    for share in str(segment["nodes"]).split(","):
        node, _, gpus = share.rpartition(":")
        if node and gpus.isdecimal():
            shares[node] = int(gpus)
    half = segment["gpus"] < sum(shares.values())
    return Allocation.of(str(segment["gpu_type"]), shares, half=half) if shares else None
