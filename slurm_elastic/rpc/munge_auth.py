"""Seals by munge: the sender of a message, and that it is complete and recent.

A sealed frame is one line, the munge credential, and the body in clear. The credential's payload
is the message's purpose, its nonce and the body's SHA-256, so that

- a body may be larger than munge's limit of 1 MiB,
- a request cannot be sent back as a reply (the purpose differs),
- a reply answers exactly one request (it repeats the nonce),
- a credential is opened once per munged, within five minutes.

The seal proves the sender; nothing is encrypted.

Exceptions: `SealError`, of it `MungeError` (munged cannot be reached) and `UnsealError` (munged or
the payload refutes the message). Nothing here takes longer than `TIMEOUT_S`; libmunge itself would
wait ten seconds for a stopped munged.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import hmac
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from slurm_elastic.core.errors import SlurmElasticError

TIMEOUT_S = 4.0

#: Socket of munged; for tests and unusual sites.
SOCKET_VARIABLE = "SLURM_ELASTIC_MUNGE_SOCKET"

_DEFAULT_SOCKET = "/run/munge/munge.socket.2"
_FORMAT = "slurm-elastic-1"
_MAX_CREDENTIAL = 4096

# munge.h: options and the error codes with messages of our own
_OPT_SOCKET, _OPT_UID_RESTRICTION = 8, 9
_ERR_SOCKET, _ERR_TIMEOUT = 6, 7
_ERR_EXPIRED, _ERR_REWOUND, _ERR_REPLAYED, _ERR_UNAUTHORIZED = 15, 16, 17, 18
_REFUSALS = {
    _ERR_EXPIRED: "the message is older than five minutes: do the clocks of the nodes agree?",
    _ERR_REWOUND: "the message comes from the future: do the clocks of the nodes agree?",
    _ERR_REPLAYED: "the message was opened before: a replay",
    _ERR_UNAUTHORIZED: "the message is sealed for another user",
}

T = TypeVar("T")


class SealError(SlurmElasticError):
    """A message cannot be sealed or opened; one line."""


class MungeError(SealError):
    """munge cannot be reached."""


class UnsealError(SealError):
    """The seal is invalid, too old, or of another message."""


class SealedMessage(NamedTuple):
    """An opened message: its sender, its text, and the nonce that a reply has to repeat."""

    uid: int
    gid: int
    body: bytes
    nonce: str


def seal(body: bytes, *, purpose: str, nonce: str, uid: int | None = None) -> bytes:
    """Seal a message as the calling user.

    Args:
        body: the message.
        purpose: one word, `request` or `reply`.
        nonce: of the request; one word.
        uid: only this user can open it; None: anyone.

    Raises:
        SealError: munge does not work here.
    """
    credential = _bounded(lambda: _encode(_payload(purpose, nonce, body), uid))
    return credential.strip() + b"\n" + body


def unseal(frame: bytes, *, purpose: str, nonce: str | None = None) -> SealedMessage:
    """Open a message, once.

    Args:
        frame: what `seal` made.
        purpose: the expected one.
        nonce: the request that it must answer; None: any.

    Raises:
        MungeError: munge does not work here.
        UnsealError: forged, changed, old, opened before, or for another purpose.
    """
    line, newline, body = frame.partition(b"\n")
    if not newline or len(line) > _MAX_CREDENTIAL or not line.startswith(b"MUNGE:"):
        raise UnsealError("the message carries no munge credential")
    uid, gid, payload = _bounded(lambda: _decode(line))
    words = payload.decode("latin-1").split(" ")
    if len(words) != 4 or words[0] != _FORMAT or not payload.isascii():
        raise UnsealError("the credential was made for another program")
    if words[1] != purpose:
        raise UnsealError(f"the message is a {words[1][:20]}, not a {purpose}")
    if nonce is not None and not hmac.compare_digest(
        words[2].encode(), nonce.encode(errors="replace")
    ):
        raise UnsealError("the reply answers another request")
    if not hmac.compare_digest(payload, _payload(purpose, words[2], body)):
        raise UnsealError("the message was changed on its way")
    return SealedMessage(uid, gid, body, words[2])


def _payload(purpose: str, nonce: str, body: bytes) -> bytes:
    return f"{_FORMAT} {purpose} {nonce} {hashlib.sha256(body).hexdigest()}".encode("ascii")


def _bounded(work: Callable[[], T]) -> T:
    """Return the result of a call that may hang in C, within `TIMEOUT_S`."""
    results: list[T | SealError] = []

    def run() -> None:
        try:
            results.append(work())
        except SealError as error:
            results.append(error)

    thread = threading.Thread(target=run, name="munge", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)
    if not results:
        raise _no_answer()
    if isinstance(results[0], SealError):
        raise results[0]
    return results[0]


def _no_answer() -> MungeError:
    where = os.environ.get(SOCKET_VARIABLE) or _DEFAULT_SOCKET
    return MungeError(f"munge: socket {where} does not answer: is munged running?")


@functools.cache
def _library() -> Any:
    """Load the C library and its prototypes; None if it is missing."""
    try:
        lib = ctypes.CDLL("libmunge.so.2")
    except OSError:
        return None
    pointer = ctypes.c_void_p
    lib.munge_ctx_create.restype = pointer
    lib.munge_ctx_destroy.argtypes = [pointer]
    lib.munge_strerror.restype = ctypes.c_char_p
    lib.munge_encode.argtypes = [pointer, pointer, ctypes.c_char_p, ctypes.c_int]
    lib.munge_decode.argtypes = [ctypes.c_char_p, *[pointer] * 5]
    return lib


def _free(place: ctypes.c_char_p | ctypes.c_void_p) -> None:
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(place)


def _context(lib: Any, uid: int | None) -> ctypes.c_void_p:
    context = ctypes.c_void_p(lib.munge_ctx_create())
    path = os.environ.get(SOCKET_VARIABLE)
    if path:
        lib.munge_ctx_set(context, _OPT_SOCKET, ctypes.c_char_p(path.encode()))
    if uid is not None:
        lib.munge_ctx_set(context, _OPT_UID_RESTRICTION, ctypes.c_int(uid))
    return context


def _encode(payload: bytes, uid: int | None) -> bytes:
    lib = _library()
    if lib is None:
        restrict = [] if uid is None else [f"--restrict-uid={uid}"]
        return _command("munge", *restrict, data=payload)
    context, text = _context(lib, uid), ctypes.c_char_p()
    try:
        code = lib.munge_encode(ctypes.byref(text), context, payload, len(payload))
        if code:
            raise _error(lib, code)
        return text.value or b""
    finally:
        _free(text)
        lib.munge_ctx_destroy(context)


def _decode(credential: bytes) -> tuple[int, int, bytes]:
    lib = _library()
    if lib is None:
        return _decode_by_command(credential)
    context, data = _context(lib, None), ctypes.c_void_p()
    size, uid, gid = ctypes.c_int(), ctypes.c_uint32(), ctypes.c_uint32()
    places = [ctypes.byref(place) for place in (data, size, uid, gid)]
    try:
        code = lib.munge_decode(credential, context, *places)
        if code:
            raise _error(lib, code)
        return uid.value, gid.value, ctypes.string_at(data, size.value)
    finally:
        _free(data)
        lib.munge_ctx_destroy(context)


def _error(lib: Any, code: int) -> SealError:
    if code in (_ERR_SOCKET, _ERR_TIMEOUT):
        return _no_answer()
    words = _REFUSALS.get(code) or (lib.munge_strerror(code) or b"").decode("ascii", "replace")
    return UnsealError(f"munge: {words}")


def _command(*words: str, data: bytes) -> bytes:
    path = os.environ.get(SOCKET_VARIABLE)
    socket = [f"--socket={path}"] if path else []
    try:
        done = subprocess.run(
            [words[0], *socket, *words[1:]],
            input=data,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        raise MungeError(
            f"munge: neither libmunge.so.2 nor the command {words[0]} is installed"
        ) from None
    except subprocess.TimeoutExpired:
        raise _no_answer() from None
    stderr = done.stderr.decode("ascii", "replace").strip()
    if "munged" in stderr or "socket" in stderr.lower():
        raise _no_answer()
    if done.returncode:
        code = done.returncode
        raise UnsealError(f"munge: {_REFUSALS.get(code) or stderr or f'exit code {code}'}")
    return done.stdout


def _decode_by_command(credential: bytes) -> tuple[int, int, bytes]:
    """Parse the output of `unmunge`: fields in the order of `--keys`, a blank line, the payload."""
    text = _command("unmunge", "--keys=UID,GID", "--numeric", data=credential)
    head, _, payload = text.partition(b"\n\n")
    fields = dict(line.split(b":", 1) for line in head.splitlines() if b":" in line)
    return int(fields[b"UID"]), int(fields[b"GID"]), payload
