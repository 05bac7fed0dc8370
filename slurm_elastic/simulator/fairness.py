"""Finish-time fairness: completion time against that on a fair share of the cluster.

Themis (NSDI'20) and Sia (SOSP'23, section 5.4) divide a job's completion time by its time alone on
1/n of the cluster, n the mean contention over its life. Sia's artifact (`ftf_simulator.py`)
simulates its policy on a cluster of one type with (all GPUs)/n GPUs, between the two nearest whole
numbers, and weights the types by their GPUs.

**Our definition** differs in one thing: the time alone is computed from the truth, not simulated.
The job holds its share from its start, pays one restart, and runs every epoch with the measured
batch of the best progress per second (a fixed batch stays fixed), on as few GPUs of its share as
are best. No job has to learn its speed, so rho > 1 also under a good policy, where Sia's definition
may give 1: compare rho between policies, not with the paper.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from slurm_elastic.core.application import JobClass
from slurm_elastic.simulator.applications import MOST_GPUS, whole_nodes
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth.ground_truth import Floats, GroundTruth
from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfileError,
    Shape,
    smallest_rotation,
)
from slurm_elastic.simulator.workloads.cluster_text import Cluster


def isolated_s(job: SimulatedJob, cluster: Cluster, contention: float) -> float:
    """Return the seconds that a job would take alone on its share, weighted over GPU types."""
    share = cluster.gpus / max(1.0, contention)
    total = weight = 0.0
    application = job.described.application
    batch = 0 if application.job_class is JobClass.ADAPTIVE else application.batch
    gpus = application.gpus if application.job_class is not JobClass.ADAPTIVE else MOST_GPUS
    rigid = application.job_class is JobClass.RIGID
    for type_profile in application.types:
        group = cluster.group(type_profile.gpu_type)
        if group is None:
            continue
        placement = (job.truth, type_profile.gpu_type, group.per_node, batch)
        if rigid:
            alone_s = _exactly(*placement, gpus) * max(1.0, gpus / share)
        else:
            least = float(type_profile.unit)
            gpus_held = max(least, min(share, float(gpus)))
            low, high = math.floor(gpus_held), math.ceil(gpus_held)
            alone_s = _at_most(*placement, low)
            if high > low:
                alone_s += (gpus_held - low) * (_at_most(*placement, high) - alone_s)
            alone_s *= max(1.0, least / share)
        if math.isfinite(alone_s):
            total += group.gpus * (alone_s + job.restart_s)
            weight += group.gpus
    return total / weight if total else math.nan


@lru_cache(maxsize=16384)
def _at_most(truth: GroundTruth, gpu_type: str, per_node: int, batch: int, gpus: int) -> float:
    """Return the seconds of training with the best number of GPUs up to this one."""
    sizes = {2**i for i in range(gpus.bit_length())} | set(range(per_node, gpus + 1, per_node))
    return min(
        (_exactly(truth, gpu_type, per_node, batch, size) for size in sizes if size <= gpus),
        default=math.inf,
    )


@lru_cache(maxsize=16384)
def _exactly(truth: GroundTruth, gpu_type: str, per_node: int, batch: int, gpus: int) -> float:
    """Return the seconds of training on so many GPUs; infinite if the tables have no time."""
    if gpus % truth.profile.types[gpu_type].unit:
        return math.inf
    shape = smallest_rotation(whole_nodes(gpus, per_node))
    try:
        splits = _splits(truth, gpu_type, shape, batch)
        rates = [_rates(truth, gpu_type, shape, m, s) for m, s in splits]
    except ApplicationProfileError:
        return math.inf
    spans = np.diff(truth.targets, prepend=0.0)
    return float((spans / np.max(rates, axis=0)).sum())


def _rates(truth: GroundTruth, gpu_type: str, shape: Shape, micro: int, steps: int) -> Floats:
    """Return the progress per second at every epoch."""
    step_s, micro_step_s = truth.iteration(gpu_type, shape, micro)
    gains = truth.gains(truth.batch(gpu_type, shape, micro, steps))
    return gains / (step_s + steps * micro_step_s) * truth.profile.calibration


def _splits(truth: GroundTruth, gpu_type: str, shape: Shape, batch: int) -> list[tuple[int, int]]:
    """Return the splits to try: measured micro-batches, and the largest with accumulation."""
    if batch or truth.profile.micro_batches > 1:
        return [truth.fixed_batch(gpu_type, shape, batch)]
    curve = truth.profile.types[gpu_type].curves.get(shape)
    first = truth.first_batch(gpu_type, shape)
    if curve is None:
        return [first]
    replicas, most = sum(shape), curve.micro_batches[-1]
    splits = [(m, 0) for m in curve.micro_batches]
    splits += [(most, s) for s in (1, 2, 4, 8)]
    fits = [(m, s) for m, s in splits if truth.initial <= replicas * m * (s + 1) <= truth.largest]
    return fits or [first]
