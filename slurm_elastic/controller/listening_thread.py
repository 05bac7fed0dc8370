"""One listening TCP socket, served by asyncio in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Protocol

_MAX_PORT = 65535

#: Serves one connection.
Connection = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class EventLog(Protocol):
    """A structlog or logging logger; each line is one event."""

    def info(self, event: str) -> object:
        """Log an event of normal operation."""
        ...

    def warning(self, event: str) -> object:
        """Log a refusal, or a problem that may end by itself."""
        ...

    def error(self, event: str) -> object:
        """Log a problem that an administrator has to solve."""
        ...


class ListeningThread:
    """The thread.

    Args:
        name: of the thread.
        section: of the configuration that has the key `listen`, for errors.
        connection: serves each connection, on the thread.
        limit: bytes that a stream buffers.
    """

    def __init__(
        self, name: str, section: str, connection: Connection, *, limit: int = 2**16
    ) -> None:
        self._name, self._section = name, section
        self._connection, self._limit = connection, limit
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Event | None = None
        #: (host, port) as bound: the real port where 0 was configured.
        self.address: tuple[str, int] = ("", 0)

    def start(self, listen: str) -> None:
        """Listen, and return once connections are accepted.

        Args:
            listen: `HOST:PORT`.

        Raises:
            OSError: the address cannot be bound; the message names it.
        """
        try:
            host, port = split_address(listen)
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listener = socket.create_server((host, port), family=family, backlog=1024)
        except OSError as error:
            reason = error.strerror or str(error)
            line = f"[{self._section}] listen = {listen!r}: {reason}"
            raise OSError(error.errno, line) from None
        self.address = listener.getsockname()[:2]
        ready = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listener, ready)), name=self._name, daemon=True
        )
        self._thread.start()
        ready.wait()

    def stop(self) -> None:
        """Close all connections and return when the thread has ended."""
        if self._ending and self._thread:
            self.call(self._ending.set)
            self._thread.join()

    def call(self, function: Callable[[], object]) -> None:
        """Call a function on the thread, unless that has ended. Thread-safe."""
        if self._loop:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(function)

    async def _serve(self, listener: socket.socket, ready: threading.Event) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(
            self._connection, sock=listener, backlog=1024, limit=self._limit
        )
        ready.set()
        await self._ending.wait()
        self._loop.remove_reader(listener)
        for _ in range(3):  # a connection just accepted needs a server that is open
            await asyncio.sleep(0)
        server.close()
        # asyncio.run cancels the connections that are open.


def split_address(address: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`.

    Raises:
        OSError: the text is neither.
    """
    host, colon, port = address.rpartition(":")
    if not colon or not re.fullmatch("[0-9]{1,5}", port) or int(port) > _MAX_PORT:
        raise OSError(errno.EINVAL, "is not HOST:PORT, e.g. 0.0.0.0:7321")
    return host.strip("[]"), int(port)
