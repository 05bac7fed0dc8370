"""One munge-authenticated TCP socket for reports, questions and commands.

One request per connection: a JSON object (`rpc/requests.py`), sealed by munge, which proves the
sender's uid. The reply is sealed for that uid alone. All input is hostile: sizes, times and rates
are bounded; what cannot be read is answered with `{"error": "one line", "code": …}`, or dropped.

Callers are served in turn (`fair_queue`), so that one caller's flood does not delay others.

The controller is reached through a `RequestBackend` only. Its methods are called on one thread of
the server, never two at once; `wake` may be called from any thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeVar

from slurm_elastic.config import schema
from slurm_elastic.controller.listening_thread import EventLog, ListeningThread
from slurm_elastic.controller.metrics.activity_counts import ActivityCounts
from slurm_elastic.controller.metrics.metric_definitions import UNAUTHENTICATED
from slurm_elastic.controller.queries.view import NoAnswerError
from slurm_elastic.controller.server.fair_queue import FairQueue, QueueFullError
from slurm_elastic.controller.server.request_auth import MungeAuth, RequestAuth, RequestAuthError
from slurm_elastic.controller.server.request_dispatcher import (
    ParsedRequest,
    RequestBackend,
    RequestDispatcher,
    RequestRefusedError,
    Role,
)
from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.rpc import frames
from slurm_elastic.rpc.protocol import MAX_REQUEST, MAX_WAIT_S, RequestError
from slurm_elastic.rpc.requests import LONG_POLL
from slurm_elastic.slurm.scontrol import NotActiveError

__all__ = ["RequestBackend", "RequestRefusedError", "Role", "Server"]

#: Seconds for a caller to send its request, and to receive its reply.
IO_TIMEOUT_S = 5.0

#: Connections of one address without a request, and seconds after which one gives way.
_MAX_SILENT, _SILENCE_S = 256, 1.0

#: Open connections; of them long polls of one user (one for each running job), and other
#: requests of one user: reports of hundreds of jobs accumulate during a round.
_MAX_CONNECTIONS, _MAX_POLLS, _MAX_OPEN = 20_000, 4000, 1000

#: Calls to munge at once, and bytes of one address that may wait for one.
_AUTH_THREADS, _MAX_BYTES = 4, 16 << 20

T = TypeVar("T")
K = TypeVar("K")
_HangUp = Callable[[], None]


class _CallerGoneError(SlurmElasticError):
    """The caller has hung up, or too many connections are open."""


class Server:
    """The socket, in a thread of its own.

    Args:
        settings: the section `[api]`.
        backend: answers requests; None: set later by `serve`.
        log: receives refusals and errors, one line each.
        auth: opens requests and seals replies; munge's by default.
        role: returns the role of this daemon among several.
        counts: of requests, for metrics.
    """

    def __init__(
        self,
        settings: schema.ApiSettings,
        backend: RequestBackend | None,
        log: EventLog,
        auth: RequestAuth | None = None,
        role: Callable[[], Role] = Role,
        *,
        counts: ActivityCounts | None = None,
    ) -> None:
        self._settings, self._log = settings, log
        self._auth = auth or MungeAuth()
        self._counts = counts or ActivityCounts()
        rate = settings.rate_per_user
        self._requests = RequestDispatcher(backend, log, rate_per_user=rate, role=role)
        self._auth_pool = ThreadPoolExecutor(_AUTH_THREADS, thread_name_prefix="selastic-auth")
        #: Callers that wait for munge, by address, and for the backend, by uid.
        self._auth_queue = FairQueue(_AUTH_THREADS, most=_MAX_CONNECTIONS)
        self._backend_queue = FairQueue(1, most=_MAX_POLLS)
        self._polls: Counter[int] = Counter()
        self._open: Counter[int] = Counter()
        self._bytes: Counter[str] = Counter()
        self._backend_thread = ThreadPoolExecutor(1, thread_name_prefix="selastic-requests")
        self._thread = ListeningThread("selastic-api", "api", self._connection)
        self._waiting: dict[int, set[asyncio.Event]] = {}
        #: Connections without a request yet, by address, the oldest first.
        self._reading: dict[str, dict[_HangUp, float]] = {}
        self._connections = 0

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) as bound: the real port where 0 was configured."""
        return self._thread.address

    def start(self) -> None:
        """Listen, and return once requests are accepted.

        If munge does not answer, that is logged: requests fail until it does.

        Raises:
            OSError: the address cannot be bound; the message names it.
        """
        problem = self._auth.problem()
        if problem:
            self._log.error(f"{problem} Requests are dropped until it answers")
        self._thread.start(self._settings.listen)

    def stop(self) -> None:
        """Close all connections and return when the thread has ended."""
        self._thread.stop()
        self._auth_pool.shutdown(wait=False, cancel_futures=True)
        self._backend_thread.shutdown(wait=False, cancel_futures=True)

    def serve(self, backend: RequestBackend) -> None:
        """Hand requests to this backend from now on."""
        self._requests.backend = backend

    def wake_all(self) -> None:
        """Answer all long polls, as the role of this daemon has changed. Thread-safe."""
        self._thread.call(self._wake_all)

    def _wake_all(self) -> None:
        for job_id in list(self._waiting):
            self._wake(job_id)

    def wake(self, job_id: int) -> None:
        """Answer the long polls of a job, as its orders have changed. Thread-safe."""
        self._thread.call(lambda: self._wake(job_id))

    def _wake(self, job_id: int) -> None:
        for event in self._waiting.get(job_id, ()):
            event.set()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        self._connections += 1
        try:
            frame = await self._read(peer, reader, writer.transport.abort)
            request = await self._opened(peer, frame)
            polls = request.content.get("op") == LONG_POLL
            with _counted(self._polls if polls else self._open, request.uid) as open_requests:
                reply = await self._reply(
                    request.uid,
                    request.content,
                    reader,
                    too_many=open_requests > (_MAX_POLLS if polls else _MAX_OPEN),
                )
                self._counts.request(request.content.get("op"), reply)
                async with self._auth_queue.turn(peer):
                    sealed = await _on(self._auth_pool, lambda: self._auth.close(reply, request))
                async with asyncio.timeout(IO_TIMEOUT_S):
                    writer.write(sealed)
                    await writer.drain()
        except (_CallerGoneError, TimeoutError, OSError, EOFError, QueueFullError):
            pass  # slow, silent, vanished and flooding callers are dropped without a log line
        except RequestAuthError as error:
            self._counts.request(None, {"error": str(error), "code": UNAUTHENTICATED})
            self._requests.warn(peer, f"Peer={peer} Refused={error}")
        finally:
            self._connections -= 1
            writer.close()

    async def _read(self, peer: str, reader: asyncio.StreamReader, hang_up: _HangUp) -> bytes:
        """Return one frame of a caller that is not yet authenticated."""
        if self._connections > _MAX_CONNECTIONS:
            raise _CallerGoneError
        now = asyncio.get_running_loop().time()
        silent = self._reading.setdefault(peer, {})
        if len(silent) >= _MAX_SILENT:
            # Honest clients send at once: the connection that is silent for longest makes room.
            oldest_hang_up, since = next(iter(silent.items()))
            if now - since > _SILENCE_S:
                oldest_hang_up()
                del silent[oldest_hang_up]
        silent[hang_up] = now
        try:
            async with asyncio.timeout(IO_TIMEOUT_S):
                header = await reader.readexactly(frames.HEADER_SIZE)
                size = frames.frame_size(header, limit=MAX_REQUEST)
                return await reader.readexactly(size)
        finally:
            silent.pop(hang_up, None)
            if not silent:
                self._reading.pop(peer, None)

    async def _opened(self, peer: str, frame: bytes) -> frames.Message:
        with _counted(self._bytes, peer, len(frame)) as waiting:
            if waiting > _MAX_BYTES:
                raise _CallerGoneError
            async with self._auth_queue.turn(peer):
                return await _on(self._auth_pool, lambda: self._auth.open(frame))

    async def _reply(
        self,
        uid: int,
        content: dict[str, Any],
        reader: asyncio.StreamReader,
        *,
        too_many: bool = False,
    ) -> dict[str, Any]:
        """Return the reply to a request; `too_many` of the caller's are open already."""
        try:
            self._requests.spend(uid, too_many=too_many)
            request = self._requests.read(content)
            if request.operation.name == LONG_POLL:
                return await self._orders(uid, request, reader)
            return await self._call_backend(uid, lambda: self._requests.answer(uid, request))
        except RequestError as error:
            return {"error": str(error), "code": error.code}
        except (RequestRefusedError, NoAnswerError) as error:
            return {"error": str(error), "code": "refused"}
        except NotActiveError as error:
            return {"error": f"this controller is no longer active: {error}", "code": "standby"}
        except _CallerGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - one bad request must not end the others
            self._log.error(f"Uid={uid} Op={content.get('op')!r:.40} Error={error!r:.300}")
            return {"error": "internal error: selasticd's log has the details", "code": "internal"}

    async def _orders(
        self, uid: int, request: ParsedRequest, reader: asyncio.StreamReader
    ) -> dict[str, Any]:
        """Return the present orders; for a caller that has `seen` them, wait for newer ones."""
        clock, arguments = asyncio.get_running_loop().time, request.arguments
        deadline = clock() + min(arguments["wait_s"], MAX_WAIT_S)
        with self._waiter(arguments["job_id"]) as changed:
            reply = await self._call_backend(uid, lambda: self._requests.answer(uid, request))
            while reply["orders"]["seq"] == arguments.get("seen") and clock() < deadline:
                await _until(changed, reader, deadline - clock())
                changed.clear()
                reply = await self._call_backend(uid, lambda: self._requests.orders(uid, request))
            return reply

    async def _call_backend(self, uid: int, call: Callable[[], T]) -> T:
        async with self._backend_queue.turn(uid):
            return await _on(self._backend_thread, call)

    @contextlib.contextmanager
    def _waiter(self, job_id: int) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        self._waiting.setdefault(job_id, set()).add(event)
        try:
            yield event
        finally:
            self._waiting[job_id].discard(event)
            if not self._waiting[job_id]:
                del self._waiting[job_id]


@contextlib.contextmanager
def _counted(counts: Counter[K], key: K, amount: int = 1) -> Iterator[int]:
    """Add to a count for the time of the context; its value is the new count."""
    counts[key] += amount
    try:
        yield counts[key]
    finally:
        counts[key] -= amount
        if not counts[key]:
            del counts[key]


async def _on(executor: Executor, call: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, call)


async def _until(changed: asyncio.Event, reader: asyncio.StreamReader, left: float) -> None:
    """Return when the event is set or the time is over.

    Raises:
        _CallerGoneError: the caller hung up, or sent more than its request.
    """
    event = asyncio.ensure_future(changed.wait())
    hangup = asyncio.ensure_future(reader.read(1))
    try:
        await asyncio.wait((event, hangup), timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if hangup.done():
            raise _CallerGoneError
    finally:
        event.cancel()
        hangup.cancel()
