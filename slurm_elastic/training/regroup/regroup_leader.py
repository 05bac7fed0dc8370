"""Changes of the group on rank 0, which decides on them."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

from slurm_elastic.training.env_directive import read_directive
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.ranks.generation import Generation, job_of, next_members
from slurm_elastic.training.ranks.group_forming import FormingGroup
from slurm_elastic.training.ranks.group_guard import GroupBrokenError
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.member_server import SILENCE_S, MemberServer
from slurm_elastic.training.regroup.regrouping import (
    ADDRESS_KEY,
    SEPARATED,
    GroupMember,
)
from slurm_elastic.training.regroup.state_broadcast import describe
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.signals import PEERS_END_S, STOPPED, Signals, exit_now

#: Attempts to form a group with the same newcomers.
_ATTEMPTS = 2
#: Seconds after a failed collective within which the lost rank has to be known.
_UNEXPLAINED_S = 2.0 * SILENCE_S
#: Seconds for which a change waits that could not be prepared, as a checkpoint failed (our choice).
_POSTPONED_S = 10.0


class RegroupLeader(GroupMember):
    """Rank 0, on the host of esrun, which states the companions; see `Regrouping`.

    Args:
        rank_group: all ranks.
        reporter: has the companions, and gets the results.
        signals: SIGTERM ends a recovery that does not succeed.
    """

    def __init__(self, rank_group: RankGroup, *, reporter: Reporter, signals: Signals) -> None:
        super().__init__(rank_group)
        self._reporter, self._signals = reporter, signals
        self._server: MemberServer | None = None
        self._fingerprint = 0
        #: Numbers of the newest generation, and of the one that is being formed.
        self._last_number = self._awaited = 0
        self._desired: dict[str, int] = {}
        #: Something has happened that a decision depends on.
        self._news = False
        self._present: set[str] = set()
        self._lost: set[str] = set()
        #: Companions that are lost, leave, or cannot join.
        self._gone: set[str] = set()
        self._failures: dict[str, int] = {}
        self._failure = ""
        self._pending: FormingGroup | None = None
        self._formed: set[str] = set()
        #: Members that leave, until all others have ended the last step with them.
        self._leaving: frozenset[str] = frozenset()
        self._arrived: dict[int, set[str]] = {}
        self._steps: dict[int, dict[str, int]] = {}
        self._result: dict[str, Any] | None = None
        self._paused_at: float | None = None
        self._not_before = 0.0
        self._closed = False

    def begin(self) -> None:
        """See `Regrouping`."""
        if self._obstacle or self._reporter.read_companions() is None:
            if self._obstacle:
                self._reporter.send_group(can=False, why=self._obstacle)
            self._rank_group.publish(ADDRESS_KEY, "")
            return
        port = self._rank_group.serve()
        base, size = job_of(self.name), self._rank_group.size
        self.generation = Generation(0, tuple(f"{base}.{rank}" for rank in range(size)))
        self._fingerprint = self._training.fingerprint()
        token = secrets.token_hex(16)
        self._server = MemberServer(token, on_message=self._handle, on_loss=self._on_loss)
        facts = {
            "port": self._server.port,
            "token": token,
            "generation": self.generation.to_wire(),
            "directive": str(read_directive() or ""),
        }
        self._rank_group.publish(ADDRESS_KEY, json.dumps(facts))
        self._reporter.send_group(can=True, port=port)

    def join(self) -> None:
        """See `Regrouping`."""
        raise AssertionError("rank 0 belongs to the base")

    def requested(self) -> float:
        """See `Regrouping`."""
        if self._server is None:
            return 0.0
        self._send_result()
        self._release_former()
        desired = self._reporter.companions or {}
        with self._changed:
            if self._news or desired != self._desired:
                self._news, self._desired = False, dict(desired)
                self._decide()
            ready = self._pending is not None and self._stands(self._pending)
            if self._pending is None or not ready or time.monotonic() < self._not_before:
                return 0.0
            return float(self._pending.generation.number)

    def pause(self) -> None:
        """See `Regrouping`."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()

    def postpone(self, why: str) -> None:
        """See `Regrouping`."""
        self._paused_at, self._not_before = None, time.monotonic() + _POSTPONED_S
        with self._changed:
            self._news = True
            if self._pending is not None:
                self._drop(why)

    def switch(self, number: int) -> None:
        """See `Regrouping`."""
        self.pause()
        former = self._members
        with self._changed:
            formed, self._pending = self._pending, None
            assert formed is not None
            assert formed.generation.number == number
            # From now on the loss of a newcomer is that of a member.
            self.generation = formed.generation
            self._leaving = frozenset(former.members) - set(formed.generation.members)
        self._adopt(formed)
        self._arrive(self.name, number)
        self._set_result(former)
        if formed.transfer is not None:
            self._send_state(self._broadcast(formed.transfer, 0))

    def recover(self) -> None:
        """See `Regrouping`."""
        self.pause()
        former = self._members
        while True:
            number = self._recoveries + 1
            self._sound_alarm(number)
            self._steps.setdefault(number, {})[self.name] = self._step
            self._wait_for_steps(number)
            try:
                self._continue_with_survivors(number)
            except GroupBrokenError:
                continue
            self._set_result(former)
            return

    def close(self) -> None:
        """See `Regrouping`."""
        self._closed = True
        if self._server is not None:
            self._send_result()
            self._reporter.send_group(can=False, why="finished")
            for member in self._present - set(self._members.members):
                self._server.send([member], {"refused": "the training is complete"})

    def lost_companions(self, timeout_s: float) -> list[str]:
        """Wait for the first loss; return the companions' lost ranks, none if the base lost one."""
        members = {*self._members.members, *self._leaving}
        self._wait(lambda: members & self._lost, timeout_s)
        lost = sorted(members & self._lost)
        return [] if any(job_of(m) == job_of(self.name) for m in lost) else lost

    @property
    def _members(self) -> Generation:
        assert self.generation is not None
        return self.generation

    def _send(self, members: set[str], message: Mapping[str, Any]) -> None:
        if self._server is not None:
            self._server.send(members, dict(message))

    # Decisions, in the main thread.

    def _decide(self) -> None:
        """Drop a generation that is not right any more, and prepare the next one."""
        self._gone &= self._desired.keys()
        wanted = {job: n for job, n in self._desired.items() if job not in self._gone}
        if self._pending is not None and (why := self._objection(self._pending, wanted)):
            self._drop(why)
        if self._pending is None:
            members = next_members(self._members, desired=wanted, present=self._present)
            if members is not None:
                self._prepare(members)

    def _objection(self, pending: FormingGroup, wanted: Mapping[str, int]) -> str:
        """Return why the generation that is being formed is not right, or ""."""
        if self._failure:
            return self._failure
        if self._lost & set(pending.generation.members):
            return "a member is lost"
        planned, present = pending.generation.companions, self._members.companions
        returning = [job for job in present.keys() - planned.keys() if job in wanted]
        if returning or not planned.keys() <= wanted.keys():
            return "other companions are desired"
        return ""

    def _prepare(self, members: tuple[str, ...]) -> None:
        now = self._members.members
        generation = self._next_generation(members, tuple(m for m in members if m not in now))
        self._pending = self._form(generation, self._on_formed)
        message = {"prepare": generation.to_wire(), "recoveries": self._recoveries}
        self._send({*members, *now} - set(generation.newcomers), message)
        if generation.newcomers:
            message["rows"] = describe(self._training.export()[0])
            self._send(set(generation.newcomers), message)

    def _next_generation(
        self, members: tuple[str, ...], newcomers: tuple[str, ...] = ()
    ) -> Generation:
        self._last_number += 1
        self._awaited, self._formed, self._failure = self._last_number, set(), ""
        return Generation(self._last_number, members, newcomers)

    def _drop(self, why: str) -> None:
        assert self._pending is not None
        generation = self._pending.generation
        self._pending.give_up(wait=False)
        self._pending = None
        self._send(set(generation.members), {"drop": generation.number})
        self._reporter.send_group(dropped=generation.number, why=why)
        self._failure = ""

    def _stands(self, forming: FormingGroup) -> bool:
        others = set(forming.generation.members) - {self.name}
        return forming.world is not None and others <= self._formed

    # Recovery, in the main thread.

    def _wait_for_steps(self, number: int) -> None:
        """Wait until every member has reported its last step, or is lost."""
        begun = time.monotonic()
        members, leaving = set(self._members.members), self._leaving
        steps = self._steps[number]

        def known() -> bool:
            lost = self._lost
            return bool((members | leaving) & lost) and members <= lost | steps.keys()

        while not known():
            self._wait(known, 0.2)
            waited_s = time.monotonic() - begun
            if self._signals.stop and waited_s > PEERS_END_S:
                exit_now(STOPPED)
            if members <= steps.keys() and waited_s > _UNEXPLAINED_S:
                self._fail(self._rank_group.guard.last_error or "a collective failed")
        if ended := [m for m in members & self._lost if job_of(m) == job_of(self.name)]:
            self._fail(f"rank {ended[0]} of the base has ended")

    def _continue_with_survivors(self, number: int) -> None:
        """Form the next generation, and continue after the last step of the furthest member.

        Raises:
            GroupBrokenError: a further member is lost.
        """
        with self._changed:
            if self._pending is not None:
                self._drop("a member is lost")
            self._begin_recovery(number)
            former, leaving, self._leaving = self._members, self._leaving, frozenset()
            excluded = self._gone | {job_of(m) for m in self._lost}
            kept = {job_of(self.name), *(self._desired.keys() - excluded)}
            generation = self._next_generation(
                tuple(m for m in former.members if job_of(m) in kept)
            )
            self.generation = generation
            steps = [self._steps[number][m] for m in generation.members]
            source, uneven = steps.index(max(steps)), min(steps) < max(steps)
            decision = {
                "decision": number,
                "generation": generation.to_wire(),
                "source": source,
                "uneven": uneven,
            }
            separated = {*former.members, *leaving} - set(generation.members)
            for member in separated:
                code = SEPARATED if job_of(member) in excluded else 0
                self._send({member}, decision | {"code": code})
                self._send({member}, {"go": True})
            self._send(set(generation.members), decision)
        forming = self._form(generation, self._on_formed)
        self._wait(lambda: self._stands(forming) or self._alarmed or self._failure)
        if self._failure:
            self._fail(f"the remaining ranks cannot connect: {self._failure}")
        self._rank_group.guard.check()
        self._send(set(generation.members), {"enter": generation.number})
        self._adopt(forming, recovered=True)
        if uneven:
            self._even_out(forming, source)

    def _fail(self, reason: str) -> None:
        with self._signals.tolerate_ending_peers():
            raise RuntimeError(f"rank 0: {reason}; look for an error of another rank above")

    # Reports, in the main thread.

    def _set_result(self, former: Generation) -> None:
        generation = self._members
        left = former.companions.keys() - generation.companions.keys()
        joined = generation.companions.keys() - former.companions.keys()
        step = self._training.cursor.step
        self._result = {
            "generation": generation.number,
            "companions": generation.companions,
            "step": step,
            "lost": sorted(left & self._desired.keys(), key=int),
        }
        changes = [f"{job} joined" for job in sorted(joined)]
        changes += [f"{job} {'lost' if job in self._desired else 'left'}" for job in sorted(left)]
        log_line(
            f"continues after step {step} with {len(generation.members)} rank(s)"
            f" ({', '.join(changes) or 'the same ones'})"
        )

    def _send_result(self) -> None:
        if self._result is not None:
            result, self._result = self._result, None
            begun, self._paused_at = self._paused_at or time.monotonic(), None
            self._reporter.send_group(**result, pause_s=time.monotonic() - begun)

    # Messages and losses, in the server's thread.

    def _handle(self, member: str, message: dict[str, Any]) -> None:
        with self._changed:
            if "hello" in message:
                self._present.add(member)
            elif "formed" in message:
                self._on_member_formed(member, message["formed"])
            elif "ready" in message:
                if message["training"] == self._fingerprint:
                    self._on_member_formed(member, message["ready"])
                else:
                    self._refuse(job_of(member), "it runs another training than rank 0")
            elif "failed" in message:
                self._on_failure(message["failed"], str(message["why"]))
            elif "leave" in message:
                self._gone.add(job_of(member))
            elif "in" in message:
                self._arrive(member, message["in"])
            elif "broken" in message:
                self._steps.setdefault(message["broken"], {})[member] = message["step"]
                if member in {*self._members.members, *self._leaving}:
                    self._sound_alarm(message["broken"])
            self._news = True
            self._changed.notify_all()

    def _on_loss(self, member: str) -> None:
        with self._changed:
            self._present.discard(member)
            self._lost.add(member)
            if job_of(member) != job_of(self.name):
                self._refuse(job_of(member), "another rank of its companion has ended")
            if not self._closed and member in {*self._members.members, *self._leaving}:
                self._sound_alarm(self._recoveries + 1)
            self._news = True
            self._changed.notify_all()

    def _on_member_formed(self, member: str, number: int) -> None:
        if number == self._awaited:
            self._formed.add(member)

    def _on_formed(self, forming: FormingGroup) -> None:
        with self._changed:
            if forming.error is not None:
                self._on_failure(forming.generation.number, forming.error)
            self._news = True
            self._changed.notify_all()

    def _on_failure(self, number: int, why: str) -> None:
        """Give a generation up that a member cannot form; after some attempts, its newcomers."""
        if number != self._awaited or self._failure:
            return
        self._failure = why or "unknown"
        newcomers = self._pending.generation.newcomers if self._pending else ()
        for job in {job_of(m) for m in newcomers}:
            self._failures[job] = self._failures.get(job, 0) + 1
            if self._failures[job] >= _ATTEMPTS:
                self._refuse(job, f"ranks cannot connect: {why}")

    def _refuse(self, job: str, reason: str) -> None:
        self._gone.add(job)
        waiting = self._present - {*self._members.members, *self._leaving}
        self._send({m for m in waiting if job_of(m) == job}, {"refused": reason})

    def _arrive(self, member: str, number: int) -> None:
        """Let those go that leave, once all others have ended the last step with them."""
        with self._changed:
            self._arrived.setdefault(number, set()).add(member)
            now = self._members
            staying = set(now.members) - set(now.newcomers)
            if self._leaving and staying <= self._arrived.get(now.number, set()):
                self._send(set(self._leaving), {"go": True})
                self._leaving = frozenset()

    def _sound_alarm(self, number: int) -> None:
        """Announce to all members that a recovery is needed, if it is not under way."""
        with self._changed:
            if number > max(self._alarm, self._recoveries):
                self._raise_alarm(number)
                self._send({*self._members.members, *self._leaving}, {"alarm": number})
