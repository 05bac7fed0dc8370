"""Ranks of a script that communicates by itself, connected for control values only.

The script's own process group carries its gradients. Control values go over a
separate group, on the CPU (gloo): it neither waits for a GPU nor mixes with the script's
collectives. Without a process group of the script, one is made from `RANK`, `WORLD_SIZE`,
`MASTER_ADDR` and `MASTER_PORT`, which the script may then use.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from slurm_elastic.training.ranks import nccl_groups
from slurm_elastic.training.ranks.process_group import RankGroup, StoreChannel
from slurm_elastic.training.ranks.torch_compat import settle_collectives

#: Time for which a rank waits for the slowest one at a boundary; rank 0 may evaluate alone before
#: it.
_PATIENCE = timedelta(hours=2)
_LEAVE_S = 60.0
_KEYS = itertools.count()


class ControlGroup(RankGroup):
    """All ranks of an attempt; see `RankGroup`. The constructor is collective.

    Attributes:
        owned: whether this group, and not the script, has made torch's process group.

    Args:
        may_change: ranks may join and leave: torch has a process group then also on a single rank,
            and on one that is to join, which is alone in it until then.
    """

    with_control = True

    def __init__(self, *, may_change: bool = False) -> None:
        self.owned = not (distributed.is_available() and distributed.is_initialized())
        super().__init__()
        served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        if self.owned and served and self.size > 1:
            # torchrun itself serves the store, at the port where rank 0 would.
            distributed.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            self._use_existing_group()
        elif self.owned:
            self.connect()
            self.join()
        else:
            self._use_existing_group()
        self._control: Any = None
        if self.companion or (self.owned and may_change and self.size == 1):
            self._make_own_group()
        elif self.size > 1:
            self._control = distributed.new_group(backend="gloo", timeout=_PATIENCE)

    def _make_own_group(self) -> None:
        distributed.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=distributed.HashStore(),
            rank=0,
            world_size=1,
        )

    @property
    def has_other_groups(self) -> bool:
        """Whether the script has made process groups."""
        own = {distributed.group.WORLD, self._control}
        # Not public, but the only list of them.
        return not self.owned or any(
            group not in own
            for group in distributed.distributed_c10d._world.pg_map  # noqa: SLF001
        )

    def _select_device(self) -> None:
        if self.owned:
            super()._select_device()
        elif torch.cuda.is_available() and torch.cuda.is_initialized():
            self.device = torch.device("cuda", torch.cuda.current_device())

    def _use_existing_group(self) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        # Not public, but the only way to the store of a group that another has made.
        store = distributed.distributed_c10d._get_default_store()  # noqa: SLF001
        self._store = distributed.PrefixStore(f"slurm-elastic/{next(_KEYS)}", store)
        self._store_ready.set()

    def open_channel(self) -> StoreChannel:
        """See `RankGroup`."""
        # Once a group has begun nothing blocks on its store, so that threads may share it.
        return StoreChannel(self._ready())

    def total(self, values: Sequence[float]) -> list[float]:
        """Return the sums of these values over all ranks.

        Raises:
            GroupBrokenError: a companion is lost.
            LinkError: another rank has ended.
        """
        if self._control is None:
            return list(values)
        self._check_collectives()
        sums = torch.tensor(values, dtype=torch.float64)
        begin = partial(distributed.all_reduce, sums, group=self._control, async_op=True)
        self.guard.run(begin, sums, "agreeing on what to do after a step")
        return list(sums.tolist())

    def _check_collectives(self) -> None:
        """Wait for the script's collectives, where one that fails does not end the process.

        Raises: as of `total`.
        """
        if self.device.type == "cuda" and nccl_groups.may_change():
            last = torch.zeros(1, device=self.device)
            begin = partial(distributed.all_reduce, last, async_op=True)
            self.guard.run(begin, last, "adding up gradients")

    def differs(self, values: torch.Tensor) -> float:
        """Return the largest difference of these values from those of rank 0, on any rank.

        Args:
            values: float32 on the CPU, of the same shape on all ranks.
        """
        if self._control is None:
            return 0.0
        control, operation = self._control, "comparing the weights"
        first = values.clone()
        begin = partial(distributed.broadcast, first, src=0, group=control, async_op=True)
        self.guard.run(begin, first, operation)
        # NaN is the same on all ranks, or is found by the script itself.
        largest = (values - first).abs().nan_to_num(0.0).max().reshape(1)
        most = distributed.ReduceOp.MAX
        begin = partial(distributed.all_reduce, largest, op=most, group=control, async_op=True)
        self.guard.run(begin, largest, operation)
        return float(largest)

    def replace(self, world: Any, *, rank: int, size: int, control: Any = None) -> None:
        """See `RankGroup`."""
        super().replace(world, rank=rank, size=size)
        self._control = control

    def leave(self) -> None:
        """Wait for the other ranks; a process group of the script stays."""
        if self._replaced:
            self.barrier("leave", _LEAVE_S)
            self._end_default()
            return
        if self.size == 1:
            return
        self.barrier("leave", _LEAVE_S)
        settle_collectives()
        if self.owned:
            distributed.destroy_process_group()
