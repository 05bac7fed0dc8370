"""The group of ranks of one attempt: connection, messages and collectives.

Slow operations that are not collectives (a save, a waiting job) are waited for
on the store, by polling: a rank blocked in a collective runs no signal handler.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from slurm_elastic.job.rank_socket import JOIN_VARIABLE
from slurm_elastic.training.ranks import group_forming, nccl_groups
from slurm_elastic.training.ranks.group_guard import GroupGuard, StartedCollective
from slurm_elastic.training.ranks.torch_compat import settle_collectives

#: Seconds for which ranks wait for each other to connect: starts may be minutes apart on a busy
#: file system.
JOIN_S = 600.0
_POLL_S = 0.25


class RankGroup:
    """All ranks of an attempt, as seen from one of them.

    Attributes:
        rank, size: from `RANK` and `WORLD_SIZE`; without them a single rank. They change with the
            group (`slurm_elastic.training.regroup`).
        companion: id of the job whose ranks join a running training, this one among them; "": of
            the base.
        nodes: number of nodes of the ranks; a companion counts as one.
        joins: this rank belongs to no group yet.
        device: of the model.
        guard: of all waits for other ranks.
        with_control: whether a group for control values is formed with each new group.
        prefix: of keys that ranks publish anew each time the model is divided among them.
    """

    with_control = False

    def __init__(self) -> None:
        self.prefix = ""
        self.rank = int(os.environ.get("RANK", "0"))
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.companion = os.environ.get(JOIN_VARIABLE, "")
        if self.companion and self.rank < 1:
            raise ValueError(
                f"RANK: {self.rank} is invalid: expected at least 1 where {JOIN_VARIABLE} is set,"
                " as rank 0 belongs to the base"
            )
        self.nodes = int(os.environ.get("SLURM_STEP_NUM_NODES", "1"))
        self.joins = bool(self.companion)
        self.device = torch.device("cpu")
        self._select_device()
        self.guard = GroupGuard()
        self._address = (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0")))
        self._replaced = False
        self._store: Any = None
        self._store_ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def _select_device(self) -> None:
        if torch.cuda.is_available():
            local = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
            torch.cuda.set_device(local)
            self.device = torch.device("cuda", local)
            nccl_groups.survive_failures()

    def connect(self) -> None:
        """Begin to connect in the background: restoring a checkpoint needs only the store."""
        if self.size > 1 or self.companion:
            self._thread = threading.Thread(target=self._connect, name="rendezvous", daemon=True)
            self._thread.start()

    def serve(self) -> int:
        """Return the port of the store, which a single rank opens for those that join."""
        if self.size == 1 and self._store is None:
            self._served = self._open_store(serve=True, address=("127.0.0.1", 0))
            self._address = ("127.0.0.1", self._served.port)
            self._store = self.open_store()
            self._store_ready.set()
        return self._address[1]

    def _connect(self) -> None:
        try:
            if self.companion:
                self._store = self.open_store()
                self._store_ready.set()
                return
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # each thread has one of its own, else GPU 0
            # The agent of torchrun serves the store at MASTER_PORT itself.
            has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
            for_group = self._open_store(serve=self.rank == 0 and not has_agent)
            # A second connection: a store serves one call at a time, and those of the group block,
            # without running signal handlers, until the last rank is there.
            self._store = self.open_store()
            self._store_ready.set()
            torch.distributed.init_process_group(
                "nccl" if self.device.type == "cuda" else "gloo",
                store=torch.distributed.PrefixStore("group", for_group),
                rank=self.rank,
                world_size=self.size,
            )
        except BaseException as error:  # noqa: BLE001 - raised again in the main thread by `join`
            self._failure = error
            self._store_ready.set()

    def open_store(self) -> Any:
        """Return a further connection to the store."""
        return self._open_store(serve=False)

    def _open_store(self, *, serve: bool, address: tuple[str, int] | None = None) -> Any:
        return torch.distributed.TCPStore(
            *(address or self._address),
            self.size,
            is_master=serve,
            timeout=timedelta(seconds=JOIN_S),
            wait_for_workers=False,
            # Debian's torch is built without libuv; esrun sets USE_LIBUV where there is one.
            use_libuv=os.environ.get("USE_LIBUV", "0") == "1",
        )

    def join(self) -> None:
        """Wait until all ranks are connected."""
        if self._thread is not None:
            # Never without a timeout: the handler of a signal that comes just before a wait for a
            # lock runs only after it.
            while self._thread.is_alive():
                self._thread.join(_POLL_S)
            self._thread = None
        self._check()

    def publish(self, key: str, value: str) -> None:
        """Store a value for the other ranks, which `wait_for` it."""
        if self.size > 1 or self._store is not None:
            self._ready().set(key, value)

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Return the value that some rank publishes under this key; None after the timeout.

        Raises:
            RuntimeError: rank 0, which serves the store, has ended.
            GroupBrokenError: another rank is lost.
        """
        return _poll(self._ready(), key, timeout_s, check=self.guard.check)

    def open_channel(self) -> StoreChannel:
        """Return a further connection to the store, for another thread."""
        self._ready()
        return StoreChannel(self.open_store(), prefix=self.prefix)

    def has_published(self, key: str) -> bool:
        """Return whether some rank has published a value under this key."""
        return bool(self._ready().check([key]))

    def barrier(self, key: str, timeout_s: float, *, size: int | None = None) -> None:
        """Wait until all ranks have called this, or until the timeout.

        Rank 0 returns last, because the store ends with it.

        Args:
            key: of this barrier alone.
            timeout_s: longest wait.
            size: number of ranks; None: all.
        """
        size = size or self.size
        if size == 1:
            return
        store = self._ready()
        end = time.monotonic() + timeout_s
        store.add(f"{key}/came", 1)
        while store.add(f"{key}/came", 0) < size and time.monotonic() < end:
            self.guard.check()
            time.sleep(0.01)
        store.add(f"{key}/left", 1)
        while self.rank == 0 and store.add(f"{key}/left", 0) < size:
            if time.monotonic() > end:
                return
            time.sleep(0.01)

    def broadcast(self, tensors: Iterable[torch.Tensor]) -> None:
        """Set the tensors of every rank to the values of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                begin = partial(torch.distributed.broadcast, tensor, src=0, async_op=True)
                self.guard.run(begin, tensor, "receiving the values of rank 0")

    def add_up(self, tensors: Iterable[torch.Tensor], operation: str) -> None:
        """Replace the tensors of every rank by their sums over all ranks.

        Raises:
            LinkError: another rank has ended.
            GroupBrokenError: another rank is lost, and the others may go on.
        """
        for tensor in tensors:
            self.guard.wait(self.start_sum(tensor, operation))

    def start_sum(self, tensor: torch.Tensor, operation: str) -> StartedCollective:
        """Start to replace a tensor of every rank by its sum; `guard.wait` must follow.

        All ranks start their sums in the same order.
        """
        begin = partial(torch.distributed.all_reduce, tensor, async_op=True)
        return self.guard.start(begin, tensor, operation)

    def replace(self, world: Any, *, rank: int, size: int, control: Any = None) -> None:
        """Use another process group from now on, which has been formed beside the present one.

        Args:
            world: the group.
            rank: of this process in it.
            size: number of its ranks.
            control: the group of the same ranks for control values.
        """
        del control
        if not self._replaced:
            group_forming.keep_default()
        self._replaced, self.joins = True, False
        group_forming.make_default(world)
        self.rank, self.size = rank, size
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size)}

    def leave(self) -> None:
        """End the group together with the other ranks."""
        self.barrier("leave", 60.0)
        if self._replaced:
            self._end_default()
        elif self.size > 1:
            settle_collectives()
            torch.distributed.destroy_process_group()

    def _end_default(self) -> None:
        """End the use of a group that has replaced the first one."""
        if self.device.type == "cuda":
            nccl_groups.abort([torch.distributed.group.WORLD], self.device)
        group_forming.make_default(None)

    def _ready(self) -> Any:
        while not self._store_ready.wait(_POLL_S):
            pass
        self._check()
        return self._store

    def _check(self) -> None:
        if self._failure is not None:
            reason = (str(self._failure).strip().splitlines() or [repr(self._failure)])[0]
            raise RuntimeError(
                f"rank {self.rank} of {self.size} cannot connect to the others at"
                f" {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {reason};"
                " look for an error of another rank above"
            ) from self._failure


class StoreChannel:
    """Messages between ranks, for one thread; a rank must not publish one key twice."""

    def __init__(self, store: Any, *, prefix: str = "") -> None:
        self._store, self._prefix = store, prefix

    def publish(self, key: str, value: str) -> None:
        """Store a value for the other ranks."""
        self._store.set(self._prefix + key, value)

    def wait_for(self, key: str, timeout_s: float) -> str | None:
        """Return the value that some rank publishes under this key; None after the timeout.

        Raises:
            RuntimeError: rank 0, which serves the store, has ended.
        """
        return _poll(self._store, self._prefix + key, timeout_s)


def _poll(
    store: Any, key: str, timeout_s: float, *, check: Callable[[], None] = lambda: None
) -> str | None:
    end = time.monotonic() + timeout_s
    pause = 0.001
    while not store.check([key]):
        check()
        if time.monotonic() > end:
            return None
        time.sleep(pause)
        pause = min(_POLL_S, pause * 2)
    return str(store.get(key).decode())
