"""One rank of a light training: its state, its steps, and its connections to others."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import time
from typing import Any

#: Exit codes of the library: SIGTERM; a companion's rank that is separated from the training.
STOPPED, SEPARATED = 128 + signal.SIGTERM, 1
#: Sums are taken modulo this prime.
PRIME = 1_000_003
#: How long ranks wait for rank 0, as in the library.
JOIN_S = 600.0
#: The same: a silent peer is lost; ranks get SIGTERM one after the other.
_SILENCE_S, _PEERS_END_S = 5, 3.0


class Terminated:
    """Whether SIGTERM has come, which ends the process at once while nothing is to be saved."""

    def __init__(self) -> None:
        self.flag, self.at_once, self.linger_s = False, True, 0.0
        signal.signal(signal.SIGTERM, self._handle)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)

    def allow_exit(self, allowed: bool, *, linger_s: float = 0.0) -> None:
        """Choose whether SIGTERM, also an earlier one, ends the process at once."""
        self.at_once, self.linger_s = allowed, linger_s
        if allowed and self.flag:
            self._leave()

    def _handle(self, *_: object) -> None:
        self.flag = True
        if self.at_once:
            self._leave()

    def _leave(self) -> None:
        time.sleep(self.linger_s)
        os._exit(STOPPED)


class Peer:
    """Connection to another rank: lines of JSON."""

    def __init__(self, sock: socket.socket) -> None:
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _SILENCE_S - 1),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _SILENCE_S * 1000),
        ):
            sock.setsockopt(level, option, value)
        sock.settimeout(None)
        self.sock, self._unread = sock, b""

    def send(self, **message: Any) -> None:
        """Send a message; the end of a connection is seen by `receive`."""
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the next message; None: the other has ended."""
        try:
            data = self.sock.recv(65536)
        except OSError:
            return None
        if not data:
            return None
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


class Samples:
    """Samples of a training in their order, and the part of a step that some of them make."""

    def __init__(self, samples: int, epochs: int, batch: int) -> None:
        self.samples, self.batch = samples, batch
        self._per_epoch = -(-samples // batch)
        self.steps = epochs * self._per_epoch

    def of_step(self, step: int) -> tuple[int, list[int]]:
        """Return the epoch of a step, from 1 on, and its samples."""
        epoch, number = divmod(step - 1, self._per_epoch)
        begin = number * self.batch
        return epoch, list(range(begin, min(self.samples, begin + self.batch)))

    @staticmethod
    def part(total: int, indices: list[int]) -> int:
        """Return the contribution of some samples to the sum over all steps so far."""
        return sum((i + 1) * (total + 1) for i in indices) % PRIME

    def losses(self) -> list[float]:
        """Return the losses of all steps."""
        total, losses = 0, []
        for step in range(1, self.steps + 1):
            total = (total + self.part(total, self.of_step(step)[1])) % PRIME
            losses.append(total / PRIME)
        return losses


class Rank:
    """One member of the training, with a state of its own.

    Args:
        args: of the command line.
        name: of the member, e.g. "4711.0".
    """

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        self.args, self.name, self.terminated = args, name, Terminated()
        self.data = Samples(args.samples, args.epochs, args.global_batch)
        self.rank, self.size = 0, 1
        self.step = self.total = self.run = 0

    def compute(self) -> tuple[list[int], int]:
        """Compute the next step; return this rank's samples and its part of the sum."""
        _, indices = self.data.of_step(self.step + 1)
        begin, end = (len(indices) * (self.rank + i) // self.size for i in (0, 1))
        mine = indices[begin:end]
        time.sleep(self.args.step or len(indices) / (self.args.rate * self.size))
        return mine, self.data.part(self.total, mine)

    def complete(self, mine: list[int], total: int) -> None:
        """Take the sum over all ranks, which ends the step, and record it."""
        self.step, self.total = self.step + 1, (self.total + total) % PRIME
        epoch = self.data.of_step(self.step)[0]
        row = {"step": self.step, "epoch": epoch, "world": self.size, "run": self.run}
        if self.rank == 0:
            self._record("losses.jsonl", row | {"loss": self.total / PRIME})
        self._record(f"samples-rank{self.name}.jsonl", row | {"indices": mine})

    def _record(self, name: str, row: dict[str, Any]) -> None:
        descriptor = os.open(self.args.out / name, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, json.dumps(row).encode() + b"\n")
        os.close(descriptor)

    @staticmethod
    def log(line: str) -> None:
        """Write a line to the job's log."""
        os.write(2, f"slurm-elastic: {line}\n".encode())


def end_with(terminated: Terminated, reason: str) -> None:
    """End a rank of the base, as another one has ended: by SIGTERM, if that follows."""
    end = time.monotonic() + _PEERS_END_S
    while time.monotonic() < end:
        if terminated.flag:
            os._exit(STOPPED)
        time.sleep(0.05)
    os.write(2, f"{reason}\n".encode())
    os._exit(1)


def job_of(member: str) -> str:
    """Return the id of a member's job."""
    return member.partition(".")[0]
