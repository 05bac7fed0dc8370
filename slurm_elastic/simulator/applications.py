"""Properties of a simulated job that schedulers have before it runs: application, directive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.core.application import Application, JobClass, TypeProfile
from slurm_elastic.core.directive import Directive, DirectiveError
from slurm_elastic.simulator.truth.ground_truth import GroundTruth
from slurm_elastic.simulator.workloads.application_profiles import ApplicationProfileError, Shape
from slurm_elastic.simulator.workloads.cluster_text import Cluster, Group
from slurm_elastic.simulator.workloads.workload import SubmittedJob, WorkloadError

#: An adaptive job never gets more GPUs than this (Sia's artifact).
MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class DescribedApplication:
    """A job's application and directive, as schedulers see them."""

    application: Application
    directive: Directive


def describe(job: SubmittedJob, truth: GroundTruth, cluster: Cluster) -> DescribedApplication:
    """Return the application and the directive of a job.

    An adaptive job asks for 1 to `MOST_GPUS` GPUs of any type with a table, a strong-scaling one
    for 1 to as many as its user asked for, a rigid one for exactly these; each only for the sizes
    that the workload lists for it.

    Raises:
        WorkloadError: no GPU type of the cluster can ever run it; names the workload's line.
    """
    types, units, gpus_by_type = [], {}, {}
    reasons = []
    for group in cluster:
        table = truth.profile.types.get(group.gpu_type)
        if table is None:
            reasons.append(f"{group.gpu_type}: no profile")
            continue
        unit = table.unit
        gpus = job.gpus if job.job_class is JobClass.RIGID else unit
        if gpus > group.gpus or gpus % unit:
            reasons.append(f"{group.gpu_type}: {group.gpus} GPUs in replicas of {unit}")
            continue
        try:
            rate = _rate(job, truth, group)
        except ApplicationProfileError as error:
            reasons.append(str(error))
            continue
        gpus_by_type[group.gpu_type] = group.gpus
        units[group.gpu_type] = unit
        types.append(
            TypeProfile(
                group.gpu_type,
                least=table.least,
                most=table.most,
                single=truth.single(group.gpu_type),
                rate=rate,
                unit=unit,
            )
        )
    if not types:
        raise WorkloadError(
            f"{job.source or job.name}: {job.name} ({job.job_class.value}, {job.gpus} GPUs) can"
            f" never run on {cluster} ({'; '.join(reasons)}); change num_replicas or the cluster"
        )
    application = Application(
        name=job.application,
        job_class=job.job_class,
        initial_batch=truth.initial,
        max_batch=truth.largest,
        batch=min(job.batch, truth.largest),
        gpus=job.gpus,
        micro_batches=truth.profile.micro_batches,
        types=tuple(types),
        profiled=True,
    )
    return DescribedApplication(
        application, _directive(job, cluster, units, gpus_by_type, application)
    )


def whole_nodes(gpus: int, per_node: int) -> Shape:
    """Return the fewest nodes for so many GPUs: full nodes, and one with the remainder."""
    full, remainder = divmod(gpus, per_node)
    return (remainder,) * bool(remainder) + (per_node,) * full


def _rate(job: SubmittedJob, truth: GroundTruth, group: Group) -> float | None:
    """Return the job's speed in its requested shape; None if the type does not have that shape."""
    if job.gpus > group.gpus or job.gpus % truth.profile.types[group.gpu_type].unit:
        return None
    try:
        return truth.rate(group.gpu_type, whole_nodes(job.gpus, group.per_node), job.batch)
    except ApplicationProfileError:
        if job.job_class is JobClass.RIGID:
            raise
        return None


def _directive(
    job: SubmittedJob,
    cluster: Cluster,
    units: Mapping[str, int],
    gpus_by_type: Mapping[str, int],
    application: Application,
) -> Directive:
    least, most = min(units.values()), min(job.most or MOST_GPUS, max(gpus_by_type.values()))
    if job.job_class is JobClass.RIGID:
        least = most = job.gpus
    elif job.job_class is JobClass.STRONG_SCALING:
        most = max(least, min(most, job.gpus))
    if application.micro_batches > 1:
        replicas = max(1, application.max_batch // application.micro_batches)
        most = min(most, max(least, *(u * replicas for u in units.values())))
    restricted = len(gpus_by_type) < len(cluster.groups)
    listed = tuple(size for size in job.listed if least <= size <= most)
    if job.listed and not listed:
        sizes = ":".join(map(str, job.listed))
        span = str(least) if least == most else f"{least}-{most}"
        raise WorkloadError(
            f"{job.source or job.name}: {job.name}: none of sizes {sizes} is within {span}, the"
            " GPUs that it can have; change sizes, num_replicas or the cluster"
        )
    units_by_type = tuple((t, u) for t, u in units.items() if u > 1 and u <= most)
    try:
        return Directive(
            min_gpus=least,
            max_gpus=most,
            types=tuple(gpus_by_type) if restricted else (),
            parallel="hybrid" if application.micro_batches > 1 else "data",
            units=units_by_type,
            listed=listed,
        )
    except DirectiveError as error:
        raise WorkloadError(f"{job.source or job.name}: {job.name}: {error}") from None
