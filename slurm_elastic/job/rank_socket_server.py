"""esrun's end of the line to rank 0; the other end is `slurm_elastic.job.rank_socket`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable
from typing import Any

from slurm_elastic.job.rank_socket import peer_uid
from slurm_elastic.job.report_state import ReportState

#: A profile with long names may have this much, and is then left out with a word.
_MAX_LINE = 1 << 20
_CHUNK = 65536


class RankSocketServer:
    """Hands the library's reports to the desk and the desk's orders to the library.

    Args:
        desk: the job's.
        listener: bound and listening.
        joined: called once a library is there.
    """

    def __init__(
        self,
        desk: ReportState,
        listener: socket.socket,
        *,
        joined: Callable[[], None] = lambda: None,
    ) -> None:
        self._desk = desk
        self._listener = listener
        self._joined = joined
        self._lock = threading.Condition()
        self._peers: list[socket.socket] = []
        #: Whether a library has ever been there.
        self.met = False

    def start(self) -> None:
        """Begin, in the background."""
        threading.Thread(target=self._accept, name="local", daemon=True).start()
        self._desk.subscribe(lambda _: self._push())

    def settle(self, timeout_s: float) -> None:
        """Wait, at most so long, until all is read that ended ranks have sent."""
        with self._lock:
            self._lock.wait_for(lambda: not self._peers, timeout_s)

    def _accept(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            # An abstract name can be called by anybody on this node.
            if peer_uid(peer) != os.getuid():
                peer.close()
                continue
            peer.settimeout(None)
            with self._lock:
                self._peers.append(peer)
                self.met = True
            threading.Thread(target=self._serve, args=(peer,), name="rank 0", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        self._push()
        unread = b""
        with contextlib.suppress(OSError):
            while data := peer.recv(_CHUNK):
                *lines, unread = (unread + data).split(b"\n")
                if len(unread) > _MAX_LINE:
                    break
                for line in lines:
                    self._take(line)
        with self._lock:
            self._peers.remove(peer)
            peer.close()
            self._lock.notify_all()

    def _take(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            fields: Any = message["report"]
        except (ValueError, KeyError, TypeError):
            return
        if isinstance(fields, dict):
            self._joined()
            self._desk.tell(fields)

    def _push(self) -> None:
        with self._lock:  # whoever sends last sends the newest
            orders, controller = self._desk.news()
            message = {"orders": orders.to_wire(), "controller": controller}
            line = json.dumps(message).encode() + b"\n"
            for peer in self._peers:
                # A stopped rank must not stop esrun; it asks for the orders by reconnecting.
                with contextlib.suppress(OSError):
                    peer.sendall(line, socket.MSG_DONTWAIT)
