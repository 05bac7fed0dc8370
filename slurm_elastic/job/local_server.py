"""esrun's end of the line to rank 0; the other end is `slurm_elastic.job.local`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from slurm_elastic.job.desk import Desk
from slurm_elastic.job.local import peer_uid
from slurm_elastic.report import Orders

_MAX_LINE = 65536
_SEND_S = 2.0


class LocalServer:
    """Hands the library's reports to the desk and the desk's orders to the library.

    Args:
        desk: the job's.
        listener: bound and listening.
        joined: called once a library is there.
    """

    def __init__(
        self, desk: Desk, listener: socket.socket, *, joined: Callable[[], None] = lambda: None
    ) -> None:
        self._desk = desk
        self._listener = listener
        self._joined = joined
        self._lock = threading.Lock()
        self._peers: list[socket.socket] = []

    def start(self) -> None:
        """Begin, in the background."""
        threading.Thread(target=self._accept, name="local", daemon=True).start()
        self._desk.subscribe(self._push)

    def _accept(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            # An abstract name can be called by anybody on this node.
            if peer_uid(peer) != os.getuid():
                peer.close()
                continue
            peer.settimeout(None)
            threading.Thread(target=self._serve, args=(peer,), name="rank 0", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with self._lock:
            self._peers.append(peer)
        self._push(self._desk.orders())
        unread = b""
        with contextlib.suppress(OSError):
            while data := peer.recv(_MAX_LINE):
                *lines, unread = (unread + data).split(b"\n")
                if len(unread) > _MAX_LINE:
                    break
                for line in lines:
                    self._take(line)
        with self._lock:
            self._peers.remove(peer)
            peer.close()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            fields: Any = message["report"]
        except (ValueError, KeyError, TypeError):
            return
        if isinstance(fields, dict):
            self._joined()
            self._desk.tell(fields)

    def _push(self, orders: Orders) -> None:
        line = json.dumps({"orders": orders.to_wire()}).encode() + b"\n"
        with self._lock:
            for peer in self._peers:
                # A stopped rank must not stop esrun; it asks for the orders by reconnecting.
                with contextlib.suppress(OSError):
                    peer.sendall(line, socket.MSG_DONTWAIT)
