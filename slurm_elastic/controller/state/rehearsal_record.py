"""Rehearsal of one job: its attempts, and the reason why the job is not proven. Pure.

A rehearsal (docs/esrun-proven.md) is a transition whose target is the present
allocation. It is made once: a restart shows whether the script resumes, for any cause of the
restart.

>>> record = RehearsalRecord()
>>> record.record(Report(job_id=7, run=0, phase="training", rehearsal="able"), now=0.0)
True
>>> record.may_begin(now=0.0)
True
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.reason import Reason
from slurm_elastic.core.reasons.controller_codes import REHEARSAL_REFUSALS
from slurm_elastic.core.report import Report

#: Rehearsals that were undone before the job was requeued, at most; and the wait after the first
#: one, which doubles (s; our choice).
_MOST_TRIES, _FIRST_WAIT_S = 5, 120.0
_GB = 1e9
#: Smaller sizes are not rounded to 0.1 GB: 34 MB would be none.
_LEAST_GB = 1.0


@dataclass(slots=True, kw_only=True)
class RehearsalRecord:
    """Rehearsal of one job.

    Attributes:
        reported: `Report.rehearsal` of the newest report.
        why: reason why the job is not proven and will not be rehearsed now; None: no reason yet.
        tries: rehearsals that were begun.
        after: epoch s before which none is begun.
        transition: id of the one that requeued the job; 0: none has.
        result: `proven`, `refuted`, `failed`; "": not known yet.
        step: of the newest report.
        saved: when (epoch s) that first stated this step.
    """

    reported: str = ""
    why: Reason | None = None
    tries: int = 0
    after: float = 0.0
    transition: int = 0
    result: str = ""
    step: int | None = None
    saved: float = 0.0

    def record(self, report: Report, *, now: float) -> bool:
        """Record a report; return whether a round is due, as soon after a checkpoint.

        Args:
            report: of the present attempt.
            now: epoch s.
        """
        last, last_step = (self.reported, self.result), self.step
        self.reported, self.step = report.rehearsal, report.step
        if report.rehearsal == "able" and not report.proven and self.result == "proven":
            # Another script of the same batch script; or what was known of this one is lost.
            self.transition, self.tries, self.after, self.result = 0, 0, 0.0, ""
        if report.proven:
            self.why, self.result = None, "proven"
        elif report.rehearsal == "refuted":
            self.why = Reason("resume-refuted", directory=report.kept_in or None)
            self.result = "refuted"
        elif report.rehearsal == "failed":
            self.why, self.result = Reason("rehearsal-failed"), "failed"
        elif report.rehearsal == "accumulation":
            self.why = Reason("accumulation-fixed", micro_batches=report.needed_micro_batches)
        elif report.rehearsal in REHEARSAL_REFUSALS:
            self.why = refusal(report)
        is_new = self.step != last_step
        self.saved = now if is_new else self.saved
        return (is_new and self.may_begin(now)) or last != (self.reported, self.result)

    def may_begin(self, now: float) -> bool:
        """Return whether a rehearsal may be begun at this time (epoch s)."""
        able = self.reported == "able" and not self.transition and not self.result
        return able and self.tries < _MOST_TRIES and now >= self.after

    def begin(self) -> None:
        """Record that one is begun."""
        self.tries += 1
        self.why = None

    def end(self, transition: int, now: float, *, moved: bool) -> None:
        """Record how one has ended: if it did not requeue the job, another one may follow."""
        if moved:
            self.transition = transition
        else:
            self.after = now + _FIRST_WAIT_S * 2 ** (max(1, self.tries) - 1)

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        return {**dataclasses.asdict(self), "why": self.why.to_json() if self.why else None}

    @classmethod
    def from_body(cls, body: object) -> RehearsalRecord:
        """Return it from the ledger's JSON; one of an older release has none."""
        values: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
        names = {f.name for f in dataclasses.fields(cls)}
        record = cls(**{k: v for k, v in values.items() if k in names})
        record.why = Reason.from_json(values.get("why"))
        return record


def refusal(report: Report) -> Reason:
    """Return why a checkpoint could not be kept."""
    gigabytes = None if report.kept_bytes is None else report.kept_bytes / _GB
    if gigabytes is not None:
        gigabytes = round(gigabytes, 1 if gigabytes >= _LEAST_GB else 4)
    return Reason(
        "rehearsal-refused",
        problem=report.rehearsal,
        directory=report.kept_in or None,
        gigabytes=gigabytes,
    )
