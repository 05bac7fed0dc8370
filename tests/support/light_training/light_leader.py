"""Rank 0 of a light training."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import time
from typing import Any

from tests.support.light_training.leader_reports import (
    LeaderReports,
    LightCheckpoint,
)
from tests.support.light_training.light_rank import (
    PRIME,
    SEPARATED,
    STOPPED,
    Peer,
    Rank,
    end_with,
    job_of,
)

_POLL_S = 0.2


class Leader(Rank):
    """Rank 0, which adds up the steps, and decides on changes of the group."""

    def __init__(self, args: argparse.Namespace, name: str) -> None:
        super().__init__(args, name)
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self._base = self.size
        port = int(os.environ["MASTER_PORT"]) if self.size > 1 else 0
        self._listener = socket.create_server(("", port), backlog=128)
        self._checkpoint = LightCheckpoint(
            args.out / "checkpoints" / "light", args.checkpoint_every
        )
        self._reports = LeaderReports(self.data, self.size)
        #: Members in the order of their ranks, and connections by name; None: not known yet.
        self._members = [f"{job_of(name)}.{rank}" for rank in range(self.size)]
        self._peers: dict[str, Peer] = {}
        self._strangers: list[Peer] = []
        self._can = False
        self._lost: set[str] = set()
        self._gone: set[str] = set()
        self._desired: dict[str, int] = {}
        #: The generation that is being formed: its number, members, and newcomers that are ready.
        self._pending: tuple[int, list[str]] | None = None
        self._ready: set[str] = set()
        self._last_number = self._number = self._turn = 0
        self._result: dict[str, Any] | None = None
        self._paused_at = 0.0
        self._parts: dict[str, int] = {}
        self._stop = False

    def run_to_end(self) -> None:
        """Train to the end."""
        saved = self._checkpoint.restore()
        if saved is not None:
            self.step, self.total = saved["step"], saved["sum"]
            self.log(f"resumed from step {self.step} with {self.size} rank(s)")
        self.run = int(time.time() * 1000)
        self._wait(lambda: set(self._members[1:]) <= self._peers.keys())
        self.terminated.allow_exit(False)
        begins, finish = True, self.args.out / "finish"
        while self.step < self.data.steps and not finish.exists():
            notice, switch = self._reports.notice(), self._requested()
            self._step()
            if begins:
                self._begin(None if saved is None else saved["step"])
            begins = False
            if self._stop or self.terminated.flag:
                self._end(STOPPED)
            if self.step == self.data.steps:
                break
            if notice:
                self._pause()
                continue
            if time.monotonic() >= self._checkpoint.due_at:
                self._checkpoint.save(self.step, self.total)
            self._reports.training(self.step, self._checkpoint.fields())
            if switch:
                self._switch()
        self._finish()

    def _begin(self, resumed_from: int | None) -> None:
        self._checkpoint.plan()
        if self._reports.link.companions is not None:
            self._can = True
            port = self._listener.getsockname()[1]
            self._reports.link.send_group({"can": True, "port": port})
        self._reports.started(resumed_from)

    # --- steps ---

    def _step(self) -> None:
        """Train one step with all members; those that are lost are left out."""
        while True:
            self._say_turn()
            mine, own = self.compute()
            others = self._members[1:]
            self._wait(lambda: self._is_broken() or self._parts.keys() >= set(others))  # noqa: B023
            if not self._is_broken():
                total = (own + sum(self._parts.values())) % PRIME
                for member in others:
                    self._peers[member].send(total=total)
                self.complete(mine, total)
                return
            self._recover()

    def _say_turn(self) -> None:
        self._turn, self._parts = self._turn + 1, {}
        state = {"step": self.step, "sum": self.total, "run": self.run, "size": self.size}
        for rank, member in enumerate(self._members[1:], start=1):
            self._peers[member].send(turn=self._turn, rank=rank, **state)

    def _is_broken(self) -> bool:
        return not self._lost.isdisjoint(self._members)

    def _recover(self) -> None:
        """Continue with the members that are left."""
        self._paused_at = time.monotonic()
        lost = self._lost.intersection(self._members)
        if base := [m for m in lost if job_of(m) == job_of(self.name)]:
            end_with(self.terminated, f"rank 0: rank {base[0]} of the base has ended")
        if self._pending:
            self._drop("a member is lost")
        excluded = self._gone | {job_of(m) for m in self._lost}
        kept = {job_of(self.name), *(self._desired.keys() - excluded)}
        for member in [m for m in self._members if job_of(m) not in kept and m in self._peers]:
            self._let_go(member, SEPARATED if job_of(member) in excluded else 0)
        self._change([m for m in self._members if job_of(m) in kept], self._next_number())

    def _wait(self, condition: Any) -> None:
        """Read what others say until a condition holds."""
        self._read(0.0)
        while not condition():
            self._read(_POLL_S)

    def _read(self, timeout_s: float) -> None:
        peers = {p.sock: (name, p) for name, p in self._peers.items()}
        strangers = {p.sock: ("", p) for p in self._strangers}
        known = peers | strangers
        for sock in select.select([self._listener, *known], [], [], timeout_s)[0]:
            if sock is self._listener:
                with contextlib.suppress(OSError):
                    self._strangers.append(Peer(self._listener.accept()[0]))
                continue
            name, peer = known[sock]
            messages = peer.receive()
            if messages is None:
                self._lose(name, peer)
            for message in messages or ():
                name = self._handle(name, peer, message)

    def _handle(self, name: str, peer: Peer, message: dict[str, Any]) -> str:
        if "hello" in message and not name:
            name = message["hello"]
            self._strangers.remove(peer)
            self._peers[name] = peer
        if message.get("ready") == self._last_number:
            self._ready.add(name)
        if message.get("turn") == self._turn:
            self._parts[name] = message["part"]
        self._stop |= message.get("stop", False)
        if message.get("leave"):
            self._gone.add(job_of(name))
        return name

    def _lose(self, name: str, peer: Peer) -> None:
        peer.sock.close()
        if not name:
            self._strangers.remove(peer)
            return
        del self._peers[name]
        self._lost.add(name)
        if job_of(name) != job_of(self.name):
            self._gone.add(job_of(name))
            self._refuse(job_of(name), "another rank of its companion has ended")

    def _refuse(self, job: str, reason: str) -> None:
        for member, peer in self._peers.items():
            if member not in self._members and job_of(member) == job:
                peer.send(refused=reason)

    # --- changes ---

    def _requested(self) -> int:
        """Return the number of the generation that stands and is to follow, or 0."""
        if not self._can:
            return 0
        self._send_result()
        self._read(0.0)
        self._desired = dict(self._reports.link.companions or {})
        self._gone &= self._desired.keys()
        wanted = {job: n for job, n in self._desired.items() if job not in self._gone}
        if self._pending and (why := self._objection(self._pending[1], wanted)):
            self._drop(why)
        if not self._pending:
            self._prepare(wanted)
        if not self._pending:
            return 0
        number, members = self._pending
        return number if set(members) - set(self._members) <= self._ready else 0

    def _objection(self, planned: list[str], wanted: dict[str, int]) -> str:
        if self._lost & set(planned):
            return "a member is lost"
        base = job_of(self.name)
        jobs = {job_of(m) for m in planned} - {base}
        returning = {job_of(m) for m in self._members} - jobs - {base}
        return (
            "other companions are desired"
            if returning & wanted.keys() or jobs - wanted.keys()
            else ""
        )

    def _prepare(self, wanted: dict[str, int]) -> None:
        """Begin to form the generation that should follow, if another one should."""
        base = job_of(self.name)
        members = [m for m in self._members if job_of(m) in {base, *wanted}]
        if members == self._members:
            new = sorted(wanted.keys() - {job_of(m) for m in members}, key=int)
            joining = [f"{job}.{k}" for job in new for k in range(wanted[job])]
            if not joining or not self._peers.keys() >= set(joining):
                return
            members += joining
        self._ready, self._pending = set(), (self._next_number(), members)
        for member in set(members) - set(self._members):
            self._peers[member].send(prepare=self._last_number)

    def _next_number(self) -> int:
        self._last_number += 1
        return self._last_number

    def _drop(self, why: str) -> None:
        assert self._pending
        self._reports.link.send_group({"dropped": self._pending[0], "why": why})
        self._pending = None

    def _switch(self) -> None:
        assert self._pending
        self._paused_at = time.monotonic()
        (number, members), self._pending = self._pending, None
        for member in set(self._members) - set(members):
            self._let_go(member, 0)
        self._change(members, number)

    def _let_go(self, member: str, code: int) -> None:
        if peer := self._peers.pop(member, None):
            peer.send(exit=code, leaves=True)
            peer.sock.close()

    def _change(self, members: list[str], number: int) -> None:
        """Continue with these members."""
        before, self._members, self.size = self._companions(), members, len(members)
        now = self._companions()
        self._reports.resize(self.size)
        left = before.keys() - now.keys()
        self._result = {
            "generation": number,
            "companions": now,
            "step": self.step,
            "lost": sorted(left & self._desired.keys(), key=int),
        }
        changes = [f"{job} joined" for job in sorted(now.keys() - before.keys())]
        changes += [f"{job} {'lost' if job in self._desired else 'left'}" for job in sorted(left)]
        self.log(
            f"continues after step {self.step} with {self.size} rank(s)"
            f" ({', '.join(changes) or 'the same ones'})"
        )

    def _companions(self) -> dict[str, int]:
        jobs = [job_of(m) for m in self._members[self._base :]]
        return {job: jobs.count(job) for job in jobs}

    def _send_result(self) -> None:
        if self._result is not None:
            result, self._result = self._result, None
            pause_s = time.monotonic() - self._paused_at
            self._reports.link.send_group({**result, "pause_s": pause_s})

    # --- pauses and the end ---

    def _pause(self) -> None:
        """Save, report it, and wait to be ended or resumed."""
        self._reports.saving(self.step)
        if not self._checkpoint.save(self.step, self.total):
            self._reports.say("training", self.step, notice=None, **self._checkpoint.fields())
            return
        self._tell(pause=True)
        self.log(f"saved step {self.step}; waiting to be requeued or resumed")
        self.terminated.allow_exit(True, linger_s=0.1)
        reason = self._reports.wait_saved(self.step, self._checkpoint.fields())
        self.log(f"continues after step {self.step}: {reason}")
        self.terminated.allow_exit(False)
        self._tell(pause=False)

    def _tell(self, **message: Any) -> None:
        for member in self._members[1:]:
            if member in self._peers:
                self._peers[member].send(**message)

    def _finish(self) -> None:
        if self._can:
            self._send_result()
            self._reports.link.send_group({"can": False, "why": "finished"})
            for job in {job_of(m) for m in self._peers.keys() - set(self._members)}:
                self._refuse(job, "the training is complete")
        self._end(0)

    def _end(self, code: int) -> None:
        """Save, report the end, and end all ranks."""
        if code and self._can:
            self._send_result()
            self._reports.link.send_group({"can": False, "why": "finished"})
        if self._checkpoint.save(self.step, self.total) and code:
            self.log(f"SIGTERM: saved step {self.step}")
        self._reports.say("ended", self.step, exit_code=code, **self._checkpoint.fields())
        if code == 0:
            (self.args.out / "done").write_text("done\n")
        self._tell(exit=code)
        self._reports.link.close()
        os._exit(code)
