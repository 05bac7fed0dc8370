"""Every operation of the controller's socket: name, audience, arguments and answer.

    >>> request = build("orders", job_id=4711, run=0, seen=3, wait_s=25.0)
    >>> request["v"], request["op"], request["wait_s"]
    (1, 'orders', 25.0)
    >>> operation, arguments = read(request)
    >>> operation.audience.value, arguments["job_id"]
    ('the owner of the job', 4711)

Clients build requests with `build`; the server reads them with `read` and dispatches by
`Operation`. Arguments that an operation does not have are ignored, so that newer clients are
understood. Standard library only: imported inside jobs.
"""

from __future__ import annotations

import enum
import importlib
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from slurm_elastic.core.report import Report
from slurm_elastic.core.report_fields import ReportError
from slurm_elastic.rpc.protocol import RequestError, answered

#: Most jobs named in one request, and characters of a text.
MAX_JOBS, MAX_TEXT = 1000, 1000
#: The operation that waits for news (a long poll).
LONG_POLL = "orders"

_MAX_ID = 2**32 - 1
#: Times (epoch s) and durations beyond it are rejected.
_MAX_TIME = 1e12
_JOB_NAME = re.compile(r"[0-9]{1,10}(_[0-9]{1,10})?", re.ASCII)


class Audience(enum.Enum):
    """Users that may send a request; root and the controller's account may send all commands."""

    ANYONE = "everybody; other users' data as far as PrivateData allows"
    JOB_OWNER = "the owner of the job"
    OWNER_OR_OPERATOR = "the owner of all jobs named, or an operator"
    OPERATOR = "operators"
    CONTROLLER = "root and the controller's account"


class Kind(enum.Enum):
    """Kind of an operation: the part of the controller that answers it."""

    PING = "ping"
    DIALOGUE = "reports and orders of a running job"
    QUESTION = "question"
    COMMAND = "command"
    COPY = "copy of the ledger"


class Argument(NamedTuple):
    """One argument of an operation.

    Attributes:
        name: of the field.
        read: checks and converts the value that arrived; raises RequestError.
        text: meaning, for docs/cli-socket.md.
        required: whether its absence is an error.
        default: value in place of an absent one; None: it stays absent.
    """

    name: str
    read: Callable[[str, Any], Any]
    text: str
    required: bool = False
    default: Any = None


class Operation(NamedTuple):
    """One operation of the socket.

    Attributes:
        answer: module in `slurm_elastic.rpc` and name of the answer's TypedDict.
        since: version of the protocol since which arguments and answer have this form.
    """

    name: str
    kind: Kind
    audience: Audience
    answer: str
    arguments: tuple[Argument, ...] = ()
    since: int = 1

    def answer_type(self) -> type:
        """Return the TypedDict of the answer; jobs never import these."""
        module, name = self.answer.split(".")
        answers = importlib.import_module(f"slurm_elastic.rpc.{module}")
        answer_type: type = getattr(answers, name)
        return answer_type


def build(op: str, **arguments: Any) -> dict[str, Any]:
    """Return a request, ready for `frames.call`; arguments that are None are left out.

    It names the oldest version in which it is valid, so that an older controller may answer it.

    Raises:
        ValueError: the operation is unknown, or has no such argument.
    """
    operation = OPERATIONS.get(op)
    if operation is None:
        raise ValueError(f"operation {op!r} is unknown; known: {', '.join(OPERATIONS)}")
    unknown = arguments.keys() - {a.name for a in operation.arguments}
    if unknown:
        raise ValueError(f"operation {op} has no argument {', '.join(sorted(unknown))}")
    given = {k: v for k, v in arguments.items() if v is not None}
    return {"v": max(operation.since, answered()[0]), "op": op, **given}


def operation_of(request: Mapping[str, Any]) -> Operation:
    """Return the operation of a request.

    Raises:
        RequestError: with code `malformed`: it is unknown.
    """
    op = request.get("op")
    operation = OPERATIONS.get(op) if isinstance(op, str) else None
    if operation is None:
        raise RequestError("malformed", f"op {op!r:.40} is unknown")
    return operation


def read(request: Mapping[str, Any]) -> tuple[Operation, dict[str, Any]]:
    """Return the operation of a request and its checked arguments, by name.

    Args:
        request: as it arrived, its version checked (`protocol.check_version`).

    Raises:
        RequestError: with code `malformed`; the line names the field.
    """
    operation = operation_of(request)
    arguments = {}
    for argument in operation.arguments:
        value = request.get(argument.name)
        value = argument.default if value is None else value
        if value is not None or argument.required:
            arguments[argument.name] = argument.read(argument.name, value)
    return operation, arguments


def _invalid(name: str, expected: str) -> RequestError:
    return RequestError("malformed", f"field {name} must be {expected}")


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_ID:
        raise _invalid(name, "a whole number")
    return value


def _sequence(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(name, "a whole number")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _invalid(name, "true or false")
    return value


def _seconds(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise _invalid(name, "a number of seconds")
    return value


def _time(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _MAX_TIME:
        raise _invalid(name, "a time in epoch seconds")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise _invalid(name, f"text of at most {MAX_TEXT} characters")
    return value


def _user(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > MAX_TEXT:
        raise _invalid(name, "a user's name")
    return value


def _object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _invalid(name, "an object")
    return value


def _report(_: str, value: Any) -> Report:
    try:
        return Report.from_wire(value)
    except ReportError as error:
        raise RequestError("malformed", str(error)) from None


def _jobs(name: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or len(value) > MAX_JOBS:
        raise _invalid(name, f"a list of at most {MAX_JOBS} ids")
    for job in value:
        if not isinstance(job, str) or not _JOB_NAME.fullmatch(job):
            raise RequestError("malformed", f"job {job!r:.40}: an id is written 4711 or 4711_3")
    return list(value)


_JOBS = Argument("jobs", _jobs, 'ids as people type them: `["4711", "4712_3"]`')
_DRY_RUN = Argument("dry_run", _flag, "say what would be done, and do nothing", default=False)


def _question(name: str, answer: str, *arguments: Argument, since: int = 1) -> Operation:
    return Operation(name, Kind.QUESTION, Audience.ANYONE, answer, arguments, since)


def _job_command(name: str, *arguments: Argument) -> Operation:
    audience = Audience.OWNER_OR_OPERATOR
    arguments = (_JOBS, *arguments, _DRY_RUN)
    return Operation(name, Kind.COMMAND, audience, "answers.CommandAnswer", arguments)


def _site_command(name: str) -> Operation:
    return Operation(name, Kind.COMMAND, Audience.OPERATOR, "answers.TextAnswer", (_DRY_RUN,))


_ALL = (
    Operation("ping", Kind.PING, Audience.ANYONE, "answers.PingAnswer"),
    Operation(
        "report",
        Kind.DIALOGUE,
        Audience.JOB_OWNER,
        "answers.OrdersAnswer",
        (Argument("report", _report, "fields of `core/report.py`, `Report`", required=True),),
    ),
    Operation(
        LONG_POLL,
        Kind.DIALOGUE,
        Audience.JOB_OWNER,
        "answers.OrdersAnswer",
        (
            Argument("job_id", _whole, "raw id of the job", required=True),
            Argument("run", _whole, "restart count of the attempt", required=True),
            Argument("seen", _sequence, "`seq` of the newest orders that the caller has"),
            Argument("wait_s", _seconds, "longest wait for newer orders, at most 30 s", default=0),
        ),
    ),
    _question("status", "answers.StatusAnswer", Argument("all", _flag, "rigid jobs, too"), since=2),
    _question(
        "show",
        "decision_answers.ShowAnswer",
        _JOBS,
        Argument("profile", _flag, "the layer profile, too"),
        since=2,
    ),
    _question("explain", "decision_answers.ExplainAnswer", _JOBS, since=2),
    _question("history", "decision_answers.HistoryAnswer", _JOBS, since=2),
    _question(
        "plan",
        "decision_answers.PlanAnswer",
        Argument("program", _flag, "the integer program of the round, too"),
        since=2,
    ),
    _question(
        "usage",
        "usage_answers.UsageAnswer",
        Argument("user", _user, "of this user only"),
        Argument("start", _time, "allocations that end later (epoch s)"),
        Argument("end", _time, "allocations that start earlier (epoch s)"),
        Argument("runs", _flag, "each allocation, too"),
    ),
    _question(
        "durations",
        "duration_answers.DurationsAnswer",
        Argument("name", _text, "predict the run time of a job of the caller with this name"),
        Argument("gpus", _whole, "GPUs of that job"),
        Argument("partition", _text, "partition of that job"),
        Argument("limit_s", _seconds, "time limit of that job"),
    ),
    _question(
        "limits",
        "duration_answers.LimitsAnswer",
        Argument("user", _user, "of this user only"),
    ),
    _question("topology", "topology_answers.TopologyAnswer"),
    _question("check", "answers.CheckAnswer"),
    _job_command("hold"),
    _job_command("release"),
    _job_command(
        "update",
        Argument("elastic", _text, "a directive"),
        Argument("layout", _text, "a layout or an execution plan, or `auto`"),
    ),
    _job_command("teach", Argument("profile", _object, "as `selastic profile` writes it")),
    _site_command("retire"),
    _site_command("reconfigure"),
    Operation(
        "copy",
        Kind.COPY,
        Audience.CONTROLLER,
        "answers.CopyAnswer",
        (Argument("since", _object, "`since` of the answer before, `{}` for all", required=True),),
    ),
)

#: Operations by name.
OPERATIONS: Mapping[str, Operation] = {operation.name: operation for operation in _ALL}
