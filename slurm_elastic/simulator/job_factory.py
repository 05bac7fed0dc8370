"""Creation of simulated jobs from a workload, with their truth and their descriptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from slurm_elastic.simulator.applications import DescribedApplication, describe
from slurm_elastic.simulator.in_place_job import InPlaceJob
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth import freezing_truth
from slurm_elastic.simulator.truth.freezing_truth import MAX_PENALTY, Belief, FreezingTruth
from slurm_elastic.simulator.truth.frozen_layers import FrozenLayers
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.truth.resize_costs import ResizeCosts
from slurm_elastic.simulator.truth.restart_costs import RestartCosts
from slurm_elastic.simulator.workloads.application_profiles import Profiles
from slurm_elastic.simulator.workloads.cluster_text import Cluster
from slurm_elastic.simulator.workloads.workload import Workload, WorkloadError


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options with which jobs run under a policy.

    Attributes:
        compat: fit models as Sia's artifact does.
        adaptive_batch: choose batches for goodput.
        freezes: freeze the layers of the best effective progress; else all that are allowed.
        belief: assumptions about freezing; None: no job freezes layers.
        resizes: costs of changes without a requeue; None: every change is a requeue.
        residuals: models correct their fits by what these leave over.
    """

    compat: bool = False
    adaptive_batch: bool = True
    freezes: bool = False
    belief: Belief | None = None
    resizes: ResizeCosts | None = None
    residuals: bool = False


def jobs(
    workload: Workload,
    profiles: Profiles,
    cluster: Cluster,
    restarts: RestartCosts,
    options: JobOptions,
) -> list[SimulatedJob]:
    """Return the jobs, none submitted yet; ids start at 1.

    Raises:
        WorkloadError: a job has no profile or can never run on this cluster.
    """
    truths: dict[str, GroundTruth] = {}
    layers: dict[str, FreezingTruth | None] = {}
    simulated = []
    for job_id, job in enumerate(workload.jobs, start=1):
        profile = profiles.get(job.application)
        if profile is None:
            raise WorkloadError(
                f"{job.source or job.name}: application {job.application[:60]} of {job.name} has no"
                f" profile; known: {', '.join(sorted(profiles))}"
            )
        truth = truths.setdefault(job.application, GroundTruth(profile))
        described = describe(job, truth, cluster)
        layers_of_job: FrozenLayers | None = None
        # The library certifies no layers of a pipeline.
        if options.belief is not None and profile.micro_batches == 1:
            if job.application not in layers:
                layers[job.application] = freezing_truth.of(job.application, options.belief)
            freezing = layers[job.application]
            if freezing is not None:
                layers_of_job = FrozenLayers(
                    freezing, weighs=options.freezes, compat=options.compat
                )
                described = _with_freezing(described)
        create: Callable[..., SimulatedJob] = SimulatedJob
        # The library cannot change a pipeline without a requeue.
        if options.resizes is not None and profile.micro_batches == 1:
            create = partial(InPlaceJob, resizes=options.resizes)
        simulated.append(
            create(
                job,
                truth,
                described,
                job_id=job_id,
                restart_s=restarts.of(job.application, profile.restart_s),
                compat=options.compat,
                adaptive_batch=options.adaptive_batch,
                layers=layers_of_job,
                residuals=options.residuals,
            )
        )
    return simulated


def assumptions(jobs: Iterable[SimulatedJob], belief: Belief | None) -> list[str]:
    """Return the assumptions about the jobs, as sentences."""
    notes = {note for job in jobs for note in job.truth.assumptions}
    if belief is not None:
        notes |= {
            f"{job.submitted.application.partition('#')[0]}: its layers are unknown, or it is a"
            " pipeline: it freezes nothing"
            for job in jobs
            if job.layers is None
        }
    return sorted(notes)


def _with_freezing(described: DescribedApplication) -> DescribedApplication:
    directive = dataclasses.replace(described.directive, freeze="auto", max_penalty=MAX_PENALTY)
    return dataclasses.replace(described, directive=directive)
