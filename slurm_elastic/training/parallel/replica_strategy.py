"""Common part of the strategies in which every rank holds the whole model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from slurm_elastic.training.exchange.gradient_exchange import GradientExchange
from slurm_elastic.training.exchange.sliced_exchange import SlicedExchange
from slurm_elastic.training.measure.step_profiler import StepProfiler
from slurm_elastic.training.parallel.parallel_strategy import LossFunction
from slurm_elastic.training.ranks.process_group import RankGroup
from slurm_elastic.training.signals import Signals

E = TypeVar("E", GradientExchange, SlicedExchange)


class ReplicaStrategy(ABC, Generic[E]):
    """Base of strategies whose ranks exchange the gradients of a whole model.

    Args:
        model: whole.
        loss_fn: of (output, targets).
        rank_group: all ranks.
        signals: distinguish a broken connection from the end of the job.
        step_profiler: measures steps.
    """

    updates_itself = False

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFunction,
        *,
        rank_group: RankGroup,
        signals: Signals,
        step_profiler: StepProfiler,
    ) -> None:
        self.model = model
        self._loss_fn, self._rank_group, self._signals = loss_fn, rank_group, signals
        self._step_profiler = step_profiler
        self._exchange: E | None = None

    @property
    def reduced_bytes(self) -> int:
        """See `ParallelStrategy`."""
        return self._exchange.bytes if self._exchange else 0

    @property
    def crossing_bytes(self) -> int | None:
        """See `ParallelStrategy`."""
        return self._exchange.crossing_bytes if self._exchange else None

    def report_fields(self, batch: int) -> dict[str, int]:
        """See `ParallelStrategy`."""
        del batch
        return {}

    def join(self, *, fresh: bool) -> None:
        """See `ParallelStrategy`."""
        if fresh:
            # Without a seed in the script, each rank would begin with other parameters.
            self._rank_group.broadcast(self.model.state_dict().values())
        self._exchange = self._new_exchange()

    def close(self) -> None:
        """See `ParallelStrategy`."""
        if self._exchange:
            with self._signals.tolerate_ending_peers():
                self._exchange.close()

    def dissolve(self) -> None:
        """See `ParallelStrategy`."""
        for parameter in self.model.parameters():
            parameter.grad = None

    @abstractmethod
    def _new_exchange(self) -> E:
        """Return the exchange of a group of ranks; collective where it has groups of its own."""

    def _joined(self) -> E:
        if self._exchange is None:
            name = type(self).__name__
            raise RuntimeError(f"{name}: step before join is invalid; call join first")
        return self._exchange
