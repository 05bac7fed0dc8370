"""Messages between the ranks that write one checkpoint.

    writer                      rank 0
    plan     its pieces     →   divides: a piece of several ranks is written once
             writes, syncs  ←   share      pieces to write, and the directory
    result   size, checksum →   publishes
                            ←   outcome

There are no collectives: messages are JSON over a channel such as the ranks'
store. So a save needs no process group of its own, may run in a thread while
training communicates, and a rank that fails or does not answer costs a
checkpoint, not the run. Each message is read once and then emptied, so that the
store does not grow.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from slurm_elastic.core.errors import SlurmElasticError

#: Seconds for which a rank waits for another's message. Writing a large model takes minutes.
PATIENCE_S = 600.0
#: Seconds between two checks of a waiting thread whether the process is about to end.
_POLL_S = 1.0
_FAILED = "failed"


class CheckpointError(SlurmElasticError, RuntimeError):
    """A checkpoint could not be written, or is not of this training run."""


class RankExchange(Protocol):
    """Channel to the other ranks, for one thread."""

    def publish(self, key: str, value: str) -> None:
        """Store a value for the other ranks."""

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Return the value that some rank publishes under this key; None after the timeout."""


class CheckpointCoordinator:
    """Messages of one rank to and from the other writers.

    Args:
        rank: of this process.
        writers: the ranks that write; rank 0, which coordinates, is one of them.
        open_channel: opens the channel to the others; called once, for the first message.
        patience_s: longest wait for one message.

    Attributes:
        writes: whether this rank is a writer.
        alone: whether it is the only one.
        number: of the save; counted by each writer, as all take part in all saves.
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
            raise ValueError(f"writers: {list(writers)} is invalid: expected rank 0 among them")
        if open_channel is None and len(writers) > 1:
            raise ValueError("open_channel: None is invalid: expected a function, for two writers")
        self.rank = rank
        self._others = sorted(set(writers) - {0})
        self.writes = rank in writers
        self.alone = len(set(writers)) == 1
        self.number = 0
        self._open_channel = open_channel
        self._channel: RankExchange | None = None
        self._patience_s = patience_s

    def begin(self) -> None:
        """Begin the next save."""
        self.number += 1

    def send(self, kind: str, value: Any) -> None:
        """Send a message to rank 0."""
        self._publish(kind, self.rank, value)

    def fail(self, reason: str) -> None:
        """Send the cause of a failed save to the ranks that wait for a message of this rank."""
        # A rank that cannot be reached notices after `patience_s`.
        with contextlib.suppress(CheckpointError):
            if self.rank:
                for kind in ("plan", "result", "proof"):
                    self.send(kind, failed(reason))
            else:
                for kind in ("share", "outcome", "proven"):
                    self.scatter(kind, failed(reason))

    def receive(self, kind: str) -> dict[str, Any]:
        """Return a message of rank 0.

        Raises:
            CheckpointError: rank 0 failed, or does not answer.
        """
        value = self._receive(kind, self.rank, time.monotonic() + self._patience_s)
        if value is None:
            raise CheckpointError(f"rank 0 did not answer within {self._patience_s:.0f} s")
        if _FAILED in value:
            raise CheckpointError(value[_FAILED])
        return dict(value)

    def gather(self, kind: str, own: Any) -> dict[int, Any]:
        """Return, on rank 0, the messages of all writers by rank.

        Raises:
            CheckpointError: a writer failed, or did not answer; names the rank.
        """
        end = time.monotonic() + self._patience_s
        values = {0: own}
        for rank in self._others:
            value = self._receive(kind, rank, end)
            values[rank] = (
                failed(f"no answer within {self._patience_s:.0f} s") if value is None else value
            )
        for rank, value in values.items():
            if isinstance(value, dict) and _FAILED in value:
                prefix = f"rank {rank}: " if self._others else ""
                raise CheckpointError(f"{prefix}{value[_FAILED]}")
        return values

    def scatter(self, kind: str, value: Any, *, by_rank: Mapping[int, Any] | None = None) -> None:
        """Send, on rank 0, the same message to every other writer, or each its own."""
        for rank in self._others:
            self._publish(kind, rank, value if by_rank is None else by_rank[rank])

    def _publish(self, kind: str, rank: int, value: Any) -> None:
        text = json.dumps(value, separators=(",", ":"))
        with self._connected() as channel:
            channel.publish(self._key(kind, rank), text)

    def _receive(self, kind: str, rank: int, end: float) -> Any:
        key = self._key(kind, rank)
        while True:
            wait = max(0.0, min(_POLL_S, end - time.monotonic()))
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
        except RuntimeError as error:  # torch's for a store that has ended
            raise CheckpointError(
                f"the connection to the other writers is broken ({str(error).splitlines()[0]})"
            ) from error

    def _key(self, kind: str, rank: int) -> str:
        return f"save/{self.number}/{kind}/{rank}"


def failed(reason: str) -> dict[str, str]:
    """Return the message of a failure."""
    return {_FAILED: reason}
