"""Connection between a companion's script and the esrun of its base.

The script connects by TCP. Both prove, without sending it, that they have the secret that esrun
gave to sbatch: each answers the other's nonce with an HMAC. Nothing is encrypted; what is sent is
no secret. Lines of JSON:

    script                                              esrun
    {"companion": 4711, "nonce": A}                     {"nonce": B, "proof": P("esrun")}
    {"proof": P("companion"), "place": {…}}             {"mark": …}
    {"pong": true}, {"terminated": true}                {"ping": true}, {"end": true}

A connection without a line for `SILENCE_S` counts as broken.

Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import select
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from slurm_elastic.core.errors import SlurmElasticError

#: Variables of a companion's script: hosts to try (separated by commas) and port of esrun, and
#: the secret.
HOSTS_VARIABLE = "ESRUN_COMPANION_HOSTS"
PORT_VARIABLE = "ESRUN_COMPANION_PORT"
SECRET_VARIABLE = "ESRUN_COMPANION_SECRET"  # noqa: S105 - the name of a variable

#: Seconds without a line after which a side gives the connection up, and between two pings.
SILENCE_S, PING_S = 10.0, 2.0
#: Seconds in which both sides must have proven themselves.
HANDSHAKE_S = 5.0

_MAX_LINE = 4096
_NONCE_BYTES = 16
_MAX_NODE = 255


class CompanionChannelError(SlurmElasticError):
    """The other side is gone, silent, has sent no valid line, or has not proven itself."""


class CompanionPlace(NamedTuple):
    """Node, CPUs and GPUs of a companion, from the environment of its script."""

    node: str
    cpus: int
    gpus: int

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> CompanionPlace:
        """Return the place of the batch job with this environment."""
        cpus = env.get("SLURM_JOB_CPUS_PER_NODE", "1").partition("(")[0]
        return cls(
            node=env.get("SLURMD_NODENAME", ""),
            cpus=int(cpus),
            gpus=int(env.get("SLURM_GPUS_ON_NODE", "0") or 0),
        )

    @classmethod
    def from_wire(cls, data: Any) -> CompanionPlace:
        """Check and build.

        Raises:
            CompanionChannelError: it is none.
        """
        if isinstance(data, dict):
            node, cpus, gpus = data.get("node"), data.get("cpus"), data.get("gpus")
            if isinstance(node, str) and isinstance(cpus, int) and isinstance(gpus, int):  # noqa: SIM102
                if 0 < len(node) <= _MAX_NODE and cpus >= 0 and gpus >= 0:
                    return cls(node, cpus, gpus)
        raise CompanionChannelError("the place of a companion is invalid")


class CompanionChannel:
    """One end of a connection. Lines may be sent from any thread; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sock.settimeout(SILENCE_S)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self._unread = b""

    def fileno(self) -> int:
        """Return the descriptor, for `select`."""
        return self._sock.fileno()

    def send(self, **message: Any) -> bool:
        """Send one line; return whether the system has taken it."""
        data = json.dumps(message).encode() + b"\n"
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError:
            return False
        return True

    def receive(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next line; None if there is none within this time.

        Raises:
            CompanionChannelError: the other side has closed the connection, or the line is
                invalid.
        """
        end = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            remaining_s = end - time.monotonic()
            if remaining_s < 0 or not select.select([self._sock], [], [], remaining_s)[0]:
                return None
            self.read()
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            message = json.loads(line)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            raise CompanionChannelError("an invalid line was received")
        return message

    def read(self) -> None:
        """Take what has arrived, for the next `receive`; call it when there is something.

        Raises:
            CompanionChannelError: the other side has closed the connection, or sends too much.
        """
        try:
            data = self._sock.recv(_MAX_LINE)
        except OSError as error:
            raise CompanionChannelError(f"the connection broke: {error.strerror}") from None
        if not data:
            raise CompanionChannelError("the other side has closed the connection")
        self._unread += data
        if len(self._unread) > 2 * _MAX_LINE:
            raise CompanionChannelError("a line is too long")

    def close(self) -> None:
        """Close the connection; a thread that receives gets an error."""
        with contextlib.suppress(OSError):  # the other side has closed it
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def prove_to_esrun(
    channel: CompanionChannel, secret: str, job_id: int, place: CompanionPlace
) -> str:
    """Carry out the handshake as a companion's script; return the mark of its ranks.

    Raises:
        CompanionChannelError: the other side has not proven that it is the base's esrun.
    """
    own = os.urandom(_NONCE_BYTES).hex()
    channel.send(companion=job_id, nonce=own)
    answer = _expect(channel)
    nonces = f"{job_id} {own} {_text(answer, 'nonce')}"
    _check(answer, secret, f"esrun {nonces}")
    channel.send(proof=_proof(secret, f"companion {nonces}"), place=place._asdict())
    return _text(_expect(channel), "mark")


def prove_to_companion(channel: CompanionChannel, secret: str) -> tuple[int, CompanionPlace]:
    """Carry out the handshake as esrun, but for its last line; return the companion's job id.

    Raises:
        CompanionChannelError: the other side has not proven that it is a companion.
    """
    hello = _expect(channel)
    job_id = hello.get("companion")
    if not isinstance(job_id, int) or isinstance(job_id, bool):
        raise CompanionChannelError("no job id was received")
    own = os.urandom(_NONCE_BYTES).hex()
    nonces = f"{job_id} {_text(hello, 'nonce')} {own}"
    channel.send(nonce=own, proof=_proof(secret, f"esrun {nonces}"))
    answer = _expect(channel)
    _check(answer, secret, f"companion {nonces}")
    return job_id, CompanionPlace.from_wire(answer.get("place"))


def _expect(channel: CompanionChannel) -> dict[str, Any]:
    message = channel.receive(HANDSHAKE_S)
    if message is None:
        raise CompanionChannelError("the other side does not answer")
    return message


def _text(message: Mapping[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not value.isprintable():
        raise CompanionChannelError(f"field {name} is missing")
    return value


def _proof(secret: str, text: str) -> str:
    return hmac.new(secret.encode(), text.encode(), hashlib.sha256).hexdigest()


def _check(message: Mapping[str, Any], secret: str, text: str) -> None:
    proof = _text(message, "proof")
    if not hmac.compare_digest(proof.encode(), _proof(secret, text).encode()):
        raise CompanionChannelError("the other side does not have the secret")
