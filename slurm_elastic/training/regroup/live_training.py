"""Parts of a training of `init` that change with its ranks, or that ranks receive that join."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from slurm_elastic.training.checkpoint.training_state import TrainingState
from slurm_elastic.training.freezing.freezer import Freezer
from slurm_elastic.training.parallel.data_parallel import DataParallel
from slurm_elastic.training.parallel.layout_agreement import LayoutAgreement
from slurm_elastic.training.parallel.parallel_strategy import ParallelStrategy
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.scaling_rules import BatchSize


class LiveTraining:
    """One rank's training of `init`; see `ChangingTraining`.

    Args:
        rank_group: all ranks.
        strategy: `DataParallel`, if the group ever changes.
        state: everything of a checkpoint.
        kept: functions that return further JSON values of a checkpoint, by name.
        layout_agreement, batch_size, reporter, freezer: follow the number of ranks.
        micro_batch: as of `init`.
        identity: numbers that are equal in all ranks of one training.
        on_position: called with cursor and loss of the last step, when they come from another rank.
        on_resize: called after each change of the group.
        save_alone: saves from this rank alone; returns whether it has.

    Attributes:
        cursor: after the last step.
        loss: of that step.
    """

    def __init__(
        self,
        *,
        rank_group: RankGroup,
        strategy: ParallelStrategy,
        state: TrainingState,
        kept: Mapping[str, Callable[[], Any]],
        layout_agreement: LayoutAgreement,
        batch_size: BatchSize,
        reporter: Reporter,
        freezer: Freezer | None,
        micro_batch: int | None,
        identity: Mapping[str, int],
        on_position: Callable[[Cursor, float], None],
        on_resize: Callable[[], None],
        save_alone: Callable[[Cursor], bool],
    ) -> None:
        self._rank_group, self._strategy = rank_group, strategy
        self._state, self._kept = state, kept
        self._layout_agreement, self._batch_size = layout_agreement, batch_size
        self._reporter, self._freezer, self._micro_batch = reporter, freezer, micro_batch
        self._identity = identity
        self._on_position, self._on_resize = on_position, on_resize
        self._save_alone = save_alone
        self.cursor = Cursor()
        self.loss = 0.0

    def rescue(self) -> bool:
        """See `ChangingTraining`."""
        # Rank 0 alone has the measurements that freezing continues with.
        return self._freezer is None and self._save_alone(self.cursor)

    def fingerprint(self) -> int:
        """Return a checksum that is equal in all ranks of one training."""
        shapes = {name: list(t.shape) for name, t in self.tensors().items()}
        text = json.dumps([shapes, dict(self._identity), self._batch_size.initial])
        return zlib.crc32(text.encode())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live tensors of the model, under the names of a checkpoint."""
        return {f"model.{k}": v for k, v in self._state.model.state_dict().items()}

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return everything that another rank needs to continue after the last step."""
        values = {
            "cursor": [self.cursor.step, self.cursor.epoch, self.cursor.consumed],
            "loss": self.loss,
            "limits": list(self._batch_size.limits),
            "kept": {name: value() for name, value in self._kept.items()},
        }
        return self._state.gather(), values

    def take_over(
        self, flat: Mapping[str, torch.Tensor], values: Mapping[str, Any], *, joins: bool
    ) -> None:
        """Continue from the state that another rank has exported.

        Args:
            flat: its tensors by name.
            values: its JSON values.
            joins: this rank has none of its own yet.
        """
        self._state.restore(flat)
        low, high = values["limits"]
        self._batch_size.limits = (low, high)
        self._batch_size.load_state_dict(values["kept"]["batch"])
        freezing = values["kept"].get("freezing")
        if self._freezer and freezing:
            if joins:
                self._freezer.set_batch(freezing["global_batch"])
                self._freezer.restore(freezing)
            else:
                self._freezer.apply(freezing["frozen"])
        self.cursor, self.loss = Cursor(*values["cursor"]), values["loss"]
        self._on_position(self.cursor, self.loss)

    def resize(self, *, fresh: bool) -> None:
        """Follow the group, which has other ranks now.

        Args:
            fresh: collectives of the former group may still write to the memory they were given.
        """
        assert isinstance(self._strategy, DataParallel)
        self._strategy.regroup(fresh=fresh)
        self._layout_agreement.resize()
        self._batch_size.set_replicas(self._rank_group.size)
        self._reporter.set_fields(
            gpus=self._rank_group.size,
            layout=self._strategy.layout,
            **self._batch_size.report_fields(self._micro_batch),
        )
        self._on_resize()
