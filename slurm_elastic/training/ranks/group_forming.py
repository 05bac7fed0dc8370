"""Process groups that are formed while another one is in use, and then replace it.

A group with a dead member is never destroyed: that would wait forever for collectives that are
still running. Its object is kept until the process ends.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import distributed_c10d

from slurm_elastic.training.ranks import nccl_groups
from slurm_elastic.training.ranks.generation import Generation

#: Seconds that a collective waits for a member that runs but does not call it; torch's default.
_TIMEOUT = timedelta(minutes=30)
#: More than the groups that are made in one generation.
_GROUPS = 100_000


class FormingGroup:
    """Process groups of a generation, formed in a thread.

    Args:
        generation: members and number of the new groups.
        member: name of this process.
        open_store: opens a connection of its own to the store.
        device: "cpu": gloo, "cuda": NCCL.
        on_done: called in the thread when the groups are formed, or have failed.
        with_control: form `control`, too.

    Attributes:
        generation: as given.
        error: why it failed, or None.
        world: process group of all members; None: not formed yet.
        transfer: on rank 0 and the newcomers, the group of these, over which they receive the
            state.
        control: a second one of all members, on CPUs; None: not requested.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        member: str,
        open_store: Callable[[], Any],
        device: torch.device,
        on_done: Callable[[FormingGroup], None],
        with_control: bool = False,
    ) -> None:
        self.generation = generation
        self.error: str | None = None
        self.world: Any = None
        self.transfer: Any = None
        self.control: Any = None
        self._with_control = with_control
        self._member, self._open_store, self._device = member, open_store, device
        self._on_done = on_done
        #: Groups that NCCL connects.
        self._made: list[Any] = []
        self._given_up = False
        threading.Thread(target=self._run, name="forming", daemon=True).start()

    @property
    def rank(self) -> int:
        """Rank of this process."""
        return self.generation.members.index(self._member)

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.generation.members)

    def release(self) -> None:
        """Free the resources of the groups; their collectives have ended on all members."""
        self.give_up(wait=False)
        if self._device.type == "cpu":
            self._destroy(self.world, self.transfer)
        self._destroy(self.control)
        self.world = self.transfer = self.control = None

    def give_up(self, *, wait: bool) -> None:
        """End collectives of the groups that would keep a GPU busy.

        Args:
            wait: return only when it has ended.

        Raises:
            RuntimeError: it did not end.
        """
        self._given_up = True
        made, self._made = self._made, []
        if made:
            within_s = nccl_groups.ABORT_S if wait else 0.0
            nccl_groups.abort(made, self._device, within_s=within_s)

    @staticmethod
    def _destroy(*groups: Any) -> None:
        for group in filter(None, groups):
            distributed.destroy_process_group(group)
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(group))

    def _run(self) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            prefix = f"generation/{self.generation.number}"
            store = distributed.PrefixStore(prefix, self._open_store())
            world = self._connected(store, self.rank, self.size, f"{prefix}/world")
            receivers = (self.generation.members[0], *self.generation.newcomers)
            if self.generation.newcomers and self._member in receivers:
                rank = receivers.index(self._member)
                self.transfer = self._connected(store, rank, len(receivers), f"{prefix}/transfer")
            if self._with_control:
                cpu = torch.device("cpu")
                self.control = _form(store, self.rank, self.size, cpu, f"{prefix}/control")
            self.world = world
        except Exception as error:  # noqa: BLE001 - it would end with the thread
            self.error = (str(error).strip().splitlines() or [repr(error)])[0]
        self._on_done(self)

    def _connected(self, store: Any, rank: int, size: int, name: str) -> Any:
        """Form a group on the training's device, whose ranks are connected; return it."""
        group = _form(store, rank, size, self._device, name)
        if self._device.type == "cuda":
            self._made.append(group)
            if self._given_up:
                self.give_up(wait=False)
            nccl_groups.connect(group, self._device)
        return group


def _form(store: Any, rank: int, size: int, device: torch.device, name: str) -> Any:
    """Return a process group; all its ranks call this."""
    # Not public; `init_process_group` makes its group by it, and can do so only once.
    group, _ = distributed_c10d._new_process_group_helper(  # noqa: SLF001
        size,
        rank,
        [],
        "nccl" if device.type == "cuda" else "gloo",
        store,
        group_name=f"slurm-elastic/{name}",
        timeout=_TIMEOUT,
        # Without `device_id`: while the default group has one, further groups are split from it,
        # which waits for all its ranks, also for those that leave.
    )
    distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}  # noqa: SLF001
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    return group


def supported() -> bool:
    """Return whether this release of torch can form a group beside another one."""
    needed = ("_new_process_group_helper", "_update_default_pg", "_world")
    return distributed.is_available() and all(hasattr(distributed_c10d, n) for n in needed)


def number_groups(generation: int) -> None:
    """Let groups that are made from now on have the same names on all members of a generation.

    torch counts them in each process, and those that have joined have made fewer.
    """
    distributed_c10d._world.group_count = generation * _GROUPS  # noqa: SLF001


def make_default(group: Any) -> None:
    """Make a group the default one of torch.distributed; None: there is none any more."""
    distributed_c10d._update_default_pg(group)  # noqa: SLF001


def keep_default() -> None:
    """Keep the present default group until the process ends."""
    if distributed.is_initialized():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(distributed.group.WORLD))
