"""The line between a training process and the esrun that started it.

Rank 0 runs on the host of its esrun, which names a unix socket in
`SLURM_ELASTIC_SOCKET`. JSON lines go both ways: `{"report": {…}}` with some of
the fields of `slurm_elastic.core.report.Report`, and `{"orders": {…}, "controller": …}`
with one of `CONTROLLER`. A path that begins with `@` is an abstract socket, which
containers see without a bind mount; both ends check that the other runs as the
same user.

A program whose ranks all leave with exit code `AGAIN` is started again in place.

Nothing here blocks but `wait` and `first`, nothing raises, and an esrun that is gone only
means that the last orders stay as they are.

>>> link = RankSocket.connect("/nowhere") or RankSocket.offline()
>>> link.send({"phase": "training", "step": 12})
>>> link.orders().action
'run'
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from slurm_elastic.core.report import Orders, ReportError

#: Where esrun listens; set in every rank, answered only on the host of rank 0.
SOCKET_VARIABLE = "SLURM_ELASTIC_SOCKET"

#: Exit code of a program that has saved and wants to be started again in place, e.g. in another
#: layout. It means nothing to others: shells use 1, 2 and 126 on (128+n: signal n), sysexits.h
#: 64 to 78 (of which sites like 75 for Slurm's RequeueExit), timeout 124, Python itself 120.
AGAIN = 83

#: What esrun knows of its controller when it passes orders on: these are esrun's own, the
#: controller's first word is still to come; they are the controller's; there is none to be heard.
CONTROLLER = ("expected", "heard", "none")

_MAX_LINE = 65536
_CONNECT_S = 2.0


class RankSocket:
    """Sends reports to esrun and keeps the newest orders.

    Use from one thread at a time. A forked child (a data-loader worker) that
    inherits a link finds it silent: it never reads what is meant for its parent.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._orders = Orders()
        self._received = time.monotonic()
        self._controller = "expected" if sock is not None else "none"
        self._unread = b""
        self._unsent = b""
        self._fields: dict[str, Any] = {}
        if sock is not None:
            sock.setblocking(False)

    @classmethod
    def connect(cls, path: str | None = None) -> RankSocket | None:
        """Join the esrun named by `path`, by default the environment's.

        Returns:
            None when there is none, it does not answer, or it runs as another user.
        """
        path = path or os.environ.get(SOCKET_VARIABLE, "")
        if not path:
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(socket_address(path))
            if peer_uid(sock) != os.getuid():
                sock.close()
                return None
        except OSError:
            sock.close()
            return None
        return cls(sock)

    @classmethod
    def offline(cls) -> RankSocket:
        """A link to nobody: swallows reports, its orders stay `run`."""
        return cls(None)

    @property
    def connected(self) -> bool:
        """Whether esrun was there when last looked at, and this is the process that joined it."""
        return self._sock is not None and self._pid == os.getpid()

    @property
    def controlled(self) -> bool:
        """Whether esrun is there and hears a controller, or expects to."""
        return self.connected and self._controller != "none"

    def send(self, report_fields: dict[str, Any]) -> None:
        """Report some fields; the rest stays as last reported, None clears one.

        What does not fit into the socket's buffer is sent, merged, by the next call of any
        method, so that a stopped esrun costs intermediate values and never a wait.
        """
        if not self.connected:
            return
        self._fields.update(report_fields)
        self._flush()

    def orders(self) -> Orders:
        """The newest orders, without waiting (a few microseconds)."""
        if self.connected:
            if self._unsent or self._fields:
                self._flush()
            self._read()
        return self._orders

    def deadline_left(self) -> float | None:
        """Seconds until the deadline of the present orders; None when they have none."""
        if self._orders.deadline_s is None:
            return None
        return self._received + self._orders.deadline_s - time.monotonic()

    def wait(self, timeout: float) -> Orders:
        """Orders that differ from the last ones asked for; after `timeout` seconds the same.

        Returns at once with the present orders when esrun is gone: check `connected`.
        """
        before = self._orders
        self._wait_while(lambda: self._orders is before, timeout)
        return self._orders

    def first(self, timeout_s: float) -> Orders:
        """The controller's orders for an attempt that begins.

        Waits, at most so many seconds, until esrun has heard its controller for the first time;
        returns at once when it has, when it has none or cannot reach it, and without an esrun.
        """
        self._wait_while(lambda: self._controller == "expected", timeout_s)
        return self._orders

    def close(self) -> None:
        """Leave; esrun sees the end of this process's reports."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _wait_while(self, true: Callable[[], bool], timeout_s: float) -> None:
        self.orders()
        end = time.monotonic() + timeout_s
        while true() and self.connected and self._sock is not None:
            left = end - time.monotonic()
            if left <= 0:
                break
            poller = select.poll()
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poller.poll(left * 1000)
            self.orders()

    def _flush(self) -> None:
        self._pack()
        while self._unsent and self._sock is not None:
            try:
                sent = self._sock.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self.close()
                return
            self._unsent = self._unsent[sent:]
            self._pack()

    def _pack(self) -> None:
        if self._fields and not self._unsent:
            # float: what a training loop measured may be a tensor of one element.
            self._unsent = json.dumps({"report": self._fields}, default=float).encode() + b"\n"
            self._fields = {}

    def _read(self) -> None:
        while self._sock is not None:
            try:
                data = self._sock.recv(_MAX_LINE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.close()
                return
            *lines, self._unread = (self._unread + data).split(b"\n")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        # A newer esrun may say what this library does not know: better ignored than fatal.
        with contextlib.suppress(ValueError, KeyError, TypeError, ReportError):
            message = json.loads(line)
            orders = Orders.from_wire(message["orders"])
            # An older esrun does not say; what it passes on is all that there will be for a while.
            known = message.get("controller")
            self._controller = known if known in CONTROLLER else "heard"
            self._received = time.monotonic()
            if orders != self._orders:
                self._orders = orders


def socket_address(path: str) -> str:
    """The address for bind and connect: a leading `@` means Linux's abstract names."""
    return "\0" + path[1:] if path.startswith("@") else path


def peer_uid(sock: socket.socket) -> int:
    """Unix user of the process at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
