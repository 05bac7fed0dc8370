"""Observations that a new job inherits from earlier jobs of its application (`[sia] share`).

As in the live controller (controller/state/observation_store.py). On published workloads of five
applications it gains more than on a site where few jobs are repeated: state that with results.
"""

from __future__ import annotations

from slurm_elastic.core.application import Noise, Observation
from slurm_elastic.simulator.simulated_job import SimulatedJob

_Key = tuple[str, int, int, int]


class SharedObservations:
    """Observations by application: the first time of equal configurations, the last noise."""

    def __init__(self) -> None:
        self._points: dict[str, dict[_Key, Observation]] = {}
        self._noise: dict[str, Noise] = {}

    def add(self, job: SimulatedJob) -> None:
        """Keep the observations of a job."""
        name = job.submitted.application
        points = self._points.setdefault(name, {})
        for o in job.observations:
            points.setdefault((o.gpu_type, o.nodes, o.gpus, o.micro_batch), o)
        if job.noise is not None:
            self._noise[name] = job.noise

    def give_to(self, job: SimulatedJob) -> None:
        """Give a job that has not run yet the observations of its application."""
        name = job.submitted.application
        points = self._points.get(name)
        if points:
            job.inherit(tuple(points.values()), self._noise.get(name))
