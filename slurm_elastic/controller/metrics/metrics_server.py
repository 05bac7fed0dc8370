"""HTTP server of `/metrics`, in a thread of its own.

All input is hostile: a request has 8 KiB and five seconds, and of too many connections the oldest
is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from slurm_elastic.controller.listening_thread import EventLog, ListeningThread

#: Seconds for a request, and for its answer; bytes of a request; open connections.
IO_TIMEOUT_S, _MAX_REQUEST, _MAX_CONNECTIONS = 5.0, 8192, 32

#: Returns content type and text by the Accept header.
Render = Callable[[str], tuple[str, bytes]]


class MetricsServer:
    """The server.

    Args:
        listen: `HOST:PORT`.
        render: makes the answer; called on the thread of the server.
        log: receives errors.
    """

    def __init__(self, listen: str, render: Render, log: EventLog) -> None:
        self._listen, self._render, self._log = listen, render, log
        self._thread = ListeningThread(
            "selastic-metrics", "metrics", self._connection, limit=_MAX_REQUEST
        )
        self._open: dict[asyncio.StreamWriter, None] = {}
        self._failed = False

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) as bound."""
        return self._thread.address

    def start(self) -> None:
        """Listen, and return once scrapes are answered.

        Raises:
            OSError: the address cannot be bound; the message names it.
        """
        self._thread.start(self._listen)

    def stop(self) -> None:
        """Close all connections and return when the thread has ended."""
        self._thread.stop()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MAX_CONNECTIONS:
            oldest = next(iter(self._open))
            del self._open[oldest]
            oldest.transport.abort()
        self._open[writer] = None
        try:
            async with asyncio.timeout(IO_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
            answer = self._answer(head.decode("latin-1"))
            async with asyncio.timeout(IO_TIMEOUT_S):
                writer.write(answer)
                await writer.drain()
        except (TimeoutError, OSError, EOFError, asyncio.LimitOverrunError):
            pass  # slow, silent and flooding callers are dropped without a log line
        finally:
            self._open.pop(writer, None)
            writer.close()

    def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", "text/plain", b"only GET\n")
        if path != "/metrics":
            return _response("404 Not Found", "text/plain", b"see /metrics\n")
        headers = (line.partition(":") for line in lines)
        accept = next((v.strip() for k, _, v in headers if k.lower() == "accept"), "")
        try:
            content_type, text = self._render(accept)
        except Exception as error:  # noqa: BLE001 - a scrape must not end the server
            if not self._failed:
                self._log.error(f"internal error, please report: metrics: {error!r:.300}")
            self._failed = True
            return _response("500 Internal Server Error", "text/plain", b"see selasticd's log\n")
        return _response("200 OK", content_type, text, body=method == "GET")


def _response(status: str, content_type: str, text: bytes, *, body: bool = True) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(text)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (text if body else b"")
