"""Changes of the group of ranks while a training runs, as one rank takes part in them.

rank 0 alone decides (`regroup_leader`); the others follow (`regroup_member`). Everything that this
rank does to its training happens in its main thread, between two steps; messages arrive in
another thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch

from slurm_elastic.training.ranks import group_forming
from slurm_elastic.training.ranks.generation import Generation
from slurm_elastic.training.ranks.group_forming import FormingGroup
from slurm_elastic.training.ranks.group_guard import GroupBrokenError
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.state_broadcast import Broadcast, receive_state, send_state
from slurm_elastic.training.sampler import Cursor

#: Key of the store under which rank 0 publishes the address of `MemberServer`.
ADDRESS_KEY = "regroup"
#: Seconds after which a wait for another thread lets signal handlers run.
_POLL_S = 0.2
#: Exit code of a companion's rank that is separated from the training.
SEPARATED = 1
#: Steps after a change until former groups are destroyed.
_RELEASE_STEPS = 20
#: Step that a member reports that has no complete state.
NO_STATE = -1


class ChangingTraining(Protocol):
    """One rank's training, for changes of its group.

    Attributes:
        cursor: after the last step.
    """

    @property
    def cursor(self) -> Cursor:
        """Position after the last step."""

    def rescue(self) -> bool:
        """Save the state after the last step from this rank alone, as rank 0 is lost.

        Returns:
            Whether this rank has saved: not if that is not safe, or there is such a checkpoint.

        Raises:
            CheckpointError: it has failed.
        """

    def fingerprint(self) -> int:
        """Return a checksum that is equal in all ranks of one training."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of the models, under the names of a checkpoint."""

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return everything that another rank needs to continue after the last step."""

    def take_over(
        self, flat: Mapping[str, torch.Tensor], values: Mapping[str, Any], *, joins: bool
    ) -> None:
        """Continue from the state that another rank has exported.

        Args:
            flat: its tensors by name.
            values: its JSON values; "cursor" is step, epoch and samples of its position.
            joins: this rank has none of its own yet.
        """

    def resize(self, *, fresh: bool) -> None:
        """Follow the group, which has other ranks now.

        Args:
            fresh: collectives of the former group may still write to the memory they were given.
        """


class Regrouping(Protocol):
    """Part of one rank in the changes of its group.

    Attributes:
        generation: the present group; None while no change is possible.
    """

    generation: Generation | None

    def attach(self, training: ChangingTraining, obstacle: str) -> None:
        """Set the training, and the code of the reason why nothing can change, or ""."""

    def begin(self) -> None:
        """Prepare for changes, after the first step of an attempt."""

    def join(self) -> None:
        """Receive the state, on a rank that joins; returns when it belongs to the group."""

    def requested(self) -> float:
        """Return the number of the generation that this rank requests to continue in, or 0."""

    def pause(self) -> None:
        """Note that training stands still from now on, until the next step."""

    def postpone(self, why: str) -> None:
        """Give the next generation up for some time, between two steps."""

    def switch(self, number: int) -> None:
        """Continue in the next generation, between two steps; a rank that leaves ends here.

        Raises:
            GroupBrokenError: a member is lost meanwhile.
        """

    def recover(self) -> None:
        """Continue without the members that are lost, after a `GroupBrokenError`.

        Raises:
            RuntimeError: that is not possible.
        """

    def close(self) -> None:
        """End all changes, as the training is complete."""


def wait_for_arrival(regrouping: Regrouping, collective: Callable[[], object]) -> None:
    """Wait until all ranks of a new group have arrived; those that are lost meanwhile are left out.

    Args:
        regrouping: of this rank.
        collective: any one of all ranks of the present group; it is repeated after a loss.
    """
    while True:
        try:
            collective()
        except GroupBrokenError:
            regrouping.recover()
        else:
            return


class GroupMember:
    """Common part of leader and members in changes of their group.

    Args:
        rank_group: the ranks.

    Attributes:
        name: of this process among the members.
    """

    _training: ChangingTraining

    def __init__(self, rank_group: RankGroup) -> None:
        self.generation: Generation | None = None
        self.name = _member_name(rank_group)
        self._rank_group = rank_group
        self._obstacle = ""
        self._changed = threading.Condition()
        #: Recoveries that this rank has begun, and the newest alarm, which requests the next one.
        self._recoveries = self._alarm = 0
        self._has_state = not rank_group.companion
        #: Memory for the state that this rank is to receive.
        self._reserved: dict[str, torch.Tensor] = {}
        #: The present group and those before it that can be destroyed, from this step on.
        self._groups: list[FormingGroup] = []
        self._release_step = 0

    def attach(self, training: ChangingTraining, obstacle: str) -> None:
        """See `Regrouping`."""
        self._training, self._obstacle = training, obstacle

    @property
    def _alarmed(self) -> bool:
        return self._alarm > self._recoveries

    @property
    def _step(self) -> int:
        return self._training.cursor.step if self._has_state else NO_STATE

    def _form(
        self, generation: Generation, on_done: Callable[[FormingGroup], None]
    ) -> FormingGroup:
        return FormingGroup(
            generation,
            member=self.name,
            open_store=self._rank_group.open_store,
            device=self._rank_group.device,
            on_done=on_done,
            with_control=self._rank_group.with_control,
        )

    def _adopt(self, formed: FormingGroup, *, recovered: bool = False) -> None:
        self._rank_group.guard.on = True
        self.generation = formed.generation
        group_forming.number_groups(formed.generation.number)
        self._rank_group.replace(
            formed.world, rank=formed.rank, size=formed.size, control=formed.control
        )
        self._training.resize(fresh=recovered)
        self._groups.append(formed)
        self._release_step = self._training.cursor.step + _RELEASE_STEPS

    def _release_former(self) -> None:
        """Destroy groups whose last collective is long over: each has threads and connections."""
        if len(self._groups) > 1 and self._training.cursor.step >= self._release_step:
            *former, present = self._groups
            self._groups = [present]
            for group in former:
                group.release()

    def _broadcast(
        self, group: Any, source: int, *, given_up: Callable[[], bool] = lambda: False
    ) -> Broadcast:
        """Return a broadcast from one rank of a group, which may break."""

        def run(tensor: torch.Tensor) -> None:
            options = torch.distributed.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            self._rank_group.guard.run(
                partial(group.broadcast, [tensor], options),
                tensor,
                "passing the state of the training on",
                given_up=given_up,
            )

        return run

    def _send_state(self, broadcast: Broadcast) -> None:
        flat, values = self._training.export()
        send_state(broadcast, flat, values, self._rank_group.device)

    def _receive_state(self, broadcast: Broadcast) -> tuple[dict[str, torch.Tensor], Any]:
        # A rank that has a state keeps it until the new one is complete.
        live = {} if self._has_state else self._training.tensors() | self._reserved
        return receive_state(broadcast, live, self._rank_group.device)

    def _even_out(self, formed: FormingGroup, source: int) -> None:
        """Pass the state of the furthest member on to those that are behind."""
        broadcast = self._broadcast(formed.world, source)
        if formed.rank == source:
            self._send_state(broadcast)
            return
        flat, values = self._receive_state(broadcast)
        if values["cursor"][0] != self._step:
            self._training.take_over(flat, values, joins=not self._has_state)
            self._has_state = True

    def _wait(self, condition: Callable[[], object], timeout_s: float = float("inf")) -> None:
        """Wait until a condition holds that another thread may change; hold no lock."""
        remaining_s = timeout_s
        with self._changed:
            while not condition() and remaining_s > 0:
                # Never without a timeout: see `RankGroup.join`.
                self._changed.wait(min(_POLL_S, remaining_s))
                remaining_s -= _POLL_S

    def _raise_alarm(self, number: int) -> None:
        with self._changed:
            self._alarm = max(self._alarm, number)
            self._show_alarm()

    def _begin_recovery(self, number: int) -> None:
        for group in self._groups:
            group.give_up(wait=True)
        self._groups.clear()  # what they still do has no end
        with self._changed:
            self._recoveries = number
            self._show_alarm()

    def _show_alarm(self) -> None:
        alarm = self._rank_group.guard.alarm
        if self._alarmed:
            alarm.set()
        else:
            alarm.clear()
        self._changed.notify_all()


def _member_name(rank_group: RankGroup) -> str:
    """Return the name of this process among the members."""
    if rank_group.companion:
        return f"{rank_group.companion}.{os.environ.get('SLURM_PROCID', '0')}"
    return f"{os.environ.get('SLURM_JOB_ID', '0')}.{rank_group.rank}"
