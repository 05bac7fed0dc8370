"""The protocol between selasticd and its callers: version, sizes, and codes of refusals.

Clients and the server take these from here; `rpc/requests.py` defines the operations,
`rpc/*answers.py` the answers, `rpc/frames.py` how both travel. docs/adr/0010-wire-protocol.md
has the reasons. Standard library only: imported inside jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.core.errors import SlurmElasticError

#: Version of this release. It rises when a field that a caller of the release before reads or sends
#: changes its meaning or goes; fields that are only added do not raise it. Each operation states
#: since which version it has its present form (`requests.Operation.since`).
#: 2: reasons in answers are codes with parameters, no longer sentences.
VERSION = 2

#: Bytes of one frame.
MAX_REQUEST = 64 * 1024
MAX_REPLY = 16 * 1024 * 1024

#: Longest wait of a long poll, in seconds.
MAX_WAIT_S = 30.0

#: Codes of refusals, and what each means to the caller.
CODES: Mapping[str, str] = {
    "malformed": "the request is not what it should be; the line names the field",
    "refused": "not allowed, or not possible now",
    "unknown_job": "the controller has not seen this job (yet): send the report again later",
    "rate": "more requests than `[api] rate_per_user`, averaged over ten seconds, or too many open"
    " at once ([security.md](security.md))",
    "standby": "this controller is not the active one; the line names the active one: ask that",
    "version": "a version of the protocol in which the controller does not answer this operation",
    "too_large": "the reply would be larger than 16 MiB",
    "internal": "a bug; the log has it",
}


class RequestError(SlurmElasticError):
    """A refusal: the reply `{"error": line, "code": code}`.

    Attributes:
        code: one of `CODES`.
    """

    def __init__(self, code: str, line: str) -> None:
        super().__init__(line)
        self.code = code


def answered(present: int = VERSION) -> tuple[int, ...]:
    """Return the versions that a controller of version `present` answers: it, and one older.

    A site upgrades the controller first: launchers of the release before keep running.

    >>> answered(1), answered(2)
    ((1,), (1, 2))
    """
    return tuple(range(max(1, present - 1), present + 1))


def check_version(version: object, *, release: str, since: int = 1, present: int = VERSION) -> None:
    """Refuse a request of a version that is not answered.

    Args:
        version: of the request, as it arrived.
        release: of the controller, for the message.
        since: version since which the operation has its present form.
        present: version of the controller.

    Raises:
        RequestError: with code `version`.
    """
    if type(version) is int and version in answered(present) and version >= since:
        return
    raise RequestError(
        "version",
        f"protocol {version!r:.20} is invalid: the controller ({release}) expects {present};"
        " install the same release of slurm-elastic on both sides",
    )
