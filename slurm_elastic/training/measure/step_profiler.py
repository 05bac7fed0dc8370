"""Looks into a training step now and then: what its parts take, and how noisy the gradient is.

`StepTimer.sampled` says which steps; on all others nothing here costs anything.
Whatever is computed across ranks rides in the step's own all-reduce.

A step calls, in this order:

    begin, (forward, backward, micro_batch_done) for each micro-batch, reducing, reduced,
    optimizing, end

A step that is made up otherwise calls begin, `enter` for whatever begins there, `staged`,
optimizing, end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurm_elastic.training.measure.gradient_noise import Consecutive, GradientNoise, squared_norm
from slurm_elastic.training.measure.layer_profile import LayerProfiler, MeasuredLayers
from slurm_elastic.training.measure.step_times import Phases, StepParts, StepTimer
from slurm_elastic.training.parallel.process_group import RankGroup

FORWARD, BACKWARD, SYNC, OPTIMIZER = "forward", "backward", "sync", "optimizer"


class StepProfiler:
    """Watches the steps of one rank; all ranks look into the same steps.

    Args:
        timer: takes the times.
        noise: takes the gradients' norms, on rank 0.
        parameters: whose gradients count.
        rank_group: this rank and the others.
        profiler: of the layers held here, if they are to be profiled.
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
        self._consecutive = Consecutive(noise)
        self._parameters = parameters
        self._rank_group = rank_group
        self._profiler = profiler
        self._sampled = False
        self._micro_batches, self._stages = 0, False
        self._phases = Phases(rank_group.device)
        self._waits: tuple[Phases, int, bool] | None = None
        self._zero = torch.zeros((), device=rank_group.device)
        self._small: tuple[torch.Tensor, float] = (self._zero, 0.0)

    @property
    def measured(self) -> MeasuredLayers | None:
        """What the layers cost; None: not known."""
        return self._profiler.measured if self._profiler else None

    def begin(self) -> None:
        """A step begins, its gradients cleared."""
        self.end()
        self._settle()
        self._sampled = self._timer.sampled
        self._micro_batches, self._stages = 0, False
        self._small = (self._zero, 0.0)
        if self._sampled:
            self._phases = Phases(self._rank_group.device)
        if self._profiler is not None:
            self._profiler.begin(on=self._timer.on)

    def enter(self, phase: str) -> None:
        """From now on time belongs to this part of the step; "": to none."""
        if self._sampled:
            self._phases.enter(phase)

    def staged(self, micro_batches: int) -> None:
        """The passes of so many micro-batches through what this rank holds are done.

        They are no micro-step: other ranks took part, or it was not the whole model.
        """
        self.enter("")
        self._micro_batches, self._stages = micro_batches, True

    def forward(self, size: int | None = None) -> None:
        """A micro-batch's forward pass begins; of so many samples, if that is known."""
        self.enter(FORWARD)
        if self._profiler is not None:
            self._profiler.samples = size

    def backward(self) -> None:
        """Its loss is known, the backward pass begins."""
        self.enter(BACKWARD)

    def micro_batch_done(self, size: int) -> None:
        """Its backward pass has ended; gradients are sums over the samples so far."""
        self._micro_batches += 1
        if not self._sampled:
            return
        self.enter("")
        if self._micro_batches == 1:
            self._small = (squared_norm(self._gradients()) / size**2, 1 / size)

    def reducing(self) -> tuple[torch.Tensor, float]:
        """The all-reduce begins.

        Returns:
            What it is to add up over the ranks: squared norm of the mean gradient of the first
            micro-batch, and 1 by its size; 0 and 0 on a rank without samples.
        """
        self.enter(SYNC)
        return self._small

    def reduced(self, small: Sequence[float], count: int) -> None:
        """Gradients are now means over the whole batch, not clipped yet.

        Args:
            small: sums over the ranks of what `reducing` returned.
            count: samples of the batch, over all ranks.
        """
        self.enter("")
        alone = self._rank_group.size == 1
        if alone and self._micro_batches == 1:
            self._consecutive.see(self._gradients(), count, keep=self._sampled)
        elif self._sampled and self._rank_group.rank == 0:
            sqr, inverse = small
            ranks = min(self._rank_group.size, count)
            self._noise.add(
                small=sqr / ranks,
                small_batch=ranks / inverse,
                large=float(squared_norm(self._gradients())),
                large_batch=count,
            )

    def optimizing(self) -> None:
        """Clipping, the optimizer and the schedule begin."""
        self.enter(OPTIMIZER)

    def end(self) -> None:
        """The step is done."""
        if not self._sampled:
            return
        self.enter("")
        self._waits = self._phases, self._micro_batches, self._stages
        self._sampled = False
        if self._rank_group.device.type != "cuda":
            self._settle()

    def _settle(self) -> None:
        """Tell what the last step was made of, as soon as a GPU has come so far."""
        if self._waits is None or not self._waits[0].ready:
            return
        (phases, micro_batches, staged), self._waits = self._waits, None
        found = phases.totals()
        self._timer.parts(
            StepParts(
                forward_s=found.get(FORWARD, 0.0),
                backward_s=found.get(BACKWARD, 0.0),
                sync_s=0.0 if self._rank_group.size == 1 else found.get(SYNC, 0.0),
                optimizer_s=found.get(OPTIMIZER),
                micro_batches=micro_batches,
                staged=staged,
            )
        )

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]
