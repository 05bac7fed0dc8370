"""Terms on which a change may extend its job's time limit: predicted paces, and bounds.

The pace is that of the curve by which rounds judge gains (`models.speedup`), measured where the
job has been measured. Only a job with fewer GPUs than it was submitted with is extended: at the
same number it has the GPUs that the limit was chosen for, on any nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state import time_limits
from slurm_elastic.controller.state.time_limits import ExtensionTerms, TimeBudget
from slurm_elastic.core.cluster import Allocation, Job, Snapshot
from slurm_elastic.core.plan import Decision, JobRecord
from slurm_elastic.models.links import CommunicationCost
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.placement.eligibility import links_seen
from slurm_elastic.slurm import shape
from slurm_elastic.topology import Topology


class ExtensionPolicy(NamedTuple):
    """Budget and terms of a transition; both None: its limit is the time that is left."""

    budget: TimeBudget | None = None
    terms: ExtensionTerms | None = None


def allowed(
    job: Job,
    decision: Decision,
    budget: TimeBudget | None,
    *,
    snapshot: Snapshot,
    records: Mapping[int, JobRecord],
    config: Config,
    spare_s: int = 0,
) -> ExtensionPolicy:
    """Return the budget and the terms of a change.

    Args:
        job: as it is.
        decision: of the round.
        budget: as it was when the present attempt began; None: it was never extended.
        snapshot: the cluster.
        records: of its jobs.
        config: the site's.
        spare_s: see `Transition`.
    """
    if job.time_limit_s is None or (budget is None and not config.resize.extend_time):
        return ExtensionPolicy()
    if budget is None:
        submitted_minutes = int(job.submission.shape.get("time_limit", 0)) if job.submission else 0
        trusted = not submitted_minutes or job.time_limit_s <= 60 * submitted_minutes
        budget = time_limits.fresh(job.time_limit_s + spare_s, trusted=trusted)
    if not config.resize.extend_time:
        return ExtensionPolicy(budget, ExtensionTerms())
    record = records.get(job.job_id) or JobRecord(job_id=job.job_id)
    shapes = {"planned": decision.target, "old": job.allocation}
    links = links_seen(snapshot, records, config.topology.speeds).of_owner(job.user)
    model = SpeedModel.fit(
        config.speedup,
        record.measurements,
        CommunicationCost.of(record, links, config.speedup.types),
    )
    paces = {
        name: _pace(job, a.gpus, a.gpu_type, snapshot, model=model, nodes=a.nodes)
        for name, a in shapes.items()
        if a
    }
    if job.directive is not None:
        paces["queue"] = _pace(job, job.directive.min_gpus, job.gpu_type, snapshot, model=model)
    reserved = {
        name: at for name, held in shapes.items() if held and (at := reserved_from(held, snapshot))
    }
    return ExtensionPolicy(
        budget, ExtensionTerms(paces=paces, most_s=most_s(job, snapshot), reserved=reserved)
    )


def most_s(job: Job, snapshot: Snapshot) -> int | None:
    """Return the strictest of MaxTime of partition and MaxWall of QOS and associations (s)."""
    names = job.partition.split(",")
    bounds = [p.max_time_s for p in snapshot.partitions if p.name in names]
    bounds += [m.cap for m in snapshot.limits if m.resource == "wall" and job.job_id in m.jobs]
    return min((b for b in bounds if b is not None), default=None)


def reserved_from(held: Allocation, snapshot: Snapshot) -> float | None:
    """Return when (epoch s) one of these nodes is next reserved for others; None: never."""
    nodes = set(held.nodes)
    return min(
        (
            r.start_time
            for r in snapshot.reservations
            if not r.ours and r.end_time > snapshot.time and not nodes.isdisjoint(r.nodes)
        ),
        default=None,
    )


def _pace(
    job: Job,
    gpus: int,
    gpu_type: str,
    snapshot: Snapshot,
    *,
    model: SpeedModel,
    nodes: tuple[str, ...] = (),
) -> float:
    """Return predicted speed with these GPUs over that in the submitted shape.

    Args:
        job: with its submission.
        gpus: GPUs that it gets.
        gpu_type: type of these GPUs.
        snapshot: the cluster.
        model: the job's.
        nodes: of the GPUs; (): as few as possible.
    """
    full_gpus = min(shape.submitted_gpus(job), job.directive.max_gpus if job.directive else 1)
    if gpus >= full_gpus:  # more than MAX it never gets, whatever it was submitted with
        return 1.0
    submitted_type = shape.submitted_type(job.submission.shape) if job.submission else ""
    min_nodes = int(job.submission.shape.get("min_nodes", 1)) if job.submission else 1
    kind, gpu_type = submitted_type or gpu_type, gpu_type or submitted_type

    def fewest(count: int, of: str) -> int:
        return -(-count // max(1, snapshot.per_node.get(of, count)))

    tree = Topology.of(snapshot)
    spread, racks = tree.spread(n for n in nodes if tree.has(n))
    full_speed = model.speed(
        kind, full_gpus, min(full_gpus, max(min_nodes, fewest(full_gpus, kind), 1))
    )
    speed = model.speed(gpu_type, gpus, spread or fewest(gpus, gpu_type), racks or 1)
    return speed / full_speed if full_speed > 0 else 1.0
