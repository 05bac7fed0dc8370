"""Rights of callers: requests of a known uid are checked and handed to the controller.

The operations, their audience and their arguments are defined in `rpc/requests.py`. The
controller is only known as a `RequestBackend`. Everything in a request is hostile input; a
refusal is a `RequestError`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from slurm_elastic import __version__
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.rpc import requests
from slurm_elastic.rpc.protocol import VERSION, RequestError, check_version
from slurm_elastic.rpc.requests import Audience, Kind, Operation

#: Seconds over which a user's rate is averaged, and between log lines about the same trouble.
_RATE_WINDOW_S, _LOG_EVERY_S = 10.0, 10.0

#: Troubles whose last log line is remembered.
_MAX_TROUBLES = 1000


class Role(NamedTuple):
    """What this daemon is among several.

    Attributes:
        name: `alone`, `active` or `standby`.
        active: address of the active one, as far as it is known.
    """

    name: str = "alone"
    active: str = ""


class ParsedRequest(NamedTuple):
    """A request whose version, operation and arguments are checked."""

    operation: Operation
    arguments: dict[str, Any]


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

    def read(self, request: Mapping[str, Any]) -> ParsedRequest:
        """Check version, operation and arguments of a request as it arrived.

        Raises:
            RequestError: with code `version`, `standby` or `malformed`.
        """
        check_version(request.get("v"), release=__version__)
        if request.get("op") != "ping":
            self._refuse_standing_by()
        return ParsedRequest(*requests.read(request))

    def answer(self, uid: int, request: ParsedRequest) -> dict[str, Any]:
        """Answer a request of this user.

        Raises:
            RequestError: it is refused.
            Exception: as raised by the backend.
        """
        operation, arguments = request
        if operation.kind is Kind.PING:
            role, active = self._role()
            ping = {"version": __version__, "protocol": VERSION, "uid": uid}
            return {**ping, "role": role, "active": active}
        self._refuse_standing_by()
        if operation.kind is Kind.COPY:
            return self._copy(uid, arguments["since"])
        if operation.kind is Kind.QUESTION:
            return self._question(uid, operation.name, arguments)
        if operation.kind is Kind.COMMAND:
            return self._command(uid, operation, arguments)
        if operation.name == requests.LONG_POLL:
            return self.orders(uid, request)
        return self._report(uid, arguments["report"])

    def orders(self, uid: int, request: ParsedRequest) -> dict[str, Any]:
        """Return the orders in force for the attempt that the request names."""
        self._refuse_standing_by()
        job_id, run = request.arguments["job_id"], request.arguments["run"]
        self._own(uid, job_id, requests.LONG_POLL)
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

    def _report(self, uid: int, report: Report) -> dict[str, Any]:
        self._own(uid, report.job_id, "report")
        return {"orders": self._desk.report(uid, report).to_wire()}

    def _question(self, uid: int, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        args = dict(arguments)
        if "jobs" in args:
            # Of changes long past the answer itself leaves out what he may not see.
            args["job_ids"] = self._visible(uid, args.pop("jobs"), all_=op == "history")
        return self._desk.question(uid, op, args)

    def _copy(self, uid: int, since: dict[str, Any]) -> dict[str, Any]:
        if uid not in (0, os.geteuid()):
            self.warn((uid, "copy"), f"Uid={uid} Refused=copy: not a controller")
            raise RequestError("refused", "copy is for a controller that stands by")
        return self._desk.copy(since)

    def _command(
        self, uid: int, operation: Operation, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        args, op = dict(arguments), operation.name
        if operation.audience is Audience.OWNER_OR_OPERATOR:
            args["job_ids"] = self._commanded(uid, op, args.pop("jobs", ()))
        elif not self._desk.is_operator(uid):
            self.warn((uid, op), f"Uid={uid} Refused={op}: not an operator")
            raise RequestError("refused", f"{op} is for operators (see [controller] operators)")
        return self._desk.command(uid, op, args)

    def _visible(self, uid: int, names: Sequence[str], *, all_: bool = False) -> tuple[int, ...]:
        """Ids of jobs that a user may see; `all_`: of any."""
        found: list[int] = []
        everything = all_ or not self._desk.private() or self._desk.is_operator(uid)
        for name in names:
            ids = self._desk.find(name) or ((int(name),) if name.isdigit() else ())
            if not ids or not (everything or all(self._desk.owner(i) == uid for i in ids)):
                raise RequestError("refused", f"job {name}: Invalid job id specified")
            found += ids
        return tuple(found)

    def _commanded(self, uid: int, op: str, names: Sequence[str]) -> tuple[int, ...]:
        """Ids of jobs that a user may command."""
        found: list[int] = []
        operator = self._desk.is_operator(uid)
        for name in names:
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
