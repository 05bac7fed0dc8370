"""Predicted slowdown of jobs on one node, as one round uses it.

A pair hurts if the speed of either job beside the other is predicted below the gate. Nothing is
predicted, and no place is avoided, before a pair was measured twice or the model of its node type
has enough measurements.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from slurm_elastic.config.placement_settings import NeighbourSettings
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.models.colocation.neighbour_speeds import NeighbourSpeed
from slurm_elastic.models.colocation.node_sharing import application_of, node_type
from slurm_elastic.models.colocation.shared_speeds import ENOUGH, PartOfNode, SharedSpeeds

#: A job on a node, and the GPUs that it holds there.
Tenant = tuple[int, int]


class NeighbourTable:
    """Speeds of the jobs of one snapshot beside each other.

    Args:
        snapshot: the cluster.
        speeds: what is known.
        applications: of the jobs that state one, by id.
        settings: `[neighbours]`.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        speeds: SharedSpeeds,
        applications: Mapping[int, str],
        settings: NeighbourSettings,
    ) -> None:
        self.gate, self.measurements = settings.gate, settings.measurements
        self._speeds, self._nodes = speeds, snapshot.node
        self._jobs, self._applications = snapshot.job, applications
        self._types = {node.name: node_type(node) for node in snapshot.nodes}
        self._known: dict[tuple[object, ...], NeighbourSpeed] = {}

    def speed(self, node: str, job: Tenant, other: Tenant) -> NeighbourSpeed:
        """Return the speed of a job beside another one on a node."""
        key = (self._types[node], *self._part(job), *self._part(other))
        known = self._known.get(key)
        if known is None:
            cpus = self._nodes[node].cpus
            parts = (
                PartOfNode(application=name, gpus=gpus, node_cpus=cpus, crosses=crosses)
                for name, gpus, crosses in (self._part(job), self._part(other))
            )
            known = self._known[key] = self._speeds.of(self._types[node], *parts)
        return known

    def _part(self, tenant: Tenant) -> tuple[str, int, bool]:
        """Return the application of a job, its GPUs on a node, and whether it has others."""
        job_id, gpus = tenant
        job = self._jobs.get(job_id)
        application = self._applications.get(job_id)
        if not application:
            application = application_of(job) if job else ""
        # With fewer GPUs here than it has, or asks for, the others are on other nodes.
        return application, gpus, job is not None and job.gpus > gpus

    def slowed(self, node: str, job: Tenant, others: Iterable[Tenant]) -> float:
        """Return the predicted speed of a job beside all others on a node; 1: not slowed."""
        product = 1.0
        for other in others:
            known = self.speed(node, job, other)
            if counts(known):
                product *= min(1.0, known.speed)
        return product

    def total_speed(self, node: str, jobs: Iterable[Tenant], present: Collection[Tenant]) -> float:
        """Return the predicted speeds of jobs on a node, each times its GPUs there.

        Args:
            node: the node that they run on.
            jobs: those that are counted.
            present: all jobs on the node, these included.
        """
        return sum(
            job[1] * self.slowed(node, job, [other for other in present if other != job])
            for job in jobs
        )

    def hurts(self, node: str, job: Tenant, others: Iterable[Tenant]) -> bool:
        """Return whether a job on a node and any of the others hurt each other there."""
        return any(
            counts(known) and known.speed < self.gate
            for other in others
            for known in (self.speed(node, job, other), self.speed(node, other, job))
        )


def counts(speed: NeighbourSpeed) -> bool:
    """Return whether enough is known for decisions."""
    return speed.modelled or speed.measured >= ENOUGH
