"""Changes of the group on all ranks but 0, which follow its messages."""

from __future__ import annotations

import json
import os
import time
from typing import Any

from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from slurm_elastic.training.checkpoint.checkpoint_coordinator import CheckpointError
from slurm_elastic.training.env_directive import set_directive
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.ranks.generation import Generation
from slurm_elastic.training.ranks.group_forming import FormingGroup
from slurm_elastic.training.ranks.group_guard import GroupBrokenError
from slurm_elastic.training.ranks.process_group import JOIN_S, RankGroup
from slurm_elastic.training.regroup.member_link import MemberLink
from slurm_elastic.training.regroup.regrouping import ADDRESS_KEY, SEPARATED, GroupMember
from slurm_elastic.training.regroup.state_broadcast import Row, reserve
from slurm_elastic.training.signals import Signals, exit_now

#: Seconds for which a rank that leaves waits until all others have ended the last step with it.
_LEAVE_S = 2.0
#: Seconds within which a companion's rank has to save when rank 0 is lost.
_RESCUE_S = 9.0


class RegroupMember(GroupMember):
    """A rank that follows rank 0 in all changes; see `Regrouping`.

    Args:
        rank_group: all ranks.
        signals: a companion that gets SIGTERM leaves the training.
    """

    def __init__(self, rank_group: RankGroup, *, signals: Signals) -> None:
        super().__init__(rank_group)
        self._signals = signals
        self._link: MemberLink | None = None
        self._prepared: dict[int, Generation] = {}
        self._forming: dict[int, FormingGroup] = {}
        self._dropped: set[int] = set()
        #: Forms of the tensors of the state.
        self._rows: list[Row] = []
        self._decisions: dict[int, dict[str, Any]] = {}
        self._entered: set[int] = set()
        self._may_go = self._says_leave = self._closed = self._ended = False
        self._refusal = ""

    def greet(self) -> None:
        """Connect to rank 0 and take over its directive, on a rank that joins.

        Raises:
            RuntimeError: no rank can join.
        """
        text = self._rank_group.wait_for(ADDRESS_KEY, JOIN_S)
        if not text:
            raise RuntimeError(
                f"{JOIN_VARIABLE}: {self._rank_group.companion} is invalid: expected a training"
                " whose ranks can change while it runs"
            )
        self._rank_group.guard.on = True
        set_directive(self._connect(text)["directive"])

    def begin(self) -> None:
        """See `Regrouping`."""
        if self._rank_group.companion or self._obstacle:
            return
        if text := self._rank_group.wait_for(ADDRESS_KEY, JOIN_S):
            self.generation = Generation.from_wire(self._connect(text)["generation"])

    def join(self) -> None:
        """See `Regrouping`."""
        while not self._has_state:
            forming = self._next_forming()
            try:
                self._receive_from(forming)
            except GroupBrokenError:
                self._wait_for_news(forming.generation.number)
                if self._alarmed:
                    self.recover()

    def requested(self) -> float:
        """See `Regrouping`."""
        self._release_former()
        if self._rank_group.companion and self._signals.stop and not self._says_leave:
            self._says_leave = True
            self._send({"leave": True})
        return 0.0

    def pause(self) -> None:
        """See `Regrouping`."""

    def postpone(self, why: str) -> None:
        """See `Regrouping`."""

    def switch(self, number: int) -> None:
        """See `Regrouping`."""
        self._wait(lambda: number in self._prepared)
        if self.name not in self._prepared[number].members:
            self._leave(0)
        self._adopt(self._forming.pop(number))
        self._send({"in": number})

    def recover(self) -> None:
        """See `Regrouping`."""
        while not self._recovered(self._recoveries + 1):
            pass

    def close(self) -> None:
        """See `Regrouping`."""
        self._closed = True

    def _receive_from(self, forming: FormingGroup) -> None:
        """Wait until training switches to this generation, and receive the state.

        Raises:
            GroupBrokenError: the generation is dropped, or a member is lost.
        """
        number = forming.generation.number
        if not self._reserved:
            self._reserved = reserve(self._rows, self._training.tensors())
        self._send({"ready": number, "training": self._training.fingerprint()})
        broadcast = self._broadcast(forming.transfer, 0, given_up=lambda: number in self._dropped)
        flat, values = self._receive_state(broadcast)
        self._adopt(forming)
        self._training.take_over(flat, values, joins=True)
        self._has_state = True
        self._reserved.clear()

    def _recovered(self, number: int) -> bool:
        """Take part in one recovery; return whether it has succeeded."""
        self._send({"broken": number, "step": self._step})
        self._wait(lambda: number in self._decisions or self._may_go or self._ended)
        if number not in self._decisions:
            if self._ended:
                self._end_with_rank_0()
            self._leave(0)
        decision = self._decisions[number]
        self._begin_recovery(number)
        generation = Generation.from_wire(decision["generation"])
        if self.name not in generation.members:
            self._leave(decision["code"])
        try:
            formed = self._enter(generation)
            self._adopt(formed, recovered=True)
            if decision["uneven"]:
                self._even_out(formed, decision["source"])
        except GroupBrokenError:
            return False
        return True

    def _wait_for_news(self, number: int) -> None:
        """Wait for the reason from rank 0 why receiving the state in this generation has failed."""
        self._wait(lambda: number in self._dropped or self._alarmed or self._ended)

    def _enter(self, generation: Generation) -> FormingGroup:
        """Form a generation with the survivors, who all wait for it."""
        number = generation.number
        forming = self._form(generation, self._on_formed)
        self._wait(lambda: number in self._entered or self._ended or self._alarmed)
        if self._ended:
            self._end_with_rank_0()
        self._rank_group.guard.check()
        return forming

    def _connect(self, text: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(text)
        self._link = MemberLink(
            (os.environ["MASTER_ADDR"], facts["port"]),
            token=facts["token"],
            name=self.name,
            on_message=self._handle,
            on_end=self._on_end,
        )
        return facts

    def _next_forming(self) -> FormingGroup:
        """Return a generation with this rank that stands and is not dropped."""

        def standing() -> list[FormingGroup]:
            return [f for n, f in self._forming.items() if f.world and n not in self._dropped]

        self._wait(lambda: standing() or self._refusal)
        if self._refusal:
            log_line(f"rank {self.name} cannot join: {self._refusal}")
            exit_now(SEPARATED)
        return standing()[-1]

    def _handle(self, message: dict[str, Any]) -> None:
        """Handle a message of rank 0, in the link's thread."""
        with self._changed:
            if "prepare" in message:
                self._rows = message.get("rows", [])
                self._prepare(Generation.from_wire(message["prepare"]), message["recoveries"])
            elif "drop" in message:
                self._dropped.add(message["drop"])
                if dropped := self._forming.pop(message["drop"], None):
                    dropped.give_up(wait=False)
            elif "alarm" in message:
                self._raise_alarm(message["alarm"])
            elif "decision" in message:
                self._decisions[message["decision"]] = message
            elif "enter" in message:
                self._entered.add(message["enter"])
            elif "refused" in message:
                self._refusal = message["refused"]
            elif "go" in message:
                self._may_go = True
            self._changed.notify_all()

    def _prepare(self, generation: Generation, recoveries: int) -> None:
        self._prepared[generation.number] = generation
        if not self._has_state:
            self._begin_recovery(recoveries)
        if self.name in generation.members:
            self._forming[generation.number] = self._form(generation, self._on_formed)

    def _on_formed(self, forming: FormingGroup) -> None:
        number = forming.generation.number
        if forming.error is not None:
            self._send({"failed": number, "why": forming.error})
        elif self.name not in forming.generation.newcomers:
            self._send({"formed": number})
        with self._changed:
            self._changed.notify_all()

    def _on_end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        # A rank of the base ends with its step.
        if self._rank_group.companion and not self._closed:
            if self._has_state:
                # The main thread gives its collective up, may save, and exits.
                self._raise_alarm(self._recoveries + 1)
                time.sleep(_RESCUE_S)
            self._fail("rank 0 has ended or is not reached any more")

    def _send(self, message: dict[str, Any]) -> None:
        if self._link is not None:
            self._link.send(message)

    def _leave(self, code: int) -> None:
        """End this rank, which does not belong to the training any more."""
        self._closed = True
        self._wait(lambda: self._may_go or self._ended, _LEAVE_S)
        log_line(f"rank {self.name} leaves the training after step {self._training.cursor.step}")
        exit_now(code)

    def _end_with_rank_0(self) -> None:
        """Save, in a companion's rank, what no rank of the base can save any more; then end."""
        if self._rank_group.companion and self._has_state:
            step = self._training.cursor.step
            try:
                if self._training.rescue():
                    log_line(f"rank {self.name}: rank 0 is lost; saved step {step}")
            except CheckpointError as error:
                log_line(f"rank {self.name}: rank 0 is lost, saving step {step} failed: {error}")
        self._fail("rank 0 has ended")

    def _fail(self, reason: str) -> None:
        if self._rank_group.companion:
            log_line(f"rank {self.name}: {reason}; its companion job ends")
            exit_now(SEPARATED)
        with self._signals.tolerate_ending_peers():
            raise RuntimeError(f"rank {self.name}: {reason}; look for its error above")
