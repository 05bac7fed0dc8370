"""Measurement of some training steps: durations of their parts, and gradient noise.

`StepTimer.sampled` selects the steps; all others cost nothing. Values that are
computed across ranks are part of the step's own all-reduce.

A step calls, in this order:

    begin, (forward, backward, micro_batch_done) for each micro-batch, reducing, reduced,
    optimizing, end

A step of another kind calls begin, `enter` for each of its parts, `passed`, optimizing, end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurm_elastic.training.measure.gradient_noise import (
    ConsecutiveSteps,
    GradientNoise,
    squared_norm,
)
from slurm_elastic.training.measure.layer_profile import LayerProfiler, MeasuredLayers
from slurm_elastic.training.measure.step_times import Phases, StepParts, StepTimer
from slurm_elastic.training.ranks.process_group import RankGroup

FORWARD, BACKWARD, SYNC, OPTIMIZER = "forward", "backward", "sync", "optimizer"
#: A backward pass that also reduces gradients, after others that do not.
REDUCING_BACKWARD = "reducing-backward"
#: Phase of a pipeline after its last pass: the reduction of gradients over replicas.
REDUCE = "reduce"


class StepProfiler:
    """Measurement of the steps of one rank; all ranks measure the same steps.

    Args:
        timer: receives the durations.
        noise: receives the gradients' norms, on rank 0.
        parameters: those whose gradients count.
        rank_group: all ranks.
        profiler: of the layers held here; None: they are not profiled.
    """

    def __init__(
        self,
        *,
        timer: StepTimer,
        noise: GradientNoise,
        parameters: Sequence[torch.nn.Parameter],
        rank_group: RankGroup,
        profiler: LayerProfiler | None = None,
    ) -> None:
        self._timer = timer
        self._noise = noise
        self._consecutive = ConsecutiveSteps(noise)
        self._parameters = parameters
        self._rank_group = rank_group
        self._profiler = profiler
        self._sampled = False
        self._micro_batches, self._pipeline = 0, False
        self._phases = Phases(rank_group.device)
        self._pending: tuple[Phases, int, bool] | None = None
        self._zero = torch.zeros((), device=rank_group.device)
        self._small: tuple[torch.Tensor, float] = (self._zero, 0.0)

    @property
    def measured(self) -> MeasuredLayers | None:
        """Profile of the layers; None: unknown."""
        return self._profiler.measured if self._profiler else None

    @property
    def sampled(self) -> bool:
        """Whether this step is measured; the same on all ranks."""
        return self._sampled

    def begin_again(self) -> None:
        """Measure as from the begin of an attempt, on all ranks of a changed group."""
        self._timer.begin_again()
        self._consecutive = ConsecutiveSteps(self._noise)
        self._pending, self._sampled = None, False

    def begin(self) -> None:
        """Begin a step, whose gradients are cleared."""
        self.end()
        self._settle()
        self._sampled = self._timer.sampled
        self._micro_batches, self._pipeline = 0, False
        self._small = (self._zero, 0.0)
        if self._sampled:
            self._phases = Phases(self._rank_group.device)
        if self._profiler is not None:
            self._profiler.begin(on=self._timer.on)

    def enter(self, phase: str) -> None:
        """Count the time from now on to this part of the step; "": to none."""
        if self._sampled:
            self._phases.enter(phase)

    def passed(self, micro_batches: int, *, pipeline: bool) -> None:
        """End the passes of these micro-batches, in which other ranks took part, too.

        Args:
            micro_batches: number that went through this rank.
            pipeline: this rank's part of the model is a stage; one pass of all micro-batches
                counts as a micro-step.
        """
        self.enter("")
        self._micro_batches, self._pipeline = micro_batches, pipeline

    def forward(self, size: int | None = None) -> None:
        """Begin a micro-batch's forward pass; `size` is its samples, None: unknown."""
        self.enter(FORWARD)
        if self._profiler is not None:
            self._profiler.samples = size

    def backward(self) -> None:
        """Begin its backward pass."""
        self.enter(BACKWARD)

    def micro_batch_done(self, size: int) -> None:
        """End its backward pass; gradients are sums over the samples so far."""
        self._micro_batches += 1
        if not self._sampled:
            return
        self.enter("")
        if self._micro_batches == 1:
            self._small = (squared_norm(self._gradients()) / size**2, 1 / size)

    def reducing(self) -> tuple[torch.Tensor, float]:
        """Begin the all-reduce.

        Returns:
            Values to be summed over the ranks: squared norm of the mean gradient of the first
            micro-batch, and 1 / its size; 0 and 0 on a rank without samples.
        """
        self.enter(SYNC)
        return self._small

    def reduced(self, small: Sequence[float], count: int, *, sqr: float | None = None) -> None:
        """End the all-reduce; gradients are means over the whole batch, not clipped yet.

        Args:
            small: sums over the ranks of what `reducing` returned.
            count: samples of the batch, over all ranks.
            sqr: squared norm of the gradient, where ranks hold parts of it.
        """
        self.enter("")
        alone = self._rank_group.size == 1
        if alone and self._micro_batches == 1:
            self._consecutive.observe(self._gradients(), count, keep=self._sampled)
        elif self._sampled and self._rank_group.rank == 0:
            small_sqr, inverse = small
            ranks = min(self._rank_group.size, count)
            self._noise.add(
                small=small_sqr / ranks,
                small_batch=ranks / inverse,
                large=float(squared_norm(self._gradients())) if sqr is None else sqr,
                large_batch=count,
            )

    def schedule_changed(self) -> None:
        """Discard what is not reported yet, as gradients are exchanged in another way now."""
        self._timer.restart()

    def exchanged(
        self, name: str, exposed: float | None = None, alone_s: float | None = None
    ) -> None:
        """Set the schedule of the exchange.

        Args:
            name: of the schedule.
            exposed: the part of the exchange that lengthens a step; None: not known.
            alone_s: seconds of the exchange without computation; None: not measured.
        """
        timer = self._timer
        timer.exchange, timer.exposed, timer.exchange_s = name, exposed, alone_s

    def optimizing(self) -> None:
        """Begin clipping, optimizer and schedule."""
        self.enter(OPTIMIZER)

    def end(self) -> None:
        """End the step."""
        if not self._sampled:
            return
        self.enter("")
        self._pending = self._phases, self._micro_batches, self._pipeline
        self._sampled = False
        if self._rank_group.device.type != "cuda":
            self._settle()

    def _settle(self) -> None:
        """Pass on the parts of the last step, as soon as a GPU has finished it."""
        if self._pending is None or not self._pending[0].ready:
            return
        (phases, micro_batches, pipeline), self._pending = self._pending, None
        seconds = phases.totals()
        backward_s, reduce_s = seconds.get(BACKWARD, 0.0), seconds.get(REDUCE, 0.0)
        reducing_s = seconds.get(REDUCING_BACKWARD, 0.0)
        if reducing_s:
            plain_s = min(reducing_s, backward_s / max(1, micro_batches - 1))
            backward_s, reduce_s = backward_s + plain_s, reduce_s + reducing_s - plain_s
        sync_s = seconds.get(SYNC, 0.0) + reduce_s
        self._timer.parts(
            StepParts(
                forward_s=seconds.get(FORWARD, 0.0),
                backward_s=backward_s,
                sync_s=0.0 if self._rank_group.size == 1 else sync_s,
                optimizer_s=seconds.get(OPTIMIZER),
                micro_batches=micro_batches,
                reduce_s=reduce_s if pipeline else None,
            )
        )

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]
