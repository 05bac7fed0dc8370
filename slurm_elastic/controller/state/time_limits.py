"""Time limits of jobs that get fewer GPUs than they were submitted with. Pure.

Its time limit was chosen for the shape that its owner submitted. So what is used up of it is
counted at that shape's speed (our definition): an attempt at pace p - the speed predicted for its
own shape over that for the submitted one, at most 1 - uses up p seconds in a second, and the next
one may last as long as what is left over does at its pace. Nothing accumulates: each limit is
computed anew from what was used up, and growing back leaves the rest of what was submitted.

    >>> start = fresh(7200)                       # two hours, on 4 GPUs
    >>> shrunk = after(start, ran_s=3600, limit_s=7200)
    >>> half, limit_s = begun(shrunk, pace=0.5, most_s=None)
    >>> limit_s, half.extended_s
    (7200, 3600)
    >>> grown = after(half, ran_s=1800, limit_s=7200)
    >>> begun(grown, pace=1.0, most_s=None)[1]
    2700
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

#: No attempt counts as slower than this: no prediction is good for more.
LEAST_PACE = 0.02
#: Slurm counts limits in minutes; a job keeps one at least.
_MINUTE_S = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeBudget:
    """Time that a job had left when its present attempt began. All in seconds.

    Attributes:
        work_s: at the speed of the submitted shape.
        plain_s: wall-clock time, had it never been extended.
        spent_s: wall-clock time that its attempts before this one ran.
        pace: of the attempt.
        set_s: TimeLimit that the controller set, whole minutes; None: none.
        hand_s: wall-clock time that a limit set by hand leaves it; None: none was set.
    """

    work_s: float
    plain_s: float
    spent_s: float = 0.0
    pace: float = 1.0
    set_s: int | None = None
    hand_s: float | None = None

    @property
    def extended_s(self) -> int:
        """Seconds by which the attempt's limit is longer than without an extension."""
        if self.set_s is None or self.hand_s is not None:
            return 0
        return max(0, self.set_s - _minutes(self.plain_s))

    def extended_of(self, limit_s: int | None) -> int:
        """Return `extended_s`, or 0 when the limit that Slurm shows is not the one that was set."""
        return self.extended_s if limit_s == self.set_s else 0

    @classmethod
    def from_body(cls, body: object) -> TimeBudget | None:
        """Return it from the ledger's JSON; None if that is missing or invalid."""
        if not isinstance(body, Mapping):
            return None
        names = {f.name for f in fields(cls)}
        values = {k: v for k, v in body.items() if k in names}
        numbers = [v for v in values.values() if v is not None]
        sane = all(type(v) in (int, float) and math.isfinite(v) for v in numbers)
        if not sane or not {"work_s", "plain_s"} <= values.keys():
            return None
        try:
            return cls(**{**values, "pace": _pace(values.get("pace", 1.0))})
        except TypeError:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionTerms:
    """Terms on which a change may extend a limit.

    Attributes:
        paces: by shape that the job may end up in: "planned", "old", "queue".
        most_s: wall-clock seconds that all attempts together may last (MaxTime, MaxWall); None:
            no such limit.
        reserved: when a foreign reservation of its nodes begins (epoch s), by shape.
    """

    paces: Mapping[str, float] = field(default_factory=dict)
    most_s: float | None = None
    reserved: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def from_body(cls, body: Mapping[str, Any] | None) -> ExtensionTerms | None:
        """Return it from the ledger's JSON."""
        return cls(**body) if body else None


def fresh(left_s: float, *, trusted: bool = True) -> TimeBudget:
    """Return the budget of a job of which only the running attempt is known.

    Args:
        left_s: of its time limit.
        trusted: whether that is its owner's own limit; else it is never extended.
    """
    return TimeBudget(work_s=left_s, plain_s=left_s, hand_s=None if trusted else left_s)


def after(budget: TimeBudget, *, ran_s: float, limit_s: int) -> TimeBudget:
    """Return the budget that is left when an attempt ends.

    A limit other than the one that was set was set by hand: it counts at the attempt's pace, so
    that lowering it gains no time, and is not extended any more.

    Args:
        budget: when the attempt began.
        ran_s: how long it lasted.
        limit_s: its TimeLimit as Slurm shows it.
    """
    ran_s = max(0.0, ran_s)
    spent_s = budget.spent_s + ran_s
    if budget.set_s is not None and limit_s != budget.set_s:
        left_s = max(0.0, limit_s - ran_s)
        work_s = budget.pace * left_s
        return TimeBudget(work_s=work_s, plain_s=work_s, spent_s=spent_s, hand_s=left_s)
    return TimeBudget(
        work_s=max(0.0, budget.work_s - budget.pace * ran_s),
        plain_s=max(0.0, budget.plain_s - ran_s),
        spent_s=spent_s,
        hand_s=None if budget.hand_s is None else max(0.0, budget.hand_s - ran_s),
    )


def begun(
    budget: TimeBudget, *, pace: float, most_s: float | None, until_s: float | None = None
) -> tuple[TimeBudget, int]:
    """Return the next attempt's budget and TimeLimit (s, in whole minutes, one at least).

    Args:
        budget: what is left.
        pace: predicted of it; one that cannot be (0, NaN) counts as 1: nothing is extended.
        most_s: as in `ExtensionTerms`.
        until_s: seconds until its nodes are reserved for others; None: they are not. Neither
            bound takes anything away that the job has without an extension.
    """
    pace = _pace(pace)
    wanted_s = budget.work_s / pace
    if budget.hand_s is not None:
        left_s = min(wanted_s, budget.hand_s)
    else:
        bounds = [most_s - budget.spent_s] if most_s is not None else []
        bounds += [until_s] if until_s is not None else []
        left_s = max(min(budget.plain_s, wanted_s), min([wanted_s, *bounds]))
    limit_s = _minutes(left_s)
    return replace(budget, pace=pace, set_s=limit_s), limit_s


def _pace(pace: float) -> float:
    return min(1.0, max(LEAST_PACE, pace)) if pace > 0 else 1.0


def _minutes(seconds: float) -> int:
    return max(1, int(seconds + 1e-6) // _MINUTE_S) * _MINUTE_S
