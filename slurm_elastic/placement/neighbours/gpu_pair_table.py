"""Predicted speeds of two jobs on one GPU, as one round uses them.

Before two applications have shared a GPU, their speeds are predicted from what each of them used of
one alone. Where that is not known (no NVML), `EXPECTED_SPEED` counts, and the pair may be tried.
"""

from __future__ import annotations

from collections.abc import Mapping

from slurm_elastic.config.placement_settings import NeighbourSettings
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.models.colocation.gpu_memory import GpuMemory
from slurm_elastic.models.colocation.neighbour_speeds import NeighbourSpeed
from slurm_elastic.models.colocation.node_sharing import application_of, shared_gpu_type
from slurm_elastic.models.colocation.shared_speeds import PartOfNode, SharedSpeeds

#: Mean speed of the 780 published pairs, each at most 1 (docs/data.md): 0.914.
EXPECTED_SPEED = 0.91


class GpuPairTable:
    """Speeds of the jobs of one snapshot beside each other on one GPU.

    Args:
        snapshot: the cluster.
        speeds: measured speeds of jobs beside each other.
        applications: applications of the jobs that state one, by id.
        settings: `[neighbours]`.
        memory: use of a GPU's memory by applications; None: nothing was reported.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        speeds: SharedSpeeds,
        applications: Mapping[int, str],
        settings: NeighbourSettings,
        memory: GpuMemory | None = None,
    ) -> None:
        self.gate, self.measurements = settings.gate, settings.measurements
        self.pairs_jobs = settings.share_gpus == "act"
        self._snapshot, self._speeds, self._applications = snapshot, speeds, applications
        self._memory = memory or GpuMemory()

    def known(self, node: str, job_id: int, other_id: int) -> NeighbourSpeed:
        """Return the known speed of a job beside another one on a GPU of a node."""
        gpu_type = shared_gpu_type(self._snapshot.node[node])
        return self._speeds.of(gpu_type, self._part(job_id), self._part(other_id))

    def speed(self, node: str, job_id: int, other_id: int) -> float:
        """Return the measured or predicted speed, at most 1; the expected one if there is none."""
        known = self.known(node, job_id, other_id)
        return min(1.0, known.speed) if known.measured or known.modelled else EXPECTED_SPEED

    def hurts(self, node: str, job_id: int, other_id: int) -> bool:
        """Return whether the measured speed of a job beside another one is below the gate."""
        known = self.known(node, job_id, other_id)
        return known.measured >= self.measurements and known.speed < self.gate

    def has_memory(self, node: str, job_id: int, other_id: int) -> bool:
        """Return whether two jobs fit into the memory of a GPU of a node, as far as is known."""
        first, second = (self._part(i).application for i in (job_id, other_id))
        return self._memory.fits(self._snapshot.node[node].gpu_type, first, second)

    def _part(self, job_id: int) -> PartOfNode:
        job = self._snapshot.job.get(job_id)
        name = self._applications.get(job_id) or (application_of(job) if job else "")
        return PartOfNode(application=name, gpus=1, on_gpu=True)
