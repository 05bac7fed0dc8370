"""Parts of a script's own loop that change with its ranks, or that ranks receive that join."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from slurm_elastic.training.checkpoint.object_state import ObjectState
from slurm_elastic.training.dealt_split import DealtSplit
from slurm_elastic.training.job_log import log_line
from slurm_elastic.training.loop.loop_position import LoopPosition
from slurm_elastic.training.ranks.control_group import ControlGroup
from slurm_elastic.training.regroup.ddp_wrappers import (
    all_wrappers,
    follow_group,
    wrapper_obstacle,
)
from slurm_elastic.training.regroup.obstacles import in_place_obstacle
from slurm_elastic.training.reporting import Reporter, share_fields
from slurm_elastic.training.sampler import Cursor


class LiveLoop:
    """One rank's part of a script's own loop; see `ChangingTraining`.

    Args:
        control_group: all ranks.
        position: of the loop.
        state: everything of a checkpoint.
        kept: functions that return further JSON values of a checkpoint, by name.
        split: follows the number of ranks.
        reporter: follows it, too.
        optimizers: of the script.
        global_batch, seed: as of the loop.
    """

    def __init__(
        self,
        *,
        control_group: ControlGroup,
        position: LoopPosition,
        state: ObjectState,
        kept: Mapping[str, Callable[[], Any]],
        split: DealtSplit,
        reporter: Reporter,
        optimizers: Iterable[torch.optim.Optimizer],
        global_batch: int,
        seed: int,
    ) -> None:
        self._control_group, self._position = control_group, position
        self._state, self._kept, self._split, self._reporter = state, kept, split, reporter
        self._optimizers = list(optimizers)
        self._global_batch, self._seed = global_batch, seed

    @property
    def cursor(self) -> Cursor:
        """See `ChangingTraining`."""
        return self._position.cursor

    @property
    def is_consistent(self) -> bool:
        """Whether the objects are as after the last step."""
        return self._position.is_consistent

    def obstacle(self) -> str:
        """Return the code of the reason why the ranks cannot change, or ""; after a first step."""
        device = self._control_group.device
        return (
            in_place_obstacle(
                spatial=False,
                staged=False,
                sharded=self._state.sharded,
                profile=False,
                device=device,
            )
            or ("own-group" if self._control_group.has_other_groups else "")
            or wrapper_obstacle(self._optimizers)
            # The script divides by a number that would stay that of the former ranks.
            or ("" if self._position.weighed else "loss-weight")
        )

    def rescue(self) -> bool:
        """See `ChangingTraining`."""
        return False  # the script may be in the middle of an update

    def fingerprint(self) -> int:
        """See `ChangingTraining`."""
        shapes = {name: list(tensor.shape) for name, tensor in self.tensors().items()}
        numbers = [self._global_batch, self._split.micro, self._seed]
        return zlib.crc32(json.dumps([shapes, numbers, self._values()]).encode())

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `ChangingTraining`."""
        return {
            f"{name}.{key}": value
            for name, module in self._state.modules.items()
            for key, value in module.state_dict().items()
            if isinstance(value, torch.Tensor)
        }

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See `ChangingTraining`."""
        cursor = self.cursor
        values = {"cursor": [cursor.step, cursor.epoch, cursor.consumed]}
        return self._state.gather(), values

    def take_over(
        self, flat: Mapping[str, torch.Tensor], values: Mapping[str, Any], *, joins: bool
    ) -> None:
        """See `ChangingTraining`."""
        del joins
        self._state.restore(flat)
        self._position.move_to(Cursor(*values["cursor"]))

    def resize(self, *, fresh: bool) -> None:
        """See `ChangingTraining`."""
        del fresh  # the wrappers never use the memory of a former reduction
        group, split = self._control_group, self._split
        split.rank, split.world_size = group.rank, group.size
        for wrapper in all_wrappers():
            follow_group(wrapper)
        self._position.resizes += 1
        self._reporter.timer.restart()
        self._reporter.set_fields(
            gpus=group.size,
            layout=f"{group.size}x1",
            **share_fields(self._global_batch, group.size, split.micro),
        )
        if group.rank == 0 and (remark := split.remark(self._global_batch)):
            log_line(remark)

    def _values(self) -> dict[str, Any]:
        return {name: value() for name, value in self._kept.items()}
