"""Connection between a training process and the esrun that started it.

Rank 0 runs on the host of its esrun, which names a unix socket in `SLURM_ELASTIC_SOCKET`. Both
send lines of JSON: `{"report": {…}}` with some of the fields of
`slurm_elastic.core.report.Report`, and `{"orders": {…}, "controller": …}` with one of
`CONTROLLER`. A path that begins with `@` is an abstract socket, which containers reach without a
bind mount; both ends check that the other runs as the same user.

For changes in place esrun adds `"companions": {"4711": 2}` to the orders: the companion jobs that
belong to the training from now on, and how many ranks each has. Rank 0 answers with lines of
`{"group": {…}}`:

    can, port       once: ranks may join at this port of rank 0's host
    can, why        or that they may not, and the code of the reason
    generation, companions, step, pause_s, lost
                    after each change: its number, the companions that now belong to it, the step
                    after which it took effect, how long training stood still, and the companions
                    that left without an order
    dropped, why    the number of a change that was given up; training goes on as it was

A program whose ranks all exit with `RESTART_CODE` is started again in place.

Only `wait`, `first` and `read_companions` block, nothing raises, and without esrun the last orders
stay in force.

>>> link = RankSocket.connect("/nowhere") or RankSocket.offline()
>>> link.send({"phase": "training", "step": 12})
>>> link.orders().action
'run'
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from slurm_elastic.core.report import Orders
from slurm_elastic.core.report_fields import ReportError

#: Address of esrun's socket; set in all ranks, reachable on the host of rank 0 only.
SOCKET_VARIABLE = "SLURM_ELASTIC_SOCKET"

#: Id of a companion job, in its ranks, which join the training of another job. They find the store
#: of its rank 0 at `MASTER_ADDR` and `MASTER_PORT`.
JOIN_VARIABLE = "SLURM_ELASTIC_JOIN"

#: Exit code of a program that has saved and is to be started again in place, e.g. in another
#: layout. Not used by others: shells use 1, 2 and from 126 on (128+n: signal n), sysexits.h 64 to
#: 78 (75 is a common RequeueExit of Slurm), timeout 124, Python 120.
RESTART_CODE = 83

#: Source of the orders: esrun's defaults while the controller's first answer is awaited; the
#: controller; esrun's defaults, as no controller is configured or reachable.
CONTROLLER = ("expected", "heard", "none")

_MAX_LINE = 65536
_CONNECT_S = 2.0


class RankSocket:
    """A rank's end of the connection: sends reports, keeps the newest orders.

    To be used from one thread at a time. In a forked child (a data-loader worker) it is not
    connected, so that the child does not read its parent's orders.
    """

    def __init__(self, sock: socket.socket | None) -> None:
        self._sock = sock
        self._pid = os.getpid()
        self._orders = Orders()
        self._controller = "expected" if sock is not None else "none"
        self._has_message = False
        self._unread = b""
        self._unsent = b""
        self._fields: dict[str, Any] = {}
        self._group_lines = b""
        #: Desired companions and their numbers of ranks; None: of an esrun that cannot have any.
        self.companions: dict[str, int] | None = None
        if sock is not None:
            sock.setblocking(False)

    @classmethod
    def connect(cls, path: str | None = None) -> RankSocket | None:
        """Connect to the esrun at `path`, by default that of the environment.

        Returns:
            The connection; None without esrun, if it does not answer, or runs as another user. If
            the environment names it, a line on stderr says so.
        """
        stated = os.environ.get(SOCKET_VARIABLE, "")
        if not (path or stated):
            return None
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(_CONNECT_S)
            sock.connect(socket_address(path or stated))
            if peer_uid(sock) != os.getuid():
                raise PermissionError(errno.EPERM, "it runs as another user")
        except OSError as error:
            sock.close()
            if not path:
                sys.stderr.write(
                    f"slurm-elastic: esrun is not reached: {error.strerror or error}; the job is"
                    " not resized; a container needs the host's network and the user's own uid\n"
                )
            return None
        return cls(sock)

    @classmethod
    def offline(cls) -> RankSocket:
        """Return one without a connection: reports are discarded, the orders stay `run`."""
        return cls(None)

    @property
    def connected(self) -> bool:
        """Whether the connection was open at its last use, in the process that opened it."""
        return self._sock is not None and self._pid == os.getpid()

    @property
    def controlled(self) -> bool:
        """Whether esrun is connected, and has a controller or awaits its first answer."""
        return self.connected and self._controller != "none"

    def send(self, report_fields: dict[str, Any]) -> None:
        """Report some fields; None clears one, all others stay as last reported.

        Never waits: fields that do not fit into the socket's buffer are merged, and sent by the
        next call of any method.
        """
        if not self.connected:
            return
        self._fields.update(report_fields)
        self._flush()

    def send_group(self, fields: dict[str, Any]) -> None:
        """Send a line about the group of ranks; lines are sent in their order and never merged."""
        if self.connected:
            self._group_lines += _line("group", fields)
            self._flush()

    def orders(self) -> Orders:
        """Return the newest orders without waiting (a few microseconds)."""
        if self.connected:
            if self._unsent or self._fields or self._group_lines:
                self._flush()
            self._read()
        return self._orders

    def wait(self, timeout: float) -> Orders:
        """Wait for orders that differ from the last ones; return the same after `timeout` seconds.

        Returns the current orders at once if esrun is not connected: check `connected`.
        """
        old_orders = self._orders
        self._wait_while(lambda: self._orders is old_orders, timeout)
        return self._orders

    def first(self, timeout_s: float) -> Orders:
        """Return the orders for an attempt that begins.

        Waits at most `timeout_s` seconds for the controller's first answer to esrun. Returns at
        once if that has come, without a controller that can be reached, and without esrun.
        """
        self._wait_while(lambda: self._controller == "expected", timeout_s)
        return self._orders

    def read_companions(self, timeout_s: float) -> dict[str, int] | None:
        """Return the newest `companions`.

        Waits at most `timeout_s` seconds for the first message, which esrun sends to each rank that
        connects: on a busy host it may come later than the training's first step.
        """
        self._wait_while(lambda: not self._has_message, timeout_s)
        return self.companions

    def close(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _wait_while(self, condition: Callable[[], bool], timeout_s: float) -> None:
        self.orders()
        end = time.monotonic() + timeout_s
        while condition() and self.connected and self._sock is not None:
            remaining_s = end - time.monotonic()
            if remaining_s <= 0:
                break
            poller = select.poll()
            poller.register(self._sock, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            poller.poll(remaining_s * 1000)
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
        if self._unsent:
            return
        self._unsent, self._group_lines = self._group_lines, b""
        if self._fields:
            self._unsent += _line("report", self._fields)
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
                self._handle_line(line)

    def _handle_line(self, line: bytes) -> None:
        # A newer esrun may send what this library does not know: ignore it.
        with contextlib.suppress(ValueError, KeyError, TypeError, ReportError):
            message = json.loads(line)
            orders = Orders.from_wire(message["orders"])
            self.companions = _companions(message.get("companions"))
            self._has_message = True
            # An older esrun sends no source: do not wait for other orders.
            source = message.get("controller")
            self._controller = source if source in CONTROLLER else "heard"
            if orders != self._orders:
                self._orders = orders


def _line(name: str, fields: dict[str, Any]) -> bytes:
    # float: values of a training loop may be tensors of one element.
    return json.dumps({name: fields}, default=float).encode() + b"\n"


def _companions(stated: Any) -> dict[str, int] | None:
    """Return the companions of a message, without what is not a number of ranks."""
    if not isinstance(stated, dict):
        return None
    return {k: n for k, n in stated.items() if k.isdecimal() and type(n) is int and n > 0}


def socket_address(path: str) -> str:
    """Return the address for bind and connect: a leading `@` stands for an abstract socket."""
    return "\0" + path[1:] if path.startswith("@") else path


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)
