"""Requests to the controller and their replies: JSON, sealed by munge, over TCP.

One connection carries one request and one reply. Each is a frame: four bytes of length
(big-endian, without these four), then the JSON object as sealed by `munge_auth.seal`. A request
has the purpose `request` and a random nonce; the reply has the purpose `reply` and the same nonce.
`{"error": "…"}` is a refusal.

Replies are accepted from root, the controller's account and the caller's own user, so that no
other user of the cluster can pretend to be the controller and stop jobs. (The own user can stop
the job anyway, and may test a controller.)

One of several controllers is active; the others refuse with the code `standby`, and `call` tries
the next.

Clients (esrun, the command line) use `call`; the server uses `frame_size`, `decode` and `encode`.

Exceptions, all `ChannelError`: `ControllerUnreachableError` (no answer, or not in time),
`ControllerUntrustedError` (the seal or its owner is wrong), `RequestRejectedError` (refused).
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.rpc import munge_auth
from slurm_elastic.rpc.protocol import MAX_REPLY, MAX_REQUEST

#: Address of the controller; overrides the site's configuration.
ADDRESS_VARIABLE = "SLURM_ELASTIC_CONTROLLER"
CONFIGURATION = Path("/etc/slurm-elastic/elastic.toml")
DEFAULT_PORT = 7321

#: Seconds for a connection when there is another address to try.
_CONNECT_S = 5.0
#: Configured addresses → the one that was active last.
_active: dict[str, str] = {}

_HEADER = struct.Struct("!I")


class ChannelError(SlurmElasticError):
    """The controller cannot be used; the message is one line."""


class ConfigurationReadError(ChannelError):
    """The site's configuration cannot be read by this Python."""


class ControllerUnreachableError(ChannelError):
    """No answer, or not in time."""


class ControllerUntrustedError(ChannelError):
    """The answer is not from the controller, or munge cannot prove that it is."""


class RequestRejectedError(ChannelError):
    """A refusal by the controller; `code` is one of `protocol.CODES`, or ""."""

    def __init__(self, reason: str, code: str = "") -> None:
        super().__init__(reason)
        self.code = code


class Message(NamedTuple):
    """An opened frame: the sender, the JSON object, and the nonce that a reply has to repeat."""

    uid: int
    gid: int
    content: dict[str, Any]
    nonce: str


def call(address: str, request: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
    """Send a request to the controller and return its answer.

    Args:
        address: `host:port`; of several, separated by commas, the active one is used; the one
            that was active last is tried first.
        request: of `requests.build`.
        timeout_s: for everything, the wait of a long poll included; for each address anew.

    Raises:
        ChannelError: no answer, one that cannot be trusted, or a refusal.
    """
    candidates = addresses(address)
    if len(candidates) == 1:
        return _call(candidates[0], request, timeout_s=timeout_s, connect_s=timeout_s)
    failures = []
    for candidate in sorted(candidates, key=lambda a: a != _active.get(address)):
        try:
            reply = _call(
                candidate, request, timeout_s=timeout_s, connect_s=min(timeout_s, _CONNECT_S)
            )
        except RequestRejectedError as error:
            if error.code != "standby":
                _active[address] = candidate
                raise
            failures.append(f"{candidate}: {error}")
        except (ControllerUnreachableError, ControllerUntrustedError) as error:
            failures.append(str(error).removeprefix("controller "))
        else:
            _active[address] = candidate
            return reply
    raise ControllerUnreachableError(f"controller {address}: {'; '.join(failures)}")


def _call(
    address: str, request: dict[str, Any], *, timeout_s: float, connect_s: float
) -> dict[str, Any]:
    end = time.monotonic() + timeout_s
    nonce = os.urandom(16).hex()
    try:
        frame = encode(request, purpose="request", nonce=nonce, limit=MAX_REQUEST)
        with socket.create_connection(parse_address(address), timeout=connect_s) as sock:
            sock.sendall(frame)
            answer = read_frame(_receiver(sock, end), limit=MAX_REPLY)
        reply = decode(answer, purpose="reply", nonce=nonce)
    except munge_auth.SealError as error:
        raise ControllerUntrustedError(f"controller {address}: {error}") from None
    except (EOFError, OSError) as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ControllerUnreachableError(f"controller {address}: {reason}") from None
    if reply.uid not in trusted_uids():
        raise ControllerUntrustedError(
            f"controller {address}: uid {reply.uid} answers, which is not its account"
        )
    if "error" in reply.content:
        code = str(reply.content.get("code", ""))
        raise RequestRejectedError(str(reply.content["error"])[:1000], code)
    return reply.content


def controller_address() -> str | None:
    """Return the configured address of the controller; None: jobs run without one.

    Raises:
        ConfigurationReadError: there is a configuration, and no package that reads it.
    """
    from_environment = os.environ.get(ADDRESS_VARIABLE)
    return from_environment or _configured().get("controller") or None


def addresses(text: str) -> tuple[str, ...]:
    """Return the addresses in a text that separates them by commas."""
    return tuple(a.strip() for a in text.split(",") if a.strip()) or (text,)


def trusted_uids() -> set[int]:
    """Return the uids whose replies are accepted."""
    uids = {0, os.getuid()}
    try:
        user = _configured().get("user", "selastic")
    except ConfigurationReadError:
        user = "selastic"
    with contextlib.suppress(KeyError):  # without the account it can only be root's
        uids.add(pwd.getpwnam(user).pw_uid)
    return uids


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host`, `host:port` or `[ipv6]:port`.

    Raises:
        ControllerUnreachableError: it is none of them.
    """
    host, colon, port = address.rpartition(":")
    if not colon or (address.count(":") > 1 and not host.endswith("]")):
        host, port = address, str(DEFAULT_PORT)
    host = host.strip("[]")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ControllerUnreachableError(f"controller {address[:100]!r}: write HOST:PORT")
    return host, int(port)


def encode(
    content: dict[str, Any], *, purpose: str, nonce: str, limit: int, uid: int | None = None
) -> bytes:
    """Return a whole frame, ready to send.

    Raises:
        ChannelError: it would be larger than `limit`.
        munge_auth.SealError: munge does not work here.
    """
    body = json.dumps(content, separators=(",", ":")).encode()
    frame = munge_auth.seal(body, purpose=purpose, nonce=nonce, uid=uid)
    if len(frame) > limit:
        raise ChannelError(f"the {purpose} has {len(frame)} bytes, more than {limit}")
    return _HEADER.pack(len(frame)) + frame


def decode(frame: bytes, *, purpose: str, nonce: str | None = None) -> Message:
    """Open a frame (without its length) and read its JSON.

    Raises:
        munge_auth.SealError: see `munge_auth.unseal`; or the body is no JSON object.
    """
    sealed = munge_auth.unseal(frame, purpose=purpose, nonce=nonce)
    try:
        content = json.loads(sealed.body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise munge_auth.UnsealError(f"the {purpose} is not a JSON object")
    return Message(sealed.uid, sealed.gid, content, sealed.nonce)


#: Bytes of the length before a frame.
HEADER_SIZE = _HEADER.size


def frame_size(header: bytes, *, limit: int) -> int:
    """Return the number of bytes that follow this header.

    Raises:
        EOFError: more than `limit`, or an incomplete header: the connection cannot be used.
    """
    if len(header) != HEADER_SIZE:
        raise EOFError("the connection was closed before a message")
    (size,) = _HEADER.unpack(header)
    if size > limit:
        raise EOFError(f"a message of {size} bytes is announced, more than {limit}")
    return int(size)


def read_frame(receive: Callable[[int], bytes], *, limit: int) -> bytes:
    """Read one frame with a function like `socket.recv`.

    Raises:
        EOFError: the connection ends before, or the frame is too large.
    """
    return _exactly(receive, frame_size(_exactly(receive, HEADER_SIZE), limit=limit))


def _exactly(receive: Callable[[int], bytes], size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = receive(min(size - len(data), 65536))
        if not part:
            raise EOFError("the connection was closed early")
        data += part
    return bytes(data)


def _receiver(sock: socket.socket, end: float) -> Callable[[int], bytes]:
    """Return `sock.recv` with one deadline for all calls together."""

    def receive(size: int) -> bytes:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left)
        return sock.recv(size)

    return receive


def _configured() -> dict[str, Any]:
    """Return the site's `[api]`; {} if it cannot be read, as no job may fail because of it.

    Raises:
        ConfigurationReadError: see `controller_address`.
    """
    try:
        section = _read_toml(CONFIGURATION.read_text(encoding="utf-8")).get("api")
    except (OSError, ValueError):
        return {}
    except ModuleNotFoundError:
        version = ".".join(map(str, sys.version_info[:2]))
        raise ConfigurationReadError(
            f"{CONFIGURATION}: not read: Python {version} needs the package tomli;"
            f" {sys.executable} -m pip install tomli"
        ) from None
    return section if isinstance(section, dict) else {}


def _read_toml(text: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib  # noqa: PLC0415 - as the other one
    else:
        import tomli as tomllib  # noqa: PLC0415 - may be missing (pip install --no-deps)
    content: dict[str, Any] = tomllib.loads(text)
    return content
