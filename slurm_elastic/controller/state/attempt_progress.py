"""Progress of a job from attempt to attempt, for jobs that are requeued repeatedly. Pure.

Our definition (docs/reliability-failed-changes.md, "No endless requeue"). An attempt is one run of
a job, from its start until it is back in the queue. It has made *progress* if its newest complete
checkpoint, written or resumed from, is of a later step than that of the attempt before. It was *in
vain* if it made none and its program ended by itself; an attempt that Slurm, a user or the
controller ended is excused.

>>> judge(AttemptProgress(told=True, mark=40, reached=40, ended=1))
<Verdict.VAIN: 'vain'>
>>> judge(AttemptProgress(told=True, mark=40, reached=41, ended=1))
<Verdict.PROGRESS: 'progress'>
>>> judge(AttemptProgress(told=True, mark=40, reached=40))
<Verdict.EXCUSED: 'excused'>
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.core.reason import Reason
from slurm_elastic.core.report import Report

#: A program that never reports a step may make progress unseen: its attempt
#: was in vain only if it failed sooner.
SHORT_S = 300.0


class Verdict(enum.Enum):
    """Result of one attempt."""

    PROGRESS = "progress"
    VAIN = "vain"
    EXCUSED = "excused"


@dataclass(slots=True, kw_only=True)
class AttemptProgress:
    """Present attempt of a job, and the results of those before.

    Attributes:
        run: restart count of the attempt; -1: none is followed.
        since: when it started, or was last seen waiting to (epoch s); None: not known.
        nodes: it ran on.
        mark: newest complete checkpoint of the attempt before; None: none.
        reached: newest complete checkpoint of this one, resumed from or written; None: none.
        ended: exit code with which its program ended by itself, by esrun's report; None: running.
        code: exit code that Slurm has put it back into the queue for; 0: none.
        told: whether any attempt of the job has reported a step.
        excused: it was ended by the controller, or by Slurm.
        ahead: [run, reached, ended] of an attempt that has reported before it was followed.
        vain: attempts in a row that were in vain.
        why: why the job is held for that; None: it is not.
        freed: its owner has released it.
    """

    run: int = -1
    since: float | None = None
    nodes: list[str] = field(default_factory=list)
    mark: int | None = None
    reached: int | None = None
    ended: int | None = None
    code: int = 0
    told: bool = False
    excused: bool = False
    ahead: list[Any] = field(default_factory=list)
    vain: int = 0
    why: Reason | None = None
    freed: bool = False

    @classmethod
    def from_body(cls, body: object) -> AttemptProgress:
        """Return it from the ledger's JSON; unknown fields are ignored."""
        names = {f.name for f in dataclasses.fields(cls)}
        values: Mapping[str, Any] = body if isinstance(body, Mapping) else {}
        progress = cls(**{k: v for k, v in values.items() if k in names})
        progress.why = Reason.from_json(values.get("why"))
        return progress

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        body = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {**body, "why": self.why.to_json() if self.why else None}


def record_report(watch: AttemptProgress, report: Report, *, now: float | None = None) -> None:
    """Record the steps that a report states, of the present attempt or of one not yet seen.

    Args:
        watch: of its job.
        report: of any attempt; reports of ended ones are ignored.
        now: epoch s.
    """
    if watch.run < 0:
        begin(watch, report.run, at=now)
    ended = report.exit_code if report.phase == "ended" else None
    steps = [s for s in (report.checkpoint_step, report.resumed_from) if s is not None]
    reported = max(steps, default=None)
    if report.run >= watch.run:
        watch.told = watch.told or report.step is not None or reported is not None
    if report.run == watch.run:
        watch.reached, watch.ended = _later(watch.reached, reported), ended
        if _further(watch):
            watch.vain = 0
    elif report.run > watch.run:
        reached_before = watch.ahead[1] if watch.ahead and watch.ahead[0] == report.run else None
        watch.ahead = [report.run, _later(reached_before, reported), ended]


def begin(watch: AttemptProgress, run: int, *, at: float | None = None) -> None:
    """Follow another attempt; attempts that were not seen do not count."""
    watch.mark = watch.mark if watch.reached is None else watch.reached
    watch.run, watch.since, watch.nodes = run, at, []
    watch.reached = watch.ended = None
    watch.code, watch.excused = 0, False
    if watch.ahead and watch.ahead[0] == run:
        watch.reached, watch.ended = watch.ahead[1:]
        watch.ahead = []


def close(watch: AttemptProgress, *, at: float | None = None) -> Verdict:
    """Count an attempt that is over, and follow the next one.

    Args:
        watch: with all data of the attempt.
        at: when it came back to the queue (epoch s).
    """
    verdict = judge(watch, at=at)
    if verdict is Verdict.PROGRESS:
        watch.vain = 0
    elif verdict is Verdict.VAIN:
        watch.vain += 1
    begin(watch, watch.run + 1, at=at)
    return verdict


def judge(watch: AttemptProgress, *, at: float | None = None) -> Verdict:
    """Return the result of an attempt that is over; see `close`."""
    if _further(watch):
        return Verdict.PROGRESS
    if watch.excused or (not watch.code and watch.ended is None):
        return Verdict.EXCUSED  # it was requeued by others
    if watch.told:
        return Verdict.VAIN
    lasted = None if at is None or watch.since is None else at - watch.since
    failed = bool(watch.code or watch.ended)
    return Verdict.VAIN if failed and lasted is not None and lasted < SHORT_S else Verdict.EXCUSED


def no_progress(vain: int, mark: int | None, code: int) -> Reason:
    """Return why a job is held.

    >>> print(no_progress(2, 40, 1))
    no-progress attempts=2 step=40 exit_code=1
    """
    return Reason("no-progress", attempts=vain, step=mark, exit_code=code or None)


def _later(first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else max(first, second)


def _further(watch: AttemptProgress) -> bool:
    if watch.reached is None:
        return False
    return watch.reached > (0 if watch.mark is None else watch.mark)
