"""Looks into a training step now and then: what its parts take, and how noisy the gradient is.

`StepTimer.looks` says which steps; on all others nothing here costs anything.
Whatever is computed across ranks rides in the step's own all-reduce.

A step calls, in this order:

    begin, (piece, backward, piece_done) for each micro-batch, reducing, reduced, optimizing, end

A step that is made up otherwise calls begin, `enter` for whatever begins there, `staged`,
optimizing, end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from slurm_elastic.training.measure.gradient_noise import Consecutive, GradientNoise, squared_norm
from slurm_elastic.training.measure.layer_profile import LayerProfiler, MeasuredLayer
from slurm_elastic.training.measure.step_times import Phases, StepParts, StepTimer
from slurm_elastic.training.parallel.process_group import World

FORWARD, BACKWARD, SYNC, OPTIMIZER = "forward", "backward", "sync", "optimizer"


class StepProfiler:
    """Watches the steps of one rank; all ranks look into the same steps.

    Args:
        timer: takes the times.
        noise: takes the gradients' norms, on rank 0.
        parameters: whose gradients count.
        world: this rank and the others.
        profiler: of the layers held here, if they are to be profiled.
    """

    def __init__(
        self,
        *,
        timer: StepTimer,
        noise: GradientNoise,
        parameters: Sequence[torch.nn.Parameter],
        world: World,
        profiler: LayerProfiler | None = None,
    ) -> None:
        self._timer = timer
        self._noise = noise
        self._consecutive = Consecutive(noise)
        self._parameters = parameters
        self._world = world
        self._profiler = profiler
        self._looks = False
        self._pieces, self._stages = 0, False
        self._phases = Phases(world.device)
        self._waits: tuple[Phases, int, bool] | None = None
        self._zero = torch.zeros((), device=world.device)
        self._small: tuple[torch.Tensor, float] = (self._zero, 0.0)

    @property
    def measured(self) -> MeasuredLayer | None:
        """What the layers cost; None: not known."""
        return self._profiler.measured if self._profiler else None

    def begin(self) -> None:
        """A step begins, its gradients cleared."""
        self.end()
        self._settle()
        self._looks = self._timer.looks
        self._pieces, self._stages = 0, False
        self._small = (self._zero, 0.0)
        if self._looks:
            self._phases = Phases(self._world.device)
        if self._profiler is not None:
            self._profiler.begin(on=self._timer.on)

    def enter(self, phase: str) -> None:
        """From now on time belongs to this part of the step; "": to none."""
        if self._looks:
            self._phases.enter(phase)

    def staged(self, pieces: int) -> None:
        """The passes of so many micro-batches through what this rank holds are done.

        They are no micro-step: other ranks took part, or it was not the whole model.
        """
        self.enter("")
        self._pieces, self._stages = pieces, True

    def piece(self, size: int | None = None) -> None:
        """A micro-batch's forward pass begins; of so many samples, if that is known."""
        self.enter(FORWARD)
        if self._profiler is not None:
            self._profiler.samples = size

    def backward(self) -> None:
        """Its loss is known, the backward pass begins."""
        self.enter(BACKWARD)

    def piece_done(self, size: int) -> None:
        """Its backward pass has ended; gradients are sums over the samples so far."""
        self._pieces += 1
        if not self._looks:
            return
        self.enter("")
        if self._pieces == 1:
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
        alone = self._world.size == 1
        if alone and self._pieces == 1:
            self._consecutive.see(self._gradients(), count, keep=self._looks)
        elif self._looks and self._world.rank == 0:
            sqr, inverse = small
            ranks = min(self._world.size, count)
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
        if not self._looks:
            return
        self.enter("")
        self._waits = self._phases, self._pieces, self._stages
        self._looks = False
        if self._world.device.type != "cuda":
            self._settle()

    def _settle(self) -> None:
        """Tell what the last step was made of, as soon as a GPU has come so far."""
        if self._waits is None or not self._waits[0].ready:
            return
        (phases, pieces, staged), self._waits = self._waits, None
        found = phases.totals()
        self._timer.parts(
            StepParts(
                forward_s=found.get(FORWARD, 0.0),
                backward_s=found.get(BACKWARD, 0.0),
                sync_s=0.0 if self._world.size == 1 else found.get(SYNC, 0.0),
                optimizer_s=found.get(OPTIMIZER),
                pieces=pieces,
                staged=staged,
            )
        )

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]
