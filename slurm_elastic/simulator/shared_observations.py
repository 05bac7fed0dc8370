"""What a new job inherits with `[sia] share`: the times that earlier jobs of its kind measured.

As the live controller does it (controller/state/observation_store.py). On published workloads of
five
applications this is worth more than on a site where few jobs come again: say so with results.
"""

from __future__ import annotations

from slurm_elastic.core.application import Noise, Observation
from slurm_elastic.simulator.simulated_job import SimulatedJob

_Key = tuple[str, int, int, int]


class SharedObservations:
    """By application: of equal configurations the first time counts, of noise the latest."""

    def __init__(self) -> None:
        self._points: dict[str, dict[_Key, Observation]] = {}
        self._noise: dict[str, Noise] = {}

    def remember(self, job: SimulatedJob) -> None:
        """Keep what a job measured."""
        name = job.submitted.application
        points = self._points.setdefault(name, {})
        for o in job.observations:
            points.setdefault((o.gpu_type, o.nodes, o.gpus, o.micro_batch), o)
        if job.noise is not None:
            self._noise[name] = job.noise

    def teach(self, job: SimulatedJob) -> None:
        """Let a job that has not run yet begin with what is kept."""
        name = job.submitted.application
        points = self._points.get(name)
        if points:
            job.inherit(tuple(points.values()), self._noise.get(name))
