"""Simulated jobs out of a workload: each with its truth, and what schedulers are told of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from slurm_elastic.simulator.applications import DescribedApplication, describe
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth import freezing_truth
from slurm_elastic.simulator.truth.freezing_truth import MAX_PENALTY, Belief, FreezingTruth
from slurm_elastic.simulator.truth.frozen_layers import FrozenLayers
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.truth.restart_costs import RestartCosts
from slurm_elastic.simulator.workloads.application_profiles import Profiles
from slurm_elastic.simulator.workloads.cluster_text import Cluster
from slurm_elastic.simulator.workloads.workload import Workload, WorkloadError


@dataclass(frozen=True, kw_only=True)
class SimulationManner:
    """How jobs run under a policy.

    Attributes:
        compat: they fit their models as Sia's artifact does.
        tunes: their batches are chosen for goodput.
        freezes: frozen layers are chosen for effective progress; else all allowed freeze.
        belief: about freezing; None: no job freezes layers.
    """

    compat: bool = False
    tunes: bool = True
    freezes: bool = False
    belief: Belief | None = None


def jobs(
    workload: Workload,
    profiles: Profiles,
    cluster: Cluster,
    restarts: RestartCosts,
    manner: SimulationManner,
) -> list[SimulatedJob]:
    """The jobs, none submitted yet; ids from 1 on.

    Raises:
        WorkloadError: a job has no profile or can never run on this cluster.
    """
    physics: dict[str, GroundTruth] = {}
    layers: dict[str, FreezingTruth | None] = {}
    found = []
    for job_id, job in enumerate(workload.jobs, start=1):
        profile = profiles.get(job.application)
        if profile is None:
            raise WorkloadError(
                f"{job.source or job.name}: application {job.application[:60]} of {job.name} has no"
                f" profile; known: {', '.join(sorted(profiles))}"
            )
        truth = physics.setdefault(job.application, GroundTruth(profile))
        described = describe(job, truth, cluster)
        frozen: FrozenLayers | None = None
        # The library certifies nothing in a pipeline.
        if manner.belief is not None and profile.micro_batches == 1:
            if job.application not in layers:
                layers[job.application] = freezing_truth.of(job.application, manner.belief)
            known = layers[job.application]
            if known is not None:
                frozen = FrozenLayers(known, weighs=manner.freezes, compat=manner.compat)
                described = _asks(described)
        found.append(
            SimulatedJob(
                job,
                truth,
                described,
                job_id=job_id,
                restart_s=restarts.of(job.application, profile.restart_s),
                compat=manner.compat,
                tunes=manner.tunes,
                layers=frozen,
            )
        )
    return found


def assumptions(jobs: Iterable[SimulatedJob], belief: Belief | None) -> list[str]:
    """What had to be assumed about them, in words."""
    found = {note for job in jobs for note in job.physics.assumptions}
    if belief is not None:
        found |= {
            f"{job.submitted.application.partition('#')[0]}: no layers are known of it, or it is a"
            " pipeline: it freezes nothing"
            for job in jobs
            if job.layers is None
        }
    return sorted(found)


def _asks(described: DescribedApplication) -> DescribedApplication:
    directive = dataclasses.replace(described.directive, freeze="auto", max_penalty=MAX_PENALTY)
    return dataclasses.replace(described, directive=directive)
