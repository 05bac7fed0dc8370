"""Trainings whose ranks hold different parts of the model, in changes of their group.

No rank can pass the whole state on. So all save a checkpoint, the group changes, and each rank
divides the model anew and restores its part: in the process that runs, which has imported
everything, without a requeue.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.regroup.regrouping import Regrouping, wait_for_arrival
from slurm_elastic.training.sampler import Cursor


def confirm(rank_group: RankGroup, regrouping: Regrouping) -> None:
    """Wait for all ranks of a new group; see `wait_for_arrival`.

    Dividing the model takes many collectives, which cannot be given up when one of them is lost.
    """
    zero = torch.zeros(1, device=rank_group.device)
    wait_for_arrival(
        regrouping, lambda: rank_group.add_up([zero], "waiting for the ranks that join")
    )


class RebuiltTraining:
    """Training of a rank that holds a part of the model; see `ChangingTraining`.

    Args:
        shapes: of the whole model's `state_dict`, by name.
        identity: numbers that are equal in all ranks of one training.

    Attributes:
        cursor: after the last step.
        loss: of that step.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], identity: Mapping[str, int]) -> None:
        self._shapes, self._identity = shapes, identity
        self.cursor = Cursor()
        self.loss = 0.0

    def rescue(self) -> bool:
        """See `ChangingTraining`."""
        return False  # this rank has a part only

    def fingerprint(self) -> int:
        """See `ChangingTraining`."""
        shapes = {name: list(shape) for name, shape in self._shapes.items()}
        return zlib.crc32(json.dumps([shapes, dict(self._identity)]).encode())

    def tensors(self) -> dict[str, torch.Tensor]:
        """See `ChangingTraining`."""
        return {}

    def export(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """See `ChangingTraining`: the step alone, whose checkpoint has everything else."""
        cursor = self.cursor
        return {}, {"cursor": [cursor.step, cursor.epoch, cursor.consumed]}

    def take_over(
        self, flat: Mapping[str, torch.Tensor], values: Mapping[str, Any], *, joins: bool
    ) -> None:
        """See `ChangingTraining`."""
        del flat, joins
        self.cursor = Cursor(*values["cursor"])

    def resize(self, *, fresh: bool) -> None:
        """See `ChangingTraining`: the model is divided anew when all belong to the group."""
