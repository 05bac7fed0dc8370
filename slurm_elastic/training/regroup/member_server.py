"""Messages between rank 0 and the other members, beside the process group: rank 0's end.

Lines of JSON over TCP, one connection per member. A connection that ends is a member that is lost:
the kernel closes it when the process dies, and after `SILENCE_S` when the network is cut. It does
so by keepalive probes, which a busy interpreter cannot delay.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import selectors
import socket
import threading
from collections.abc import Callable, Iterable
from typing import Any

#: A peer whose host answers no probe for so long is lost.
SILENCE_S = 5
_MAX_LINE = 1 << 20
_CHUNK = 65536
_SEND_S = 2.0

Handler = Callable[[str, dict[str, Any]], None]


class MemberServer:
    """Connections of the other members to rank 0.

    Args:
        token: shown by every member; others are disconnected.
        on_message: called with a member's name and its message, in the server's thread; its
            first message is `{"hello": name}`.
        on_loss: called with the name of a member whose connection has ended.

    Attributes:
        port: on all interfaces of this host.
    """

    def __init__(self, token: str, *, on_message: Handler, on_loss: Callable[[str], None]) -> None:
        self._token = token
        self._on_message, self._on_loss = on_message, on_loss
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self._listener = socket.create_server(
            ("", 0), family=family, backlog=128, dualstack_ipv6=both
        )
        self.port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._lock = threading.Lock()
        self._peers: dict[str, socket.socket] = {}
        self._names: dict[socket.socket, str] = {}
        self._unread: dict[socket.socket, bytes] = {}
        threading.Thread(target=self._serve, name="members", daemon=True).start()

    def send(self, members: Iterable[str], message: dict[str, Any]) -> None:
        """Send a message to these members; those that are not connected are passed over."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock:
            for peer in [self._peers[m] for m in members if m in self._peers]:
                # The server's thread reads the end of a connection that has failed.
                with contextlib.suppress(OSError):
                    peer.sendall(line)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._listener:
                    self._accept()
                else:
                    self._read(sock)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            peer, _ = self._listener.accept()
            watch_for_silence(peer)
            peer.settimeout(_SEND_S)
            self._unread[peer] = b""
            self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        try:
            data = peer.recv(_CHUNK)
        except TimeoutError:
            return
        except OSError:
            data = b""
        *lines, unread = (self._unread[peer] + data).split(b"\n")
        self._unread[peer] = unread
        if not data or len(unread) > _MAX_LINE:
            self._drop(peer)
            return
        for line in lines:
            if not self._handle(peer, line):
                self._drop(peer)
                return

    def _handle(self, peer: socket.socket, line: bytes) -> bool:
        """Handle one line; return False if the peer is none of this training's members."""
        try:
            message = json.loads(line)
        except ValueError:
            return False
        if not isinstance(message, dict):
            return False
        name = self._names.get(peer)
        if name is None:
            name, token = str(message.get("hello", "")), str(message.get("token", ""))
            if not hmac.compare_digest(token.encode(), self._token.encode()):
                return False
            with self._lock:
                if not name or name in self._peers:
                    return False
                self._names[peer], self._peers[name] = name, peer
        self._on_message(name, message)
        return True

    def _drop(self, peer: socket.socket) -> None:
        self._selector.unregister(peer)
        with self._lock:
            name = self._names.pop(peer, None)
            if name is not None:
                del self._peers[name]
            del self._unread[peer]
            peer.close()
        if name is not None:
            self._on_loss(name)


def watch_for_silence(sock: socket.socket) -> None:
    """Let the kernel end a connection whose other host is silent for `SILENCE_S`."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SILENCE_S - 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
