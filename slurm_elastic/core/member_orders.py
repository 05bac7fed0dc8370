"""Orders that change the members of a running job, and the state of its companions.

A *companion* is a small batch job of the same user, on one node, that holds further GPUs for a
running job, its *base*. The controller orders companions from the base's esrun, which submits them
held; the controller places them; esrun starts ranks in them, and reports their states.

Code inside jobs imports this module: standard library only.

>>> orders = MemberOrders(change=5, join=(2, 2), gpu_type="v100", deadline_s=120.0)
>>> MemberOrders.from_wire(orders.to_wire()) == orders
True
>>> str(CompanionComment(base=4711, run=0, change=5))
'selastic:companion:4711:0:5'
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.errors import InvalidInputError

#: Ways to change the members. "": ranks join and leave while the others train; `prepare`: all ranks
#: will be started again, companions are submitted and wait; `now`: the ranks have saved, or have
#: failed: they are ended and started again.
RESTARTS = ("", "prepare", "now")

#: States of a companion, in order. `submitted`: held or pending; `running`: its script has
#: connected to esrun; `starting`: its ranks have been started; `joined`: they are members;
#: `leaving`: they are to end; `ended`: esrun has ended it, or its job is over.
COMPANION_STATES = ("submitted", "running", "starting", "joined", "leaving", "ended")

#: States of the last change. `submitted`: all its companions are submitted, held; `joining`: the
#: first of them runs; `leaving`: nothing joins, companions leave; `done`: the members are as
#: ordered, or as far as possible at the deadline; `failed`: no companion has joined, or esrun
#: cannot carry the change out: the members are as before, less those that left.
CHANGE_STATES = ("", "submitted", "joining", "leaving", "done", "failed")

#: Most companions of a job, and most in one change.
MAX_COMPANIONS = 64

#: One companion as it travels: job id, GPUs, state ("" if it is of a newer launcher).
CompanionRow = tuple[int, int, str]

_MAX_ID, _MAX_GPUS, _MAX_CHANGE, _MAX_DEADLINE_S = 2**32 - 1, 1024, 2**62, 1e6
_GPU_TYPE = re.compile(r"[A-Za-z0-9_.+-]{0,100}", re.ASCII)
_COMMENT = re.compile(
    r"selastic:companion:([0-9]{1,10}):([0-9]{1,10}):([0-9]{1,18})(?:[^0-9].*)?", re.ASCII
)


class MemberOrdersError(InvalidInputError):
    """Orders for members, or rows of companions, that are malformed; one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOrders:
    """One change of a job's members, as the controller orders it.

    The same change may be sent again: with more in `leave`, with `cancel`, or with `now` after
    `prepare`. All else of a change stays as it was first sent.

    Attributes:
        change: number of the transition; repeated in the answer.
        join: GPUs of each new companion, each on one node.
        gpu_type: of these GPUs; "": any.
        leave: job ids of companions that are to leave.
        deadline_s: seconds, from the moment of sending, until companions that have not joined
            are given up and those that have not left are ended.
        cancel: give up the companions of this change that have not joined.
        restart: one of `RESTARTS`.
    """

    change: int
    join: tuple[int, ...] = ()
    gpu_type: str = ""
    leave: tuple[int, ...] = ()
    deadline_s: float = 300.0
    cancel: bool = False
    restart: str = ""

    def to_wire(self) -> dict[str, Any]:
        """Return a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_wire(cls, data: Any) -> MemberOrders:
        """Check and build; unknown fields are ignored.

        Raises:
            MemberOrdersError: names the field.
        """
        if not isinstance(data, dict):
            raise MemberOrdersError("must be a JSON object")
        gpu_type, cancel = data.get("gpu_type", ""), data.get("cancel", False)
        if not isinstance(gpu_type, str) or not _GPU_TYPE.fullmatch(gpu_type):
            raise MemberOrdersError("gpu_type must be the name of a GPU type")
        if not isinstance(cancel, bool):
            raise MemberOrdersError("cancel must be true or false")
        restart = data.get("restart", "")
        if restart not in RESTARTS:
            raise MemberOrdersError(f"restart must be one of {', '.join(map(repr, RESTARTS))}")
        deadline_s = data.get("deadline_s", 300.0)
        if isinstance(deadline_s, bool) or not isinstance(deadline_s, int | float):
            raise MemberOrdersError("deadline_s must be a number")
        if not 0 <= deadline_s <= _MAX_DEADLINE_S:
            raise MemberOrdersError(f"deadline_s must be from 0 to {_MAX_DEADLINE_S:g}")
        leave = _numbers("leave", data.get("leave", ()), _MAX_ID)
        if len(set(leave)) < len(leave):
            raise MemberOrdersError("leave has a duplicate job id")
        return cls(
            change=_number("change", data.get("change"), 0, _MAX_CHANGE),
            join=_numbers("join", data.get("join", ()), _MAX_GPUS),
            gpu_type=gpu_type,
            leave=leave,
            deadline_s=float(deadline_s),
            cancel=cancel,
            restart=restart,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompanionComment:
    """Comment with which esrun submits a companion; `str` gives its text."""

    base: int
    run: int
    change: int

    def __str__(self) -> str:
        return f"selastic:companion:{self.base}:{self.run}:{self.change}"

    @classmethod
    def parse(cls, text: str) -> CompanionComment | None:
        """Return the base and change in a job's comment; None if it is not that of a companion."""
        match = _COMMENT.fullmatch(text)
        if not match:
            return None
        base, run, change = map(int, match.groups())
        return cls(base=base, run=run, change=change)


def companion_rows(value: Any) -> tuple[CompanionRow, ...]:
    """Return the companions of a report in their wire form.

    Raises:
        MemberOrdersError: no list of rows, more than `MAX_COMPANIONS`, numbers out of range, or a
            job id twice.
    """
    if not isinstance(value, list | tuple) or len(value) > MAX_COMPANIONS:
        raise MemberOrdersError(f"must be a list of at most {MAX_COMPANIONS} companions")
    rows: list[CompanionRow] = []
    for row in value:
        if not isinstance(row, list | tuple) or len(row) != 3 or not isinstance(row[2], str):
            raise MemberOrdersError("each companion must be a job id, GPUs and a state")
        job_id = _number("job id", row[0], 1, _MAX_ID)
        gpus = _number("GPUs", row[1], 0, _MAX_GPUS)
        rows.append((job_id, gpus, row[2] if row[2] in COMPANION_STATES else ""))
    if len({job_id for job_id, _, _ in rows}) < len(rows):
        raise MemberOrdersError("a companion is named twice")
    return tuple(rows)


def _numbers(name: str, value: Any, most: int) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_COMPANIONS:
        raise MemberOrdersError(f"{name} must be a list of at most {MAX_COMPANIONS} numbers")
    return tuple(_number(name, number, 1, most) for number in value)


def _number(name: str, value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise MemberOrdersError(f"{name} must be a whole number from {least} to {most}")
    return value
