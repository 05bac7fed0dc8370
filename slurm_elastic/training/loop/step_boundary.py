"""Boundaries between the steps of a loop that belongs to the script.

At a boundary all ranks have done the same steps. The requests of each rank, for a save for
example, are exchanged before it, so that all ranks do the same. If steps are so short that the
exchange would slow them down, it follows every n-th step only; rank 0 chooses n from the time of a
step, and n is part of the exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from slurm_elastic.core.errors import SlurmElasticError
from slurm_elastic.training.checkpoint import shards
from slurm_elastic.training.checkpoint.checkpoint_manager import CheckpointManager
from slurm_elastic.training.job_requests import JobRequests
from slurm_elastic.training.measure.step_times import process_age
from slurm_elastic.training.ranks.control_group import ControlGroup
from slurm_elastic.training.regroup.loop_changes import LoopChanges
from slurm_elastic.training.reporting import Reporter
from slurm_elastic.training.sampler import Cursor
from slurm_elastic.training.signals import Signals
from slurm_elastic.training.step_requests import StepRequests

#: Seconds of steps between two exchanges: a notice waits at most for these and one step (our
#: choice; an exchange takes 0.1 to 1 ms).
_EXCHANGE_S = 0.1
_MOST_STEPS = 100
#: Exchanges of an attempt after which weights are compared, beside those that save.
_COMPARED = 3
#: Largest difference of a weight between ranks, by the largest weight: rounding on different GPUs
#: stays below, an update of one rank alone does not (our choice).
_TOLERANCE = 1e-5
_TENSORS, _ELEMENTS = 16, 256


class UnequalWeightsError(SlurmElasticError, RuntimeError):
    """Ranks that train alone, each on its own part of the data."""


class StepBoundary:
    """Boundaries of one attempt, on one rank.

    Args:
        control_group: all ranks.
        requests: are collected and carried out here.
        checkpoint_manager: its clock starts after the first step.
        reporter: gets the times of steps.
        signals: distinguish a broken connection from the end of the job.
        modules: modules whose weights all ranks must have in common, by name.
        sharded: whether ranks hold parts of them, as of the constructor of the loop.
        resumed_from: step of the checkpoint, or None.
        restore_s: seconds of reading it.
        every_step: exchange after every step.
        changes: of the ranks.
        clock: returns seconds.
    """

    def __init__(
        self,
        *,
        control_group: ControlGroup,
        requests: JobRequests,
        checkpoint_manager: CheckpointManager,
        reporter: Reporter,
        signals: Signals,
        modules: dict[str, torch.nn.Module],
        sharded: bool,
        resumed_from: int | None,
        restore_s: float | None,
        every_step: bool,
        changes: LoopChanges,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._control_group, self._requests = control_group, requests
        self._checkpoint_manager, self._reporter = checkpoint_manager, reporter
        self._signals, self._modules, self._sharded = signals, modules, sharded
        self._resumed_from, self._restore_s = resumed_from, restore_s
        self._every_step, self._clock = every_step, clock
        self._changes, self._begun = changes, False
        self._exchanges = 0
        self._interval = self._countdown = 1
        self._last_exchange: float | None = None

    def begin_step(self) -> None:
        """Begin a step: from now on SIGTERM takes effect at the next boundary."""
        self._signals.exit_at_once(False)

    def pass_over(self, cursor: Cursor) -> None:
        """Carry out what is due after a step; does not return if the process ends by it."""
        begins, self._begun = not self._begun, True
        if begins:
            self._checkpoint_manager.begin()
            self._reporter.started(
                startup_s=process_age(), restore_s=self._restore_s, step=self._resumed_from
            )
        self._reporter.timer.end()
        self._countdown -= 1
        if self._countdown:
            return
        with self._changes.guarded():
            if begins:
                self._changes.begin()
            agreed = self._exchange()
            if agreed.stop:
                self._changes.close()
            self._requests.carry_out(cursor, agreed)
            if agreed.switch and not agreed.notice and not self._requests.ended(cursor):
                self._changes.switch(round(agreed.switch))
                self._exchange_anew()
        self._last_exchange = self._clock()

    def enter(self) -> None:
        """Enter the loop, on a rank that joins: returns when it belongs to the training."""
        with self._changes.guarded():
            if self._changes.join():
                self._exchange_anew()

    def finish(self, cursor: Cursor) -> None:
        """Save the complete training."""
        with self._changes.guarded():
            self._changes.close()
            self._requests.finish(cursor)

    def _exchange_anew(self) -> None:
        """Exchange and compare as at the begin of an attempt, as ranks have joined or left."""
        self._exchanges, self._last_exchange = 0, None
        self._interval = self._countdown = 1

    def _exchange(self) -> StepRequests:
        requested = self._requests.collect(restart=False)._replace(switch=self._changes.requested())
        leads = self._control_group.rank == 0
        with self._signals.tolerate_ending_peers():
            *sums, interval = self._control_group.total(
                [*map(float, requested), self._next_interval() if leads else 0.0]
            )
            agreed = StepRequests(*sums)
            if self._exchanges < _COMPARED or agreed.save or agreed.notice:
                self._compare_weights()
        self._exchanges += 1
        self._interval = self._countdown = max(1, round(interval))
        return agreed

    def _next_interval(self) -> float:
        """Return the number of steps to the next exchange."""
        if self._every_step or self._last_exchange is None or self._exchanges < _COMPARED:
            return 1.0
        step_s = (self._clock() - self._last_exchange) / self._interval
        return min(_MOST_STEPS, max(1, int(_EXCHANGE_S / max(step_s, 1e-9))))

    def _compare_weights(self) -> None:
        for name, module in self._modules.items():
            if not self._sharded and any(shards.is_cut(p) for p in module.parameters()):
                raise UnequalWeightsError(
                    f"ElasticLoop: {name}: fully_shard after the loop was made is invalid: expected"
                    " it before, so that each rank saves its part"
                )
            sample = _sample(list(module.parameters()))
            scale = float(sample.abs().max()) if sample.numel() else 0.0
            if sample.numel() and self._control_group.differs(sample) > _TOLERANCE * scale:
                raise UnequalWeightsError(
                    f"ElasticLoop: {name}: the weights of the ranks are not equal: expected"
                    " averaged gradients; wrap the module in DistributedDataParallel or"
                    " fully_shard, on all ranks from the same weights"
                )


def _sample(parameters: Sequence[torch.nn.Parameter]) -> torch.Tensor:
    """Return some weights, float32 on the CPU: the first ones of evenly spaced parameters."""
    trained = [p for p in parameters if p.requires_grad and not shards.is_cut(p)]
    step = max(1, len(trained) // _TENSORS)
    parts = [p.detach().reshape(-1)[:_ELEMENTS].float() for p in trained[::step]]
    return torch.cat(parts).cpu() if parts else torch.zeros(0)
