"""esrun's end of the connections to the scripts of companions.

It listens on all interfaces, as companions run on other nodes. A peer that does not prove within
`HANDSHAKE_S` that it has the secret is disconnected; the number of connections is limited.

Standard library only.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Collection
from typing import Protocol

from slurm_elastic.job.companions.companion_channel import (
    PING_S,
    SILENCE_S,
    CompanionChannel,
    CompanionChannelError,
    CompanionPlace,
    prove_to_companion,
)

#: Most connections at a time.
_MAX_PEERS = 128


class CompanionListener(Protocol):
    """Receiver of events of companions; called from any thread."""

    def admit(self, job_id: int) -> str | None:
        """Return the mark of a companion's ranks; None if it does not belong to this attempt."""

    def on_connected(self, job_id: int, place: CompanionPlace) -> None:
        """Handle a companion whose script has proven itself: its job runs."""

    def on_terminated(self, job_id: int) -> None:
        """Handle a companion that Slurm ends: its script has got SIGTERM."""

    def on_disconnected(self, job_id: int, reason: str) -> None:
        """Handle a companion whose script is gone, or silent."""


class CompanionServer:
    """Server for the scripts of the companions of one job.

    Args:
        listener: receives the events.

    Attributes:
        secret: sent by companions to authenticate themselves.
        port: port on which it listens.
    """

    def __init__(self, listener: CompanionListener) -> None:
        self.secret = secrets.token_hex(32)
        self._listener = listener
        self._socket = _listening_socket()
        self.port: int = self._socket.getsockname()[1]
        self._lock = threading.Condition()
        self._peers = 0
        self._channels: dict[int, CompanionChannel] = {}
        self._heard: dict[int, float] = {}
        threading.Thread(target=self._accept, name="companions", daemon=True).start()

    def is_connected(self, job_id: int) -> bool:
        """Return whether the script of a companion is connected."""
        with self._lock:
            return job_id in self._channels

    def end(self, job_id: int) -> bool:
        """Order a companion to end its ranks and itself; return whether it is connected."""
        with self._lock:
            channel = self._channels.get(job_id)
        return channel is not None and channel.send(end=True)

    def wait_until_ended(self, timeout_s: float) -> bool:
        """Wait at most this long until no companion is connected; return whether that is so."""
        with self._lock:
            return self._lock.wait_for(lambda: not self._channels, timeout_s)

    def confirm(self, job_ids: Collection[int]) -> None:
        """Wait until each of these companions has answered once more, or is not connected."""
        since = time.monotonic()
        with self._lock:
            self._lock.wait_for(
                lambda: all(
                    i not in self._channels or self._heard.get(i, 0.0) > since for i in job_ids
                ),
                SILENCE_S + PING_S,
            )

    def close(self) -> None:
        """Stop listening, and close all connections: companions that are connected end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        with self._lock:
            channels = list(self._channels.values())
        for channel in channels:
            channel.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._socket.accept()
            except OSError:
                return
            with self._lock:
                admitted = self._peers < _MAX_PEERS
                self._peers += admitted
            if not admitted:
                sock.close()
                continue
            threading.Thread(
                target=self._serve, args=(sock,), name="companion", daemon=True
            ).start()

    def _serve(self, sock: socket.socket) -> None:
        job_id, reason = None, ""
        try:
            channel = CompanionChannel(sock)
            job_id, place = self._handshake(channel)
            self._listener.on_connected(job_id, place)
            self._follow(channel, job_id)
        except (CompanionChannelError, OSError) as error:
            reason = str(error)
        finally:
            sock.close()
            with self._lock:
                self._peers -= 1
                if job_id is not None:
                    del self._channels[job_id]
                self._lock.notify_all()
        if job_id is not None:
            self._listener.on_disconnected(job_id, reason)

    def _handshake(self, channel: CompanionChannel) -> tuple[int, CompanionPlace]:
        job_id, place = prove_to_companion(channel, self.secret)
        mark = self._listener.admit(job_id)
        with self._lock:
            if mark is None or job_id in self._channels:
                raise CompanionChannelError(f"companion {job_id} is not one of this attempt")
            self._channels[job_id] = channel
        channel.send(mark=mark)
        return job_id, place

    def _follow(self, channel: CompanionChannel, job_id: int) -> None:
        """Ping and listen until the connection ends, which raises `CompanionChannelError`."""
        heard = pinged = time.monotonic()
        while True:
            message = channel.receive(PING_S)
            now = time.monotonic()
            if message is not None:
                heard = now
                with self._lock:
                    self._heard[job_id] = now
                    self._lock.notify_all()
                if message.get("terminated"):
                    self._listener.on_terminated(job_id)
            if now > heard + SILENCE_S:
                raise CompanionChannelError(f"it has been silent for {SILENCE_S:.0f} s")
            if now >= pinged + PING_S:
                pinged = now
                channel.send(ping=True)


def _listening_socket() -> socket.socket:
    """Return a socket that listens on all interfaces, with IPv6 if this host has it."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_MAX_PEERS
            )
    return socket.create_server(("", 0), backlog=_MAX_PEERS)
