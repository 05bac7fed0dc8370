"""Interface of the ways in which ranks share an optimisation step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.sampler import BatchSplit
from slurm_elastic.training.step_requests import StepRequests

#: Function of (output, targets): the mean over the samples, or one value for each sample.
LossFunction = Callable[[Any, Any], torch.Tensor]
#: Added to a norm that is divided by, as by `torch.nn.utils.clip_grad_norm_`.
CLIP_EPSILON = 1e-6


class ParallelStrategy(Protocol):
    """A way to compute one optimisation step on all ranks.

    Attributes:
        layout: "4x1", "2x2", "2-1", ... (slurm_elastic/core/layout.py).
        model: this rank's part of the model, on its device, under the whole model's names.
        split: the samples that this rank loads.
        writers: the ranks that together hold everything, rank 0 among them.
        updates_itself: `step` changes the weights.
        measured: profile of the layers, on rank 0; None: not measured yet.
    """

    layout: str
    model: torch.nn.Module
    split: BatchSplit
    writers: tuple[int, ...]
    updates_itself: bool

    @property
    def measured(self) -> MeasuredLayers | None:
        """See the class."""

    @property
    def reduced_bytes(self) -> int:
        """Bytes that this rank contributes to a step's reduction of gradients; 0 for one rank."""

    @property
    def crossing_bytes(self) -> int | None:
        """Bytes that pass from a node to the next in a step, if ranks stand on several nodes.

        In each direction; None: that is not known.
        """

    def report_fields(self, batch: int) -> dict[str, int]:
        """Return the fields of a report that differ from those of replicas of a whole model.

        Args:
            batch: samples of a step.
        """

    def join(self, *, fresh: bool) -> None:
        """Prepare for the first step, when all ranks are connected and restored.

        Args:
            fresh: there was no checkpoint.
        """

    def step(
        self, batch: Batch, requested: StepRequests, update: Callable[[], None]
    ) -> tuple[float, StepRequests]:
        """Compute the gradients of the mean loss over the whole batch.

        Args:
            batch: this rank's part.
            requested: requests of this rank.
            update: changes the weights by the gradients; used where `updates_itself`.

        Returns:
            The mean loss, and the requests summed over all ranks.
        """

    def clip(self, most: float) -> None:
        """Scale the gradients so that the norm over the whole model is at most this."""

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """Adapt to another set of parameters that train.

        Args:
            changed: tensors that may differ between replicas and take rank 0's values: buffers
                of layers that were frozen just now.
        """

    def close(self) -> None:
        """Release the resources of steps: no step follows."""

    def dissolve(self) -> None:
        """Give the whole model back, with undefined values, after `close`."""


def moved(value: Any, device: torch.device) -> Any:
    """Return the value with all tensors in tuples, lists and dictionaries on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [moved(v, device) for v in value]
    return value
