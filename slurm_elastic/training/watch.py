"""Looks into a training step now and then: what its parts take, and how noisy the gradient is.

`StepTimer.looks` says which steps; on all others nothing here costs anything.
Whatever is computed across ranks rides in the step's own all-reduce.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from slurm_elastic.training.measure import StepTimer
from slurm_elastic.training.noise import Consecutive, GradientNoise, squared_norm
from slurm_elastic.training.parallel import World


class Watch:
    """Watches the steps of one rank; all ranks look into the same steps.

    Args:
        timer: takes the times.
        noise: takes the gradients' norms, on rank 0.
        parameters: whose gradients count.
        world: this rank and the others.
    """

    def __init__(
        self,
        *,
        timer: StepTimer,
        noise: GradientNoise,
        parameters: Sequence[torch.nn.Parameter],
        world: World,
    ) -> None:
        self._timer = timer
        self._noise = noise
        self._consecutive = Consecutive(noise)
        self._parameters = parameters
        self._world = world
        self._looks = False
        self._begun = self._compute_s = 0.0
        self._pieces = 0
        self._small: tuple[torch.Tensor, float] = self._nothing()

    def begin(self) -> None:
        """A step begins, its gradients cleared."""
        self._looks = self._timer.looks
        self._compute_s, self._pieces = 0.0, 0
        self._small = self._nothing()

    def piece(self) -> None:
        """A micro-batch's forward pass begins."""
        if self._looks:
            self._begun = self._now()

    def piece_done(self, size: int) -> None:
        """Its backward pass has ended; gradients are sums over the samples so far."""
        self._pieces += 1
        if not self._looks:
            return
        self._compute_s += self._now() - self._begun
        if self._pieces == 1:
            self._small = (squared_norm(self._gradients()) / size**2, 1 / size)

    def reducing(self) -> tuple[torch.Tensor, float]:
        """The all-reduce begins.

        Returns:
            What it is to add up over the ranks: squared norm of the mean gradient of the first
            micro-batch, and 1 by its size; 0 and 0 on a rank without samples.
        """
        if self._looks:
            self._begun = self._now()
        return self._small

    def reduced(self, small: Sequence[float], count: int) -> None:
        """Gradients are now means over the whole batch, not clipped yet.

        Args:
            small: sums over the ranks of what `reducing` returned.
            count: samples of the batch, over all ranks.
        """
        alone = self._world.size == 1
        if self._looks:
            sync_s = 0.0 if alone else self._now() - self._begun
            self._timer.parts(compute_s=self._compute_s, pieces=self._pieces, sync_s=sync_s)
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

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def _nothing(self) -> tuple[torch.Tensor, float]:
        return torch.zeros((), device=self._world.device), 0.0

    def _now(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.monotonic()
