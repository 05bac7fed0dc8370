"""Split of a running job's batch into micro-batches: `GoodputModel.best` for one shape.

Makes the same choice as `slurm_elastic.models.goodput`, from the same candidates and the same fit.
A running job repeats it in one shape while only its gradient noise changes: that takes three array
operations. Tests check that both choices are equal.
"""

from __future__ import annotations

import numpy as np

from slurm_elastic.core.application import Application, Noise, Observation
from slurm_elastic.models import efficiency, step_residuals, throughput
from slurm_elastic.models.batch_candidates import ConfigurationSet, candidates


class BatchSplitter:
    """Batch choice of one job in one shape on one GPU type; immutable."""

    __slots__ = ("_accumulation", "_micro_batch", "_scale", "_weight")

    def __init__(
        self,
        application: Application,
        observations: tuple[Observation, ...],
        *,
        nodes: int,
        gpus: int,
        max_batch: int,
        most: int,
        compat: bool,
        residuals: bool = False,
    ) -> None:
        """Compute the candidates and fit the job's speed.

        Args:
            application: with an elastic batch.
            observations: of the present GPU type, at least one.
            nodes: of the shape.
            gpus: of the shape, over all its nodes.
            max_batch: largest global batch.
            most: largest micro-batch in this shape.
            compat: fit as Sia's artifact does.
            residuals: correct the fit by its residuals.
        """
        gpu_type = observations[0].gpu_type
        tried = candidates(
            application,
            ConfigurationSet((gpu_type,), (nodes,), (gpus,)),
            fixed=False,
            compat=compat,
            max_batch=max_batch,
            most=most,
        )
        profile = application.on(gpu_type)
        unit = profile.unit if profile else 1
        fit: throughput.ThroughputParameters | step_residuals.CorrectedThroughput
        if residuals and not compat:
            fit = step_residuals.corrected(observations, unit=unit)
        else:
            fit = throughput.fit(observations, unit=unit, compat=compat)
        self._micro_batch, self._accumulation = tried.micro_batch[0], tried.accumulation[0]
        seconds = fit.iteration_time(
            nodes, tried.replicas[0], self._micro_batch, self._accumulation
        )
        self._weight = np.where(tried.valid[0], tried.samples[0] / seconds, 0.0)
        self._scale = tried.samples[0] / application.initial_batch

    def best(self, noise: Noise) -> tuple[int, int]:
        """Return (micro-batch, accumulated micro-steps) of the best goodput."""
        sqr, var = efficiency.weights(noise)
        index = int((self._weight / (var + sqr * self._scale)).argmax())
        return int(self._micro_batch[index]), int(self._accumulation[index])
