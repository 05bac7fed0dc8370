"""Messages between rank 0 and the other members, beside the process group: a member's end."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from typing import Any

from slurm_elastic.training.regroup.member_server import watch_for_silence

_CONNECT_S = 30.0
_CHUNK = 65536


class MemberLink:
    """Connection of a member to rank 0.

    Args:
        address: host and port of `MemberServer`.
        token: of this attempt.
        name: of the member.
        on_message: called with each message, in the link's thread.
        on_end: called when rank 0 has ended or is not reached for `SILENCE_S`.

    Raises:
        OSError: rank 0 is not reached.
    """

    def __init__(
        self,
        address: tuple[str, int],
        *,
        token: str,
        name: str,
        on_message: Callable[[dict[str, Any]], None],
        on_end: Callable[[], None],
    ) -> None:
        self._on_message, self._on_end = on_message, on_end
        self._lock = threading.Lock()
        self._sock = socket.create_connection(address, timeout=_CONNECT_S)
        self._sock.settimeout(None)
        watch_for_silence(self._sock)
        self.send({"hello": name, "token": token})
        threading.Thread(target=self._receive, name="member", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; if rank 0 has ended, `on_end` is called anyway."""
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        """End the connection, as the end of this process would."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _receive(self) -> None:
        unread = b""
        with contextlib.suppress(OSError):
            while data := self._sock.recv(_CHUNK):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    self._on_message(json.loads(line))
        self._sock.close()
        self._on_end()
