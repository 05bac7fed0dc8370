"""A rank of a light training that follows rank 0."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import sys
import time
from typing import Any

from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from tests.support.light_training.light_rank import (
    JOIN_S,
    SEPARATED,
    Peer,
    Rank,
    end_with,
)


class Member(Rank):
    """A rank that follows rank 0."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        super().__init__(args, name)
        self.companion = os.environ.get(JOIN_VARIABLE, "")
        self._messages: list[dict[str, Any]] = []
        self._hub = self._connect()
        self._says_leave = self._joined = False

    def run_to_end(self) -> None:
        """Take part until rank 0 ends it."""
        self._die_if_due("hello")
        self._hub.send(hello=self.name)
        message = self._next()
        while "prepare" in message or "refused" in message:  # of a rank that joins
            if "refused" in message:
                self.log(f"rank {self.name} cannot join: {message['refused']}")
                os._exit(SEPARATED)
            self._die_if_due("prepare")
            self._hub.send(ready=message["prepare"])
            message = self._next()
        self.terminated.allow_exit(False)
        while True:
            message = self._follow(message)
            self._die_if_due("turn")
            mine, part = self.compute()
            stop = self.terminated.flag and not self.companion
            leave = self.terminated.flag and bool(self.companion) and not self._says_leave
            self._says_leave |= leave
            self._hub.send(part=part, turn=message["turn"], stop=stop, leave=leave)
            message = self._next()
            if "total" in message:
                self.complete(mine, message["total"])
                self._joined = True
                message = self._next()

    def _follow(self, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out what rank 0 says between two steps; return what begins the next one."""
        while "turn" not in message:
            if "exit" in message:
                if message.get("leaves"):
                    self.log(f"rank {self.name} leaves the training after step {self.step}")
                os._exit(message["exit"])
            self.terminated.allow_exit(message["pause"])
            message = self._next()
        self.rank, self.size = message["rank"], message["size"]
        self.step, self.total, self.run = message["step"], message["sum"], message["run"]
        return message

    def _next(self) -> dict[str, Any]:
        while not self._messages:
            received = self._hub.receive()
            if received is None:
                self._hub_has_ended()
            self._messages += received or []
        return self._messages.pop(0)

    def _hub_has_ended(self) -> None:
        if self.companion:
            self.log(f"rank {self.name}: rank 0 has ended or is not reached any more")
            os._exit(SEPARATED)
        end_with(self.terminated, f"rank {self.name}: rank 0 has ended; look for its error above")

    def _die_if_due(self, moment: str) -> None:
        """Die of SIGKILL, on a rank that joins, if OUT/die names this moment."""
        if not self.companion or self._joined:
            return
        with contextlib.suppress(FileNotFoundError):
            if (self.args.out / "die").read_text().strip() == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _connect() -> Peer:
        address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        end = time.monotonic() + JOIN_S
        while True:
            try:
                return Peer(socket.create_connection(address, timeout=30))
            except OSError as error:
                if time.monotonic() > end:
                    sys.exit(f"light_training: {address[0]}:{address[1]} is not reached: {error}")
                time.sleep(0.05)
