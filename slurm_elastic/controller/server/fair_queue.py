"""A queue that serves callers in turn, a bounded number at once.

The socket waits in two places: for munge, where a caller is known by address only, and for the
controller, where a caller is known by uid. At each, requests of one caller are served in order
and callers alternate, so that a flood delays only its sender: others wait for one of its requests
at most.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Hashable

from slurm_elastic.core.errors import SlurmElasticError


class QueueFullError(SlurmElasticError):
    """Too many requests of one caller wait already."""


class FairQueue:
    """Turns for callers. Not thread-safe: for one event loop.

    Args:
        slots: requests served at once.
        most: requests of one caller that may wait.
    """

    def __init__(self, slots: int, *, most: int) -> None:
        self._free, self._most = slots, most
        #: Waiting requests by caller; callers in the order in which they are served next.
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    @contextlib.asynccontextmanager
    async def turn(self, caller: Hashable) -> AsyncIterator[None]:
        """Wait for a turn and hold it.

        Raises:
            QueueFullError: at once, if `most` requests of the caller are waiting.
        """
        if self._free:
            self._free -= 1
        else:
            await self._wait(caller)
        try:
            yield
        finally:
            self._pass_on()

    def waiting(self, caller: Hashable) -> int:
        """Return the number of requests of a caller that wait."""
        return len(self._waiting.get(caller, ()))

    async def _wait(self, caller: Hashable) -> None:
        requests = self._waiting.setdefault(caller, deque())
        if len(requests) >= self._most:
            raise QueueFullError
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        requests.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # the turn had been given to this request already
            else:
                self._remove(caller, turn)
            raise

    def _remove(self, caller: Hashable, turn: asyncio.Future[None]) -> None:
        requests = self._waiting.get(caller)
        if requests is not None:
            with contextlib.suppress(ValueError):
                requests.remove(turn)
            if not requests:
                del self._waiting[caller]

    def _pass_on(self) -> None:
        """Give a turn that has ended to the next caller, who is last from then on."""
        while self._waiting:
            caller, requests = next(iter(self._waiting.items()))
            turn = requests.popleft()
            del self._waiting[caller]
            if requests:
                self._waiting[caller] = requests
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1
