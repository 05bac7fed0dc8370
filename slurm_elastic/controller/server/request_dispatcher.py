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
from slurm_elastic.controller.listening_thread import EventLog
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.core.report import Orders, Report
from slurm_elastic.rpc import requests
from slurm_elastic.rpc.protocol import VERSION, RequestError, check_version
from slurm_elastic.rpc.requests import Audience, Kind, Operation

#: Seconds over which a user's rate is averaged, and between log lines about the same refusal.
_RATE_WINDOW_S, _LOG_EVERY_S = 10.0, 10.0

#: Refusals whose last log line is remembered.
_MAX_LOGGED = 1000


class Role(NamedTuple):
    """Role of this daemon among several.

    Attributes:
        name: `alone`, `active` or `standby`.
        active: address of the active daemon; "" if it is not known.
        reader: how it reads slurmctld, and why; "" if that is not known yet.
    """

    name: str = "alone"
    active: str = ""
    reader: str = ""


class ParsedRequest(NamedTuple):
    """A request whose version, operation and arguments are checked."""

    operation: Operation
    arguments: dict[str, Any]


class RequestRefusedError(SlurmElasticError):
    """Refusal by a backend; the message is one line with the remedy, shown to the caller."""


class RequestBackend(Protocol):
    """The controller, as far as requests need it."""

    def owner(self, job_id: int) -> int | None:
        """Return the uid of a job's owner; None if the job is unknown."""
        ...

    def past_owner(self, job_id: int) -> int | None:
        """Return the uid of the owner of a job that Slurm no longer lists; None: not recorded."""
        ...

    def find(self, name: str) -> tuple[int, ...]:
        """Return the raw ids of a job as people name it (`queries.dispatch.find`)."""
        ...

    def has_read_cluster(self) -> bool:
        """Return whether jobs and nodes have been read since the start."""
        ...

    def is_operator(self, uid: int) -> bool:
        """Return whether a user may see and command every job."""
        ...

    def private(self) -> bool:
        """Return whether users see only their own jobs (PrivateData=jobs)."""
        ...

    def report(self, uid: int, report: Report) -> Orders:
        """Take a report of the job's owner, and return the job's orders."""
        ...

    def orders(self, job_id: int, run: int) -> Orders:
        """Return the orders in force for one attempt."""
        ...

    def question(self, uid: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Answer an operation of kind QUESTION.

        Args:
            uid: the caller's.
            op: name of the operation.
            args: its arguments; in place of `jobs`, `job_ids`: a tuple of raw ids that the caller
                may see. Jobs that ended long ago keep their number.
        """
        ...

    def copy(self, since: dict[str, Any]) -> dict[str, Any]:
        """Return the rows of the ledger since then (`leader.standby_sync`)."""
        ...

    def command(self, uid: int, op: str, args: dict[str, Any]) -> dict[str, Any]:
        """Carry out an operation of kind COMMAND; the caller's right is checked.

        Args:
            uid: the caller's.
            op: name of the operation.
            args: its arguments; in place of `jobs`, `job_ids`: a tuple of raw ids.

        Returns:
            `CommandAnswer` or `TextAnswer` of `rpc.answers`.
        """
        ...


class RequestDispatcher:
    """Checks requests and hands them to the backend.

    `answer` and `orders` run on the backend's thread, the others on the server's.

    Args:
        backend: the controller; None: not yet active.
        log: receives refusals, `JobId=… Uid=… Refused=…`.
        rate_per_user: requests a second, averaged over ten seconds.
        role: a standby answers pings and refuses all other requests.

    Attributes:
        backend: the one in use; replaced when this daemon becomes active again.
    """

    def __init__(
        self,
        backend: RequestBackend | None,
        log: EventLog,
        *,
        rate_per_user: float,
        role: Callable[[], Role] = Role,
    ) -> None:
        self.backend, self._log, self._rate, self._role = backend, log, rate_per_user, role
        self._allowance: dict[int, tuple[float, float]] = {}
        self._logged: dict[object, float] = {}

    def read(self, request: Mapping[str, Any]) -> ParsedRequest:
        """Check version, operation and arguments of a request as it arrived.

        Raises:
            RequestError: with code `version`, `standby` or `malformed`.
        """
        version = request.get("v")
        check_version(version, release=__version__)
        if request.get("op") != "ping":
            self._refuse_standing_by()
        since = requests.operation_of(request).since
        check_version(version, release=__version__, since=since)
        return ParsedRequest(*requests.read(request))

    def answer(self, uid: int, request: ParsedRequest) -> dict[str, Any]:
        """Answer a request of this user.

        Raises:
            RequestError: it is refused.
            Exception: as raised by the backend.
        """
        operation, arguments = request
        if operation.kind is Kind.PING:
            role, active, reader = self._role()
            ping = {"version": __version__, "protocol": VERSION, "uid": uid}
            return {**ping, "role": role, "active": active, "reader": reader}
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
        return {"orders": self._current.orders(job_id, run).to_wire()}

    def warn(self, subject: object, line: str) -> None:
        """Log a line, but at most one about each subject every ten seconds."""
        now = time.monotonic()
        if now >= self._logged.get(subject, 0.0):
            if len(self._logged) > _MAX_LOGGED:
                self._logged.clear()
            self._logged[subject] = now + _LOG_EVERY_S
            self._log.warning(line)

    @property
    def _current(self) -> RequestBackend:
        if self.backend is None:
            raise RequestError("standby", "this controller is starting: ask again")
        return self.backend

    def _refuse_standing_by(self) -> None:
        role = self._role()
        if role.name == "standby":
            active = f"the active one is {role.active}" if role.active else "none is active yet"
            raise RequestError("standby", f"this controller stands by; {active}")

    def _report(self, uid: int, report: Report) -> dict[str, Any]:
        self._own(uid, report.job_id, "report")
        return {"orders": self._current.report(uid, report).to_wire()}

    def _question(self, uid: int, op: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        args = dict(arguments)
        if "jobs" in args:
            # The answer to history itself leaves out changes that the caller may not see.
            args["job_ids"] = self._visible(uid, args.pop("jobs"), all_=op == "history")
        return self._current.question(uid, op, args)

    def _copy(self, uid: int, since: dict[str, Any]) -> dict[str, Any]:
        if uid not in (0, os.geteuid()):
            self.warn((uid, "copy"), f"Uid={uid} Refused=copy: not a controller")
            raise RequestError("refused", "copy is for a controller that stands by")
        return self._current.copy(since)

    def _command(
        self, uid: int, operation: Operation, arguments: Mapping[str, Any]
    ) -> dict[str, Any]:
        args, op = dict(arguments), operation.name
        if operation.audience is Audience.OWNER_OR_OPERATOR:
            args["job_ids"] = self._commanded(uid, op, args.pop("jobs", ()))
        elif not self._current.is_operator(uid):
            self.warn((uid, op), f"Uid={uid} Refused={op}: not an operator")
            raise RequestError("refused", f"{op} is for operators (see [controller] operators)")
        return self._current.command(uid, op, args)

    def _visible(self, uid: int, names: Sequence[str], *, all_: bool = False) -> tuple[int, ...]:
        """Return the ids of jobs that a user may see; `all_`: of any jobs."""
        job_ids: list[int] = []
        everything = all_ or not self._current.private() or self._current.is_operator(uid)
        for name in names:
            ids = self._current.find(name)
            if not ids and not self._current.has_read_cluster():
                raise self._unknown_job(name)
            ids = ids or ((int(name),) if name.isdigit() else ())
            if not ids or not (everything or all(self._owns(uid, i) for i in ids)):
                raise self._unknown_job(name)
            job_ids += ids
        return tuple(job_ids)

    def _owns(self, uid: int, job_id: int) -> bool:
        """Return whether a job belongs to a user; also one that Slurm no longer lists."""
        owner = self._current.owner(job_id)
        return (self._current.past_owner(job_id) if owner is None else owner) == uid

    def _commanded(self, uid: int, op: str, names: Sequence[str]) -> tuple[int, ...]:
        """Return the ids of jobs that a user may command."""
        job_ids: list[int] = []
        operator = self._current.is_operator(uid)
        for name in names:
            ids = self._current.find(name)
            foreign = [] if operator else [i for i in ids if self._current.owner(i) != uid]
            if foreign:
                self.warn((uid, op), f"JobId={foreign[0]} Uid={uid} Refused={op}: not the owner")
            if not ids or (foreign and self._current.private()):
                raise self._unknown_job(name)
            if foreign:
                raise RequestError(
                    "refused", f"job {name}: only its owner or an operator may {op} it"
                )
            job_ids += ids
        if not job_ids:
            raise RequestError("malformed", f"{op}: which job? give its id")
        return tuple(job_ids)

    def _unknown_job(self, name: str) -> RequestError:
        """Return the refusal for a job that is unknown, or must seem so to the caller."""
        if self._current.has_read_cluster():
            return RequestError("refused", f"job {name}: Invalid job id specified")
        return RequestError(
            "refused", f"job {name}: the controller has not read Slurm's jobs yet: try again"
        )

    def _own(self, uid: int, job_id: int, request: str) -> None:
        owner = self._current.owner(job_id)
        if owner is None:
            raise RequestError("unknown_job", f"job {job_id} is not known to the controller (yet)")
        if owner != uid:
            self.warn((uid, request), f"JobId={job_id} Uid={uid} Refused={request}: not the owner")
            raise RequestError("refused", f"job {job_id} belongs to another user")

    def spend(self, uid: int, *, too_many: bool = False) -> None:
        """Count one request against a user's rate.

        Args:
            uid: the user.
            too_many: too many requests of the user are open already.

        Raises:
            RequestError: the rate is exceeded.
        """
        if too_many:
            self.warn((uid, "open"), f"Uid={uid} Refused=too many requests open at once")
            raise RequestError("rate", "too many requests open at once: wait for their answers")
        most, now = self._rate * _RATE_WINDOW_S, time.monotonic()
        tokens, since = self._allowance.get(uid, (most, now))
        tokens = min(most, tokens + (now - since) * self._rate)
        self._allowance[uid] = (max(0.0, tokens - 1), now)
        if tokens < 1:
            line = f"more than {self._rate:g} requests a second"
            self.warn((uid, "rate"), f"Uid={uid} Refused={line}")
            raise RequestError("rate", f"{line}: wait a moment")
