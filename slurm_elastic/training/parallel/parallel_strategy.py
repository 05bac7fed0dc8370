"""How the ranks of a job share a step: what `Job` requested of replicas and of pipelines alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from slurm_elastic.training.loader import Batch
from slurm_elastic.training.measure.layer_profile import MeasuredLayers
from slurm_elastic.training.sampler import BatchSplit

#: Of (output, targets): the mean over the samples it is given, or one value each.
LossFunction = Callable[[Any, Any], torch.Tensor]


class StrategySettings(NamedTuple):
    """What a rank has heard or wishes; summed over the ranks, so that all act on the same.

    Attributes:
        notice: somebody wants a checkpoint, and the job to wait at it.
        stop: Slurm ends the job.
        save: a periodic checkpoint is due.
        restart: the ranks are to be laid out anew: save, and leave to be started again.
        frozen: layers to be frozen after this step.
        batch: samples of the steps to come.
        gain: of this step, where the learning rate follows it (batch_size.py).
    """

    notice: float = 0.0
    stop: float = 0.0
    save: float = 0.0
    restart: float = 0.0
    frozen: float = 0.0
    batch: float = 0.0
    gain: float = 0.0


class ParallelStrategy(Protocol):
    """A way to compute one optimisation step on all ranks.

    Attributes:
        layout: "4x1", "2x2", "2-1", ... (slurm_elastic/core/layout.py).
        model: what this rank holds of it, on its device, under the whole model's names.
        split: the samples that this rank loads.
        writers: the ranks that together hold everything, rank 0 among them.
        updates_itself: `step` changes the weights.
        measured: what its layers cost, once they have been measured; known to rank 0.
    """

    layout: str
    model: torch.nn.Module
    split: BatchSplit
    writers: tuple[int, ...]
    updates_itself: bool

    @property
    def measured(self) -> MeasuredLayers | None:
        """See above."""

    @property
    def reduced_bytes(self) -> int:
        """What a step's reduction of gradients carries from this rank; 0 for a rank alone."""

    def join(self, *, fresh: bool) -> None:
        """All ranks have met, and restored what there was; `fresh`: nothing was restored."""

    def step(
        self, batch: Batch, requested: StrategySettings, update: Callable[[], None]
    ) -> tuple[float, StrategySettings]:
        """Gradients become those of the mean loss over the whole batch.

        Args:
            batch: this rank's part.
            requested: of this rank.
            update: changes the weights by the gradients; only for a mode that updates itself.

        Returns:
            The mean loss, and the sums of what all ranks ask.
        """

    def clip(self, most: float) -> None:
        """Scale the gradients so that the norm over the whole model is at most this."""

    def rebuild(self, changed: Sequence[torch.Tensor] = ()) -> None:
        """Other parameters train from now on.

        Args:
            changed: what replicas may have seen differently, and must agree on: buffers of
                layers that were frozen just now.
        """

    def close(self) -> None:
        """No more steps."""


def moved(value: Any, device: torch.device) -> Any:
    """Tensors within tuples, lists and dictionaries, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {k: moved(v, device) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [moved(v, device) for v in value]
    return value
