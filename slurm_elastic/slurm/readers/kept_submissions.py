"""Submissions of jobs in whose AdminComment something else stands now.

Tools of a site may write AdminComment, too: a summary at the end of each run, for example. Slurm
then has no trace of the record that job_submit.lua wrote. The submission that was read before
counts as long as Slurm lists the job; the ledger keeps it over restarts of the controller.

A job that gets an id again, as slurmctld has lost its state, has nothing of the earlier one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from slurm_elastic.core.cluster import Job
from slurm_elastic.core.submission import Submission, SubmissionError, parse_admin_comment


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSubmission:
    """Submission of a job, and what distinguishes the job from a later one with its id.

    Attributes:
        uid: of its owner.
        run, submit_time: of its last known attempt, as in `Job`.
        submission: as AdminComment had it.
        name: of the job when it was written to the ledger; "": it has been listed ever since.
    """

    uid: int
    run: int
    submit_time: float
    submission: Submission
    name: str = ""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """Return the submission of a job; None if AdminComment never had it."""
        if job.submission is None or not job.submission.submitted:
            return None
        return cls(
            uid=job.uid,
            run=job.run,
            submit_time=job.submit_time,
            submission=job.submission,
            name=job.name,
        )

    def belongs_to(self, *, uid: int, run: int, submit_time: float, name: str) -> bool:
        """Return whether a job with the same id is the same job.

        Slurm sets the submit time anew at each requeue, and counts it. Another job that has been
        requeued as often differs in its name only.
        """
        if uid != self.uid or (self.name and name != self.name):
            return False
        return (run > self.run and submit_time >= self.submit_time) or (
            run == self.run and submit_time == self.submit_time
        )

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {
            "uid": self.uid,
            "run": self.run,
            "submit_time": self.submit_time,
            "name": self.name,
            "record": self.submission.admin_comment(),
        }

    @classmethod
    def from_body(cls, body: object) -> Self | None:
        """Return it from the ledger's JSON; None without one that can be read."""
        if not isinstance(body, Mapping):
            return None
        try:
            submission = parse_admin_comment(str(body["record"]))
            if submission is None:
                return None
            return cls(
                uid=int(body["uid"]),
                run=int(body["run"]),
                submit_time=float(body["submit_time"]),
                submission=submission,
                name=str(body.get("name") or ""),
            )
        except (SubmissionError, KeyError, TypeError, ValueError, OverflowError):
            return None
