"""Turns: so many at once, and whoever asks for much waits behind himself.

The socket has two narrow places: munge, where a caller is known by his address only, and the desk,
where he is known by his uid. At each of them callers wait in lines of their own, and the lines are
served in turn: a flood makes its own line longer, and others wait for one request of it at most.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Hashable

from slurm_elastic.core.errors import SlurmElasticError


class QueueFullError(SlurmElasticError):
    """A caller's own line is full."""


class FairQueue:
    """A place of `slots`. Not thread-safe: of one event loop.

    Args:
        slots: served at once.
        most: that may wait in one line.
    """

    def __init__(self, slots: int, *, most: int) -> None:
        self._free, self._most = slots, most
        #: Lines in the order in which they are served next.
        self._lines: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def of(self, who: Hashable) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            TooManyError: at once; `most` of his are waiting.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(who)
        try:
            yield
        finally:
            self._next()

    def waiting(self, who: Hashable) -> int:
        """How many of his wait."""
        return len(self._lines.get(who, ()))

    async def _wait(self, who: Hashable) -> None:
        line = self._lines.setdefault(who, deque())
        if len(line) >= self._most:
            raise QueueFullError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        line.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._next()  # it was his already
            else:
                self._leave(who, turn)
            raise

    def _leave(self, who: Hashable, turn: asyncio.Future[None]) -> None:
        line = self._lines.get(who)
        if line is not None:
            with contextlib.suppress(ValueError):
                line.remove(turn)
            if not line:
                del self._lines[who]

    def _next(self) -> None:
        """Give a turn that has ended to the first of the next line; that line is last then."""
        while self._lines:
            who, line = next(iter(self._lines.items()))
            turn = line.popleft()
            del self._lines[who]
            if line:
                self._lines[who] = line
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
