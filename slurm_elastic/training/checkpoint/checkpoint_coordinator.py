"""The ranks that write one checkpoint together, and what they have to tell each other.

    writer                      rank 0
    plan     what it holds  →   divides: what several hold is written once
             writes, syncs  ←   share      which pieces, into which directory
    result   size, checksum →   publishes
                            ←   outcome

There are no collectives: all goes as JSON over a line such as the ranks'
store. So a save needs no process group of its own, may run in a thread while
training communicates, and a rank that fails or falls silent costs a checkpoint,
not the run. Each message is read once and then emptied, so that the store
does not grow.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

#: How long a rank waits for another's message. Writing a large model takes minutes.
PATIENCE_S = 600.0
#: How often a waiting thread looks whether the process is about to end.
_LOOK_S = 1.0
_FAILED = "failed"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, or is not of this training run."""


class RankExchange(Protocol):
    """A way to the other ranks, for one thread."""

    def publish(self, key: str, value: str) -> None:
        """Let the others know."""

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """What some rank tells under this key; None after the timeout."""


class CheckpointCoordinator:
    """One rank's place among the writers.

    Args:
        rank: of this process.
        writers: the ranks that write; rank 0 leads and is one of them.
        open_channel: opens the way to the others; asked once, when there is something to tell.
        patience_s: longest wait for one message.

    Attributes:
        writes: whether this rank is a writer.
        alone: whether there is but one.
        number: of the save, counted by each writer: all take part in all of them.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        writers: Sequence[int] = (0,),
        open_channel: Callable[[], RankExchange] | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        if 0 not in writers:
            raise ValueError(f"rank 0 must be among the writers, not only {list(writers)}")
        if open_channel is None and len(writers) > 1:
            raise ValueError("several writers need a line")
        self.rank = rank
        self._others = sorted(set(writers) - {0})
        self.writes = rank in writers
        self.alone = len(set(writers)) == 1
        self.number = 0
        self._open_channel = open_channel
        self._channel: RankExchange | None = None
        self._patience_s = patience_s

    def begin(self) -> None:
        """The next save."""
        self.number += 1

    def send(self, what: str, value: Any) -> None:
        """To rank 0."""
        self._publish(what, self.rank, value)

    def fail(self, reason: str) -> None:
        """This save will not be: whoever waits for a word of this rank learns why."""
        # Who cannot be told finds out by waiting.
        with contextlib.suppress(CheckpointError):
            if self.rank:
                for what in ("plan", "result", "proof"):
                    self.send(what, failed(reason))
            else:
                for what in ("share", "outcome", "proven"):
                    self.scatter(what, failed(reason))

    def receive(self, what: str) -> dict[str, Any]:
        """From rank 0.

        Raises:
            CheckpointError: it failed, or is silent.
        """
        value = self._receive(what, self.rank, time.monotonic() + self._patience_s)
        if value is None:
            raise CheckpointError(f"rank 0 did not answer within {self._patience_s:.0f} s")
        if _FAILED in value:
            raise CheckpointError(value[_FAILED])
        return dict(value)

    def gather(self, what: str, own: Any) -> dict[int, Any]:
        """On rank 0: what every writer sent, by rank, when all have answered.

        Raises:
            CheckpointError: somebody failed, or was silent; names the rank.
        """
        end = time.monotonic() + self._patience_s
        values = {0: own}
        for rank in self._others:
            value = self._receive(what, rank, end)
            values[rank] = (
                failed(f"no answer within {self._patience_s:.0f} s") if value is None else value
            )
        for rank, value in values.items():
            if isinstance(value, dict) and _FAILED in value:
                who = f"rank {rank}: " if self._others else ""
                raise CheckpointError(f"{who}{value[_FAILED]}")
        return values

    def scatter(self, what: str, value: Any, *, by_rank: Mapping[int, Any] | None = None) -> None:
        """On rank 0: to every other writer the same, or each its own."""
        for rank in self._others:
            self._publish(what, rank, value if by_rank is None else by_rank[rank])

    def _publish(self, what: str, rank: int, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"))
        with self._connected() as channel:
            channel.publish(self._key(what, rank), text)

    def _receive(self, what: str, rank: int, end: float) -> Any:
        key = self._key(what, rank)
        while True:
            wait = max(0.0, min(_LOOK_S, end - time.monotonic()))
            text = self._take_message(key, wait)
            if text is not None:
                return json.loads(text)
            if time.monotonic() >= end:
                return None
            if not threading.main_thread().is_alive():
                raise CheckpointError("the process ends")

    def _take_message(self, key: str, timeout_s: float) -> str | None:
        with self._connected() as channel:
            text = channel.wait_for(key, timeout_s)
            if text is not None:
                channel.publish(key, "")
            return text

    @contextlib.contextmanager
    def _connected(self) -> Iterator[RankExchange]:
        try:
            if self._channel is None:
                assert self._open_channel is not None
                self._channel = self._open_channel()
            yield self._channel
        except RuntimeError as error:  # torch's for a store that is gone
            raise CheckpointError(
                f"the way to the other writers is broken ({str(error).splitlines()[0]})"
            ) from error

    def _key(self, what: str, rank: int) -> str:
        return f"save/{self.number}/{what}/{rank}"


def failed(reason: str) -> dict[str, str]:
    """A message that says so."""
    return {_FAILED: reason}
