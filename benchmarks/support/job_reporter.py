"""Stand-in for esrun for the jobs of one user (busy_job.sh); runs in ctld as that user.

    job_reporter.py ADDRESS DIRECTORY [DEAF]

Like esrun, it reports each job regularly and keeps a long poll open for it, through the
controller's socket; it passes orders on to the job, and acknowledges a notice when the job has
saved. DEAF is the share of notices that it ignores, as a hanging job would.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slurm_elastic.rpc import frames, munge_auth, protocol, requests

CALL_S, POLL_S = 10.0, 25.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0


@dataclass
class Attempt:
    """One run of one job."""

    job_id: int
    run: int
    home: Path
    gpus: int
    nodes: int
    step: int
    work: int
    begun: float = field(default_factory=time.monotonic)
    seen: int = -1
    every_s: float = 10.0
    notice: int | None = None
    saved: int | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def alive(self) -> bool:
        """Return whether a process reads the job's orders; it ends with the job's processes."""
        return self.tell("")

    def tell(self, words: str) -> bool:
        """Write a line for the job; return whether it has a reader."""
        try:
            handle = os.open(self.home / "in", os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.ENXIO, errno.ENOENT):
                return False
            raise
        try:
            if words:
                os.write(handle, f"{words}\n".encode())
        finally:
            os.close(handle)
        return True

    def report(self) -> dict[str, Any]:
        """Return the report of esrun at this time, with speeds of a model that scales well."""
        ran = time.monotonic() - self.begun
        step = min(self.work, self.step + int(ran * self.gpus))
        body: dict[str, Any] = {
            "job_id": self.job_id,
            "run": self.run,
            "phase": "training",
            "proven": True,
            "gpus": self.gpus,
            "nodes": self.nodes,
            "step": step,
            "progress": step / max(1, self.work),
            "step_time_s": 64.0 / (40.0 * self.gpus**0.9),
            "steps_measured": 10,
            "global_batch": 64,
            "startup_s": 0.1,
            "checkpoint_s": 0.1,
            "resumed_from": self.step or None,
        }
        if self.saved is not None and self.saved == self.notice:
            body |= {"phase": "saved", "notice": self.notice}
        return {k: v for k, v in body.items() if v is not None}


class JobReporter:
    """All attempts of one user."""

    def __init__(self, address: str, home: Path, deaf: float) -> None:
        self._address, self._home, self._deaf = address, home, deaf
        self._host, self._port = frames.parse_address(address)
        self._attempts: dict[int, Attempt] = {}
        self._trusted = frames.trusted_uids()
        self._draw = random.Random(os.getuid())

    async def run(self) -> None:
        """Report until killed."""
        out = self._home / "out"
        with contextlib.suppress(FileExistsError):
            os.mkfifo(out)
        handle = os.open(out, os.O_RDWR | os.O_NONBLOCK)
        (self._home / "reporter").touch()
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(handle, "rb", buffering=0)
        )
        while line := await reader.readline():
            self._handle(line.decode().split())

    def _handle(self, words: list[str]) -> None:
        job_id, run = int(words[1]), int(words[2])
        known = self._attempts.get(job_id)
        if words[0] == "begin":
            if known:
                self._drop(known)
            gpus, nodes, step, work = map(int, words[4:8])
            attempt = Attempt(job_id, run, self._home / words[3], gpus, nodes, step, work)
            self._attempts[job_id] = attempt
            attempt.tasks = [
                asyncio.create_task(self._reporting(attempt)),
                asyncio.create_task(self._polling(attempt)),
            ]
        elif known and known.run == run:
            if words[0] == "saved":
                known.saved = int(words[3])
                known.changed.set()
            elif words[0] == "end":
                self._drop(known)

    def _drop(self, attempt: Attempt) -> None:
        for task in attempt.tasks:
            task.cancel()
        if self._attempts.get(attempt.job_id) is attempt:
            del self._attempts[attempt.job_id]

    async def _reporting(self, attempt: Attempt) -> None:
        pause = FIRST_PAUSE_S
        while attempt.alive():
            attempt.changed.clear()
            request = requests.build("report", report=attempt.report())
            reply = await self._call(request, CALL_S)
            if reply is None:
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, LAST_PAUSE_S)
                continue
            pause = FIRST_PAUSE_S
            self._take(attempt, reply["orders"])
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(attempt.changed.wait(), attempt.every_s)
        self._drop(attempt)

    async def _polling(self, attempt: Attempt) -> None:
        pause = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            request = requests.build(
                "orders",
                job_id=attempt.job_id,
                run=attempt.run,
                seen=attempt.seen,
                wait_s=POLL_S,
            )
            reply = await self._call(request, POLL_S + CALL_S)
            if reply is not None:
                before = attempt.seen
                self._take(attempt, reply["orders"])
                if attempt.seen != before or time.monotonic() - began > 1:
                    pause = FIRST_PAUSE_S
                    continue
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, LAST_PAUSE_S)

    def _take(self, attempt: Attempt, orders: dict[str, Any]) -> None:
        if orders["seq"] < attempt.seen:
            return
        attempt.seen, attempt.every_s = orders["seq"], orders.get("report_every_s", 10.0)
        if orders["action"] == "notice" and orders["notice"] != attempt.notice:
            attempt.notice = orders["notice"]
            if self._draw.random() >= self._deaf:
                attempt.tell(f"save {attempt.notice}")
        elif orders["action"] == "resume" and attempt.notice is not None:
            attempt.notice = attempt.saved = None
            attempt.tell("resume")

    async def _call(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
        nonce = os.urandom(16).hex()
        try:
            async with asyncio.timeout(timeout_s):
                frame = frames.encode(
                    request, purpose="request", nonce=nonce, limit=protocol.MAX_REQUEST
                )
                reader, writer = await asyncio.open_connection(self._host, self._port)
                try:
                    writer.write(frame)
                    header = await reader.readexactly(frames.HEADER_SIZE)
                    size = frames.frame_size(header, limit=protocol.MAX_REPLY)
                    answer = await reader.readexactly(size)
                finally:
                    writer.close()
            reply = frames.decode(answer, purpose="reply", nonce=nonce)
        except (OSError, EOFError, TimeoutError, munge_auth.SealError, frames.ChannelError):
            return None
        if reply.uid not in self._trusted or "error" in reply.content:
            return None
        return reply.content


if __name__ == "__main__":
    share = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    asyncio.run(JobReporter(sys.argv[1], Path(sys.argv[2]), share).run())
