"""Observations that a new job inherits from earlier jobs of its application.

Plainly (`[sia] share`), or as the pool of models/application_pool.py with the noise of the first
epoch, for policies whose capabilities ask for that. As in the live controller
(controller/state/reported/observation_store.py). On published workloads of five applications it
gains more than on a site where few jobs are repeated: state that with results.
"""

from __future__ import annotations

from collections.abc import Iterable

from slurm_elastic.core.application import Noise, Observation
from slurm_elastic.models.application_pool import pooled
from slurm_elastic.simulator.simulated_job import SimulatedJob

_Key = tuple[str, int, int, int]
#: Jobs of an application in its pool; older ones are forgotten.
_MOST_JOBS = 20


def application_of(job: SimulatedJob) -> str:
    """Return the application of a job, whose profile may be its own (`name#job`)."""
    return job.submitted.application.partition("#")[0]


class SharedObservations:
    """Observations by application: the first time of equal configurations, the last noise."""

    def __init__(self) -> None:
        self._points: dict[str, dict[_Key, Observation]] = {}
        self._noise: dict[str, Noise] = {}

    def add(self, job: SimulatedJob) -> None:
        """Keep the observations of a job."""
        name = application_of(job)
        points = self._points.setdefault(name, {})
        for o in job.observations:
            points.setdefault((o.gpu_type, o.nodes, o.gpus, o.micro_batch), o)
        if job.noise is not None:
            self._noise[name] = job.noise

    def give_to(self, job: SimulatedJob, others: Iterable[SimulatedJob] = ()) -> None:
        """Give a job that has not run yet the observations of its application; others nothing."""
        del others
        name = application_of(job)
        points = self._points.get(name)
        if points:
            job.inherit(tuple(points.values()), self._noise.get(name))


class SharedPools:
    """Pool of each application's jobs, and the noise of its first epoch."""

    def __init__(self) -> None:
        self._jobs: dict[str, dict[int, tuple[Observation, ...]]] = {}
        self._noise: dict[str, Noise] = {}

    def add(self, job: SimulatedJob) -> None:
        """Keep the observations of a job."""
        name = application_of(job)
        if job.observations:
            jobs = self._jobs.setdefault(name, {})
            jobs[job.job_id] = job.observations
            while len(jobs) > _MOST_JOBS:
                del jobs[next(iter(jobs))]
        if job.first_noise is not None:
            self._noise.setdefault(name, job.first_noise)

    def give_to(self, job: SimulatedJob, others: Iterable[SimulatedJob] = ()) -> None:
        """Give a job that has not run yet the pool of its application.

        Args:
            job: the job that starts with it.
            others: jobs of the application, which get the pool as it is now.
        """
        name = application_of(job)
        if name in self._jobs:
            pool = pooled(self._jobs[name].values())
            job.join(pool, self._noise.get(name))
            for other in others:
                other.update(pool)
