"""Jobs on one node in simulations: their true slowdown, and what a controller learns of it."""

from __future__ import annotations

from collections.abc import Sequence

from slurm_elastic.config.placement_settings import NeighbourSettings
from slurm_elastic.core.cluster import Snapshot
from slurm_elastic.models.colocation.node_sharing import SharingLearner, StepTime
from slurm_elastic.models.colocation.shared_speeds import SharedSpeeds
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable
from slurm_elastic.simulator.cluster_state import SimulatedCluster
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.truth.neighbour_slowdown import NeighbourSlowdown


class SimulatedNeighbours:
    """Neighbours of one simulation.

    Args:
        truth: how much applications on one node slow each other down.
        settings: `[neighbours]`.
        on_gpu: how much those on one GPU do.
    """

    def __init__(
        self,
        truth: NeighbourSlowdown,
        settings: NeighbourSettings,
        on_gpu: NeighbourSlowdown | None = None,
    ) -> None:
        self._truth, self._settings, self._on_gpu = truth, settings, on_gpu
        self._learner = SharingLearner(SharedSpeeds())
        self._seen_s: float | None = None

    def learn(self, snapshot: Snapshot, jobs: Sequence[SimulatedJob]) -> NeighbourTable | None:
        """Learn from what has passed since the last round; return what this round counts."""
        if self._settings.mode == "off":
            return None
        applications = {job.job_id: _application(job) for job in jobs}
        for job in jobs if self._seen_s is not None else ():
            slurm_job = snapshot.job[job.job_id]
            if job.shape and not job.changing and self._seen_s is not None:
                self._learner.note(
                    StepTime(
                        key=slurm_job.key,
                        run=slurm_job.run,
                        begin=self._seen_s,
                        end=snapshot.time,
                        step_s=1.0 / job.shared_speed,
                        setting=f"{job.gpu_type}|{job.shape}",
                    )
                )
        self._learner.follow(snapshot, applications)
        self._seen_s = snapshot.time
        if self._settings.mode != "act" or not self._learner.speeds.measured:
            return None
        return NeighbourTable(snapshot, self._learner.speeds, applications, self._settings)

    def gpu_pairs(self, snapshot: Snapshot, jobs: Sequence[SimulatedJob]) -> GpuPairTable | None:
        """Return the speeds of jobs on one GPU, as learned; None: no GPU is shared."""
        if self._settings.mode == "off" or self._on_gpu is None:
            return None
        applications = {job.job_id: _application(job) for job in jobs}
        return GpuPairTable(snapshot, self._learner.speeds, applications, self._settings)

    def slow(self, jobs: Sequence[SimulatedJob], state: SimulatedCluster) -> None:
        """Set the speed of each job beside those that stand on its nodes, or GPU, from now on.

        Args:
            jobs: all that run or wait.
            state: has the partners on one GPU.
        """
        on_node: dict[str, list[SimulatedJob]] = {}
        for job in jobs:
            for name in job.allocation.nodes if job.allocation else ():
                on_node.setdefault(name, []).append(job)
        for job in jobs:
            names = job.allocation.nodes if job.allocation else ()
            job.shared_speed = min(
                (
                    self._truth.speed(
                        _application(job),
                        [_application(o) for o in on_node[name] if o is not job],
                    )
                    for name in names
                ),
                default=1.0,
            )
            partner = state.partner(job, jobs) if self._on_gpu is not None else None
            if partner is not None and self._on_gpu is not None:
                names_on_gpu = _application(job), [_application(partner)]
                job.shared_speed *= self._on_gpu.speed(*names_on_gpu)


def _application(job: SimulatedJob) -> str:
    return job.submitted.application.partition("#")[0]
