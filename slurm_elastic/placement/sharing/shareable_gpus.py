"""GPUs that two jobs may share: jobs and nodes that allow it, and room beside a plan. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from slurm_elastic.core.cluster import Allocation, Job, Node
from slurm_elastic.core.gpu_parts import jobs_by_gpu
from slurm_elastic.placement.assignment import Assignment
from slurm_elastic.placement.best_fit import NodeDemand, takes
from slurm_elastic.placement.eligibility import Eligibility, RoundJob
from slurm_elastic.placement.free_resources import FreeResources
from slurm_elastic.placement.node_arrays import NodeArrays

#: Fields of a submission that ask for CPUs or memory per GPU: Slurm cannot compute these for a job
#: on shards, which holds no GPU.
_BY_GPUS = ("cpus_per_tres", "mem_per_tres")


def is_divisible(node: Node) -> bool:
    """Return whether two jobs may share a GPU of a node, by its shards."""
    return node.available and node.shards >= 2 and node.shards % 2 == 0


def may_share(round_job: RoundJob, gpu_type: str) -> bool:
    """Return whether a job may run on half of a GPU of this type."""
    job, directive = round_job.job, round_job.directive
    shape = job.submission.shape if job.submission else {}
    return (
        directive.share == "yes"
        and round_job.record.half_barred is None
        and bool(shape)
        and directive.allows(1, gpu_type)
        and not job.cpus_follow_gpus
        and not any(name in shape for name in _BY_GPUS)
    )


def half_of_gpu(host: RoundJob) -> Allocation:
    """Return half of the GPU of a running job that holds one, or half of one."""
    held = host.job.allocation
    assert held is not None
    return dataclasses.replace(held, half=True)


class OpenGpus:
    """GPUs of each node on which Slurm could put a job that asks for half of one.

    Slurm takes the first GPU of a node with enough free shards, and a request cannot name one.

    Args:
        frame: the cluster.
        round_jobs: all elastic jobs.
    """

    def __init__(self, frame: NodeArrays, round_jobs: Mapping[int, RoundJob]) -> None:
        self._frame = frame
        self._divided: dict[str, list[tuple[Job, ...]]] = {}
        for (node, _), present in jobs_by_gpu(frame.snapshot.jobs).items():
            self._divided.setdefault(node, []).append(present)
        self._unclear = {n for j in frame.snapshot.jobs for n, index in j.parts if index < 0}
        for round_job in round_jobs.values():
            if round_job.eligibility is Eligibility.MOVING:
                for place in (round_job.current, round_job.record.target):
                    self._unclear.update(place.nodes if place else ())

    def has_no_other(self, job: Job) -> bool:
        """Return whether Slurm could put a partner nowhere on a job's node but on the job's GPU.

        False where jobs come and go, or where jobs hold other parts of GPUs.
        """
        held = job.allocation
        if held is None or held.nodes[0] in self._unclear:
            return False
        (node,) = held.nodes
        if node not in self._frame.index or self._frame.free[self._frame.index[node]] > 0:
            return False
        return self.no_other_part(job, node)

    def no_other_part(self, job: Job | None, node: str) -> bool:
        """Return whether all divided GPUs of a node belong to pairs, or to this job alone."""
        divided = self._divided.get(node, ())
        return node not in self._unclear and all(p == (job,) or _is_pair(p) for p in divided)

    def has_one_free(self, name: str, assignment: Assignment) -> bool:
        """Return whether one GPU of a node is free, and none has a free half.

        Then Slurm puts a job that asks for half of a GPU there on that one.
        """
        node = self._frame.snapshot.node.get(name)
        if node is None or not is_divisible(node) or not self.no_other_part(None, name):
            return False
        at = self._frame.index[name]
        free = assignment.later.gpus[at] + 1 if assignment.at_once else self._frame.free[at]
        return int(free) == 1


def _is_pair(present: Sequence[Job]) -> bool:
    return len(present) == 2 and all(j.allocation and j.allocation.half for j in present)


class SharedNodeRoom:
    """Free resources beside a plan, for jobs that start on halves of GPUs.

    Args:
        free: is changed.
    """

    def __init__(self, free: FreeResources) -> None:
        self._free = free
        self._demands: dict[int, NodeDemand] = {}

    def fits(self, host: RoundJob, guest: RoundJob) -> bool:
        """Return whether a waiting job may start on the node of a running one, but for its GPU."""
        place, gpus = half_of_gpu(host).whole, self._free.gpus
        index = self._free.frame.index.get(place.nodes[0])
        if index is None or not may_share(guest, place.gpu_type):
            return False
        demand = self._demand(guest)
        if not demand.allowed[index]:
            return False
        in_use, gpus[index] = int(gpus[index]), 1
        fits = takes(demand, place, self._free)
        gpus[index] = in_use
        return fits

    def take(self, host: RoundJob, guest: RoundJob) -> None:
        """Book a job beside another one."""
        self._free.take(guest.need, half_of_gpu(host))

    def _demand(self, guest: RoundJob) -> NodeDemand:
        demand = self._demands.get(guest.job.job_id)
        if demand is None:
            frame = self._free.frame
            # Slurm's backfill has often planned the node for this very job, once a GPU is free.
            allowed = frame.allowed(guest.job, planned=True)
            demand = dataclasses.replace(guest.demand(frame), allowed=allowed)
            self._demands[guest.job.job_id] = demand
        return demand
