"""Who may ask what: requests whose sender is known, checked and handed to the controller.

The only thing known of the controller is the `RequestBackend`. Everything a request
holds is hostile; what is wrong with it comes back as `RequestError`.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from slurm_elastic import __version__
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.report import Orders, Report, ReportError

#: Protocol version; a request of another is refused with a line that names both.
VERSION = 1

#: Answered by `RequestBackend.question`.
QUESTIONS = ("status", "show", "explain", "history", "plan", "usage", "topology", "check")

#: Done by `RequestBackend.command`: the owner of all jobs named, or an operator.
JOB_COMMANDS = ("hold", "release", "update", "teach")

#: Done by `RequestBackend.command`, for operators.
OPERATOR_COMMANDS = ("retire", "reconfigure")

#: Seconds over which a user's rate is averaged, and between log lines about the same trouble.
_RATE_WINDOW_S, _LOG_EVERY_S = 10.0, 10.0

_MAX_JOBS, _MAX_TROUBLES = 1000, 1000
_MAX_ID = 2**32 - 1
_JOB_NAME = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?", re.ASCII)


class Role(NamedTuple):
    """What this daemon is among several.

    Attributes:
        name: `alone`, `active` or `standby`.
        active: address of the active one, as far as it is known.
    """

    name: str = "alone"
    active: str = ""


class RequestRefusedError(SlurmElasticError):
    """Raised by a Desk: the message, one line with the remedy, is what the caller reads."""


class RequestBackend(Protocol):
    """What the controller does for the socket."""

    def owner(self, job_id: int) -> int | None:
        """The uid that owns a job; None: unknown job."""
        ...

    def find(self, name: str) -> tuple[int, ...]:
        """Raw ids behind what people type (`answers.find`)."""
        ...

    def is_operator(self, uid: int) -> bool:
        """Whether a user may see and command every job."""
        ...

    def private(self) -> bool:
        """PrivateData=jobs: users see only their own."""
        ...

    def report(self, uid: int, report: Report) -> Orders:
        """Take a report whose sender owns the job, and answer with its orders."""
        ...

    def orders(self, job_id: int, run: int) -> Orders:
        """The orders in force for one attempt."""
        ...

    def question(self, uid: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Answer one of `QUESTIONS`.

        `args` holds what the caller sent, checked only for being JSON. When it named jobs there
        is also `job_ids`, a tuple of raw ids that he may see; jobs long past keep their number.
        `profile` (show) asks for the layer profile itself.
        """
        ...

    def copy(self, since: dict[str, Any]) -> dict[str, Any]:
        """What the ledger has got since, for a controller that stands by (`succession`)."""
        ...

    def command(self, uid: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Do one of `JOB_COMMANDS` or `OPERATOR_COMMANDS`; the caller was found entitled to it.

        `args` may hold `job_ids` (tuple of raw ids), `dry_run` (bool) and, for update,
        `elastic` (text of a directive) and `layout` (text of a layout, or "auto"), for teach
        `profile` (anything that JSON knows). The answer is
        `{"results": [{"job_id", "ok", "text"}]}`, or `{"text": …}` for retire and reconfigure.
        """
        ...


class EventLog(Protocol):
    """A structlog or logging logger: each line is one event, already worded."""

    def info(self, event: str) -> object:
        """Something went as it should."""
        ...

    def warning(self, event: str) -> object:
        """Something was refused or is out of order."""
        ...

    def error(self, event: str) -> object:
        """Something has to be mended."""
        ...


class RequestError(SlurmElasticError):
    """Becomes the reply `{"error": …, "code": …}`.

    Attributes:
        code: malformed, refused, unknown_job, rate, version, too_large, standby or internal.
    """

    def __init__(self, code: str, line: str) -> None:
        super().__init__(line)
        self.code = code


class RequestDispatcher:
    """Checks requests and puts them before the desk.

    All methods run on the desk's thread but `spend` and `warn`.

    Args:
        desk: the controller.
        log: where refusals go, `JobId=… Uid=… Refused=…`.
        rate_per_user: requests a second, averaged over ten seconds.
        role: who stands by answers pings and refuses all else.

    Attributes:
        desk: the one in use; another takes its place when this daemon becomes active again.
    """

    def __init__(
        self,
        desk: RequestBackend | None,
        log: EventLog,
        *,
        rate_per_user: float,
        role: Callable[[], Role] = Role,
    ) -> None:
        self.desk, self._log, self._rate, self._role = desk, log, rate_per_user, role
        self._allowance: dict[int, tuple[float, float]] = {}
        self._logged: dict[object, float] = {}

    def answer(self, uid: int, request: dict[str, Any]) -> dict[str, Any]:
        """Answer anything.

        Raises:
            RequestError: why not.
            Exception: whatever the desk raises.
        """
        op = request.get("op")
        if request.get("v") != VERSION:
            theirs = f"{request.get('v')!r:.20}"
            raise RequestError(
                "version",
                f"the controller ({__version__}) speaks protocol {VERSION}, not {theirs}: install"
                " the same release of slurm-elastic on both sides",
            )
        if op == "ping":
            role, active = self._role()
            known = {"version": __version__, "protocol": VERSION, "uid": uid}
            return {**known, "role": role, "active": active}
        self._refuse_standing_by()
        if op == "report":
            return self._report(uid, request)
        if op == "orders":
            return self.orders(uid, request)
        if op == "copy":
            return self._copy(uid, request.get("since"))
        if op in QUESTIONS:
            return self._question(uid, op, request)
        if op in JOB_COMMANDS or op in OPERATOR_COMMANDS:
            return self._command(uid, op, request)
        raise RequestError("malformed", f"op {op!r:.40} is unknown")

    def orders(self, uid: int, request: dict[str, Any]) -> dict[str, Any]:
        """The orders in force for `job_id` and `run`."""
        self._refuse_standing_by()
        job_id, run = _whole(request, "job_id"), _whole(request, "run")
        self._own(uid, job_id, "orders")
        return {"orders": self._desk.orders(job_id, run).to_wire()}

    def warn(self, about: object, line: str) -> None:
        """Log, but not more than a line per trouble and moment: nobody shall flood the log."""
        now = time.monotonic()
        if now >= self._logged.get(about, 0.0):
            if len(self._logged) > _MAX_TROUBLES:
                self._logged.clear()
            self._logged[about] = now + _LOG_EVERY_S
            self._log.warning(line)

    @property
    def _desk(self) -> RequestBackend:
        if self.desk is None:
            raise RequestError("standby", "this controller is starting: ask again")
        return self.desk

    def _refuse_standing_by(self) -> None:
        role = self._role()
        if role.name == "standby":
            active = f"the active one is {role.active}" if role.active else "none is active yet"
            raise RequestError("standby", f"this controller stands by; {active}")

    def _report(self, uid: int, request: dict[str, Any]) -> dict[str, Any]:
        try:
            report = Report.from_wire(request.get("report"))
        except ReportError as error:
            raise RequestError("malformed", str(error)) from None
        self._own(uid, report.job_id, "report")
        return {"orders": self._desk.report(uid, report).to_wire()}

    def _question(self, uid: int, op: str, request: dict[str, Any]) -> dict[str, Any]:
        args = _args(request)
        if "jobs" in args:
            # Of changes long past the answer itself leaves out what he may not see.
            args["job_ids"] = self._visible(uid, args.pop("jobs"), all_=op == "history")
        return self._desk.question(uid, op, args)

    def _copy(self, uid: int, since: Any) -> dict[str, Any]:
        if uid not in (0, os.geteuid()):
            self.warn((uid, "copy"), f"Uid={uid} Refused=copy: not a controller")
            raise RequestError("refused", "copy is for a controller that stands by")
        if not isinstance(since, dict):
            raise RequestError("malformed", "field since must be an object")
        return self._desk.copy(since)

    def _command(self, uid: int, op: str, request: dict[str, Any]) -> dict[str, Any]:
        args = _args(request)
        if not isinstance(args.setdefault("dry_run", False), bool):
            raise RequestError("malformed", "field dry_run must be true or false")
        if op in JOB_COMMANDS:
            args["job_ids"] = self._commanded(uid, op, args.pop("jobs", ()))
        elif not self._desk.is_operator(uid):
            self.warn((uid, op), f"Uid={uid} Refused={op}: not an operator")
            raise RequestError("refused", f"{op} is for operators (see [controller] operators)")
        return self._desk.command(uid, op, args)

    def _visible(self, uid: int, names: Any, *, all_: bool = False) -> tuple[int, ...]:
        """Ids of jobs that a user may see; `all_`: of any."""
        found: list[int] = []
        everything = all_ or not self._desk.private() or self._desk.is_operator(uid)
        for name in _names(names):
            ids = self._desk.find(name) or ((int(name),) if name.isdigit() else ())
            if not ids or not (everything or all(self._desk.owner(i) == uid for i in ids)):
                raise RequestError("refused", f"job {name}: Invalid job id specified")
            found += ids
        return tuple(found)

    def _commanded(self, uid: int, op: str, names: Any) -> tuple[int, ...]:
        """Ids of jobs that a user may command."""
        found: list[int] = []
        operator = self._desk.is_operator(uid)
        for name in _names(names):
            ids = self._desk.find(name)
            foreign = [] if operator else [i for i in ids if self._desk.owner(i) != uid]
            if foreign:
                self.warn((uid, op), f"JobId={foreign[0]} Uid={uid} Refused={op}: not the owner")
            if not ids or (foreign and self._desk.private()):
                raise RequestError("refused", f"job {name}: Invalid job id specified")
            if foreign:
                raise RequestError(
                    "refused", f"job {name}: only its owner or an operator may {op} it"
                )
            found += ids
        if not found:
            raise RequestError("malformed", f"{op}: which job? give its id")
        return tuple(found)

    def _own(self, uid: int, job_id: int, what: str) -> None:
        owner = self._desk.owner(job_id)
        if owner is None:
            raise RequestError("unknown_job", f"job {job_id} is not known to the controller (yet)")
        if owner != uid:
            self.warn((uid, what), f"JobId={job_id} Uid={uid} Refused={what}: not the owner")
            raise RequestError("refused", f"job {job_id} belongs to somebody else")

    def spend(self, uid: int, *, crowd: bool = False) -> None:
        """Take one request from a user's allowance; the one method for the socket's own thread.

        Args:
            uid: the user.
            crowd: too many of his requests are open already.

        Raises:
            RequestError: he has none left.
        """
        if crowd:
            self.warn((uid, "crowd"), f"Uid={uid} Refused=too many requests open at once")
            raise RequestError("rate", "too many requests open at once: wait for their answers")
        most, now = self._rate * _RATE_WINDOW_S, time.monotonic()
        tokens, since = self._allowance.get(uid, (most, now))
        tokens = min(most, tokens + (now - since) * self._rate)
        self._allowance[uid] = (max(0.0, tokens - 1), now)
        if tokens < 1:
            line = f"more than {self._rate:g} requests a second"
            self.warn((uid, "rate"), f"Uid={uid} Refused={line}")
            raise RequestError("rate", f"{line}: wait a moment")


def _args(request: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in request.items() if k not in ("v", "op", "nonce", "job_ids")}


def _whole(request: dict[str, Any], field: str) -> int:
    value = request.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_ID:
        raise RequestError("malformed", f"field {field} must be a whole number")
    return value


def _names(names: Any) -> list[str]:
    """Job ids as people type them, checked."""
    if not isinstance(names, list | tuple) or len(names) > _MAX_JOBS:
        raise RequestError("malformed", f"field jobs must be a list of at most {_MAX_JOBS} ids")
    for name in names:
        if not isinstance(name, str) or not _JOB_NAME.fullmatch(name):
            raise RequestError("malformed", f"job {name!r:.40}: an id is written 4711 or 4711_3")
    return list(names)
