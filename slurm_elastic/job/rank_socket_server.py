"""esrun's end of the connection to rank 0; the other is `slurm_elastic.job.rank_socket`."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from slurm_elastic.job.rank_socket import peer_uid
from slurm_elastic.job.report_state import ReportState

#: Longest line, in bytes: room for a layer profile that is then refused as too large.
_MAX_LINE = 1 << 20
_CHUNK = 65536


class RankSocketServer:
    """Server for the training library: takes its reports, sends it the orders.

    Args:
        state: gets the reports and has the orders.
        listener: a listening socket.
        on_report: called with the fields of each report before it is taken; may change them.
        on_group: called with the fields of each line about the group of ranks, unchecked.
    """

    def __init__(
        self,
        state: ReportState,
        listener: socket.socket,
        *,
        on_report: Callable[[dict[str, Any]], None] = lambda _: None,
        on_group: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._state = state
        self._listener = listener
        self._on_report = on_report
        self._on_group = on_group
        self._companions: dict[str, int] | None = None
        self._lock = threading.Condition()
        self._peers: list[socket.socket] = []
        #: Whether a rank has ever connected.
        self.has_connected = False

    def start(self) -> None:
        """Start serving in the background."""
        threading.Thread(target=self._accept, name="local", daemon=True).start()
        self._state.subscribe(lambda _: self._push())

    def set_companions(self, companions: Mapping[str, int] | None) -> None:
        """Send the desired companions, by job id their numbers of ranks, now and with all orders.

        Without a call, and after one with None, the library does not prepare for changes in place.
        """
        with self._lock:
            self._companions = None if companions is None else dict(companions)
        self._push()

    def drain(self, timeout_s: float) -> None:
        """Wait at most this long until everything that ended ranks have sent is read."""
        with self._lock:
            self._lock.wait_for(lambda: not self._peers, timeout_s)

    def _accept(self) -> None:
        while True:
            peer, _ = self._listener.accept()
            # All users of this node can connect to an abstract socket.
            if peer_uid(peer) != os.getuid():
                peer.close()
                continue
            peer.settimeout(None)
            with self._lock:
                self._peers.append(peer)
                self.has_connected = True
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
                    self._handle_line(line)
        with self._lock:
            self._peers.remove(peer)
            peer.close()
            self._lock.notify_all()

    def _handle_line(self, line: bytes) -> None:
        try:
            message = json.loads(line)
            fields: Any = message.get("report")
            group_fields: Any = message.get("group")
        except (ValueError, AttributeError):
            return
        if isinstance(group_fields, dict):
            self._on_group(group_fields)
        if isinstance(fields, dict):
            self._on_report(fields)
            self._state.update(fields)

    def _push(self) -> None:
        with self._lock:  # so that the last message sent has the newest orders
            orders, controller = self._state.orders_and_source()
            orders = replace(orders, members=None)  # esrun carries them out
            message: dict[str, Any] = {"orders": orders.to_wire(), "controller": controller}
            if self._companions is not None:
                message["companions"] = self._companions
            line = json.dumps(message).encode() + b"\n"
            for peer in self._peers:
                # Do not wait for a stopped rank: it gets the orders when it connects again.
                with contextlib.suppress(OSError):
                    peer.sendall(line, socket.MSG_DONTWAIT)
