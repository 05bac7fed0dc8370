"""Measurements before admission: the paper's job scalability analyser, from the truth.

The elastic batch-size optimiser (MASCOTS 2020) measures each job on one GPU at several batches,
and its all-reduce on several numbers of GPUs, before it is admitted. Our definition for
simulations: the profile's step times at `_BATCHES` micro-batches in geometric steps, on 1, 2, 4,
... GPUs of each type up to `MOST_GPUS`. The time of the measurement is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from slurm_elastic.core.application import Observation
from slurm_elastic.simulator.applications import MOST_GPUS, whole_nodes
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads.application_profiles import ApplicationProfileError
from slurm_elastic.simulator.workloads.cluster_text import Cluster, Group

_BATCHES = 4


def add_observations(jobs: Iterable[SimulatedJob], cluster: Cluster) -> None:
    """Add the simulated measurements of their applications to jobs."""
    observations: dict[str, tuple[Observation, ...]] = {}
    for job in jobs:
        name = job.submitted.application
        if name not in observations:
            observations[name] = tuple(o for g in cluster for o in _observations(job.truth, g))
        job.inherit(observations[name], None)


def _observations(truth: GroundTruth, group: Group) -> Iterator[Observation]:
    table = truth.profile.types.get(group.gpu_type)
    gpus = table.unit if table else 0
    while table and gpus <= min(group.gpus, MOST_GPUS):
        shape = whole_nodes(gpus, group.per_node)
        try:
            most = min(truth.most(group.gpu_type, shape), table.most)
            span = np.geomspace(table.least, max(table.least, most), _BATCHES)
            for micro in sorted({round(m) for m in span.tolist()}):
                times = truth.iteration(group.gpu_type, shape, micro)
                yield Observation(group.gpu_type, len(shape), gpus, micro, *times)
        except ApplicationProfileError:
            pass  # the tables have no time for this shape
        gpus *= 2
