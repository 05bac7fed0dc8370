"""Snapshots and records of the simulated cluster, as a round reads them.

Values that have not changed stay the same objects between rounds, so that caches keyed by identity
or equality hit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from slurm_elastic.core.cluster import Job, JobState, Node, Partition, Snapshot
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.core.submission import Submission
from slurm_elastic.models.link_estimates import LEAST_REPORTS
from slurm_elastic.simulator.simulated_job import SimulatedJob
from slurm_elastic.simulator.simulated_lengths import SimulatedLengths
from slurm_elastic.simulator.truth.rack_network import Network
from slurm_elastic.simulator.workloads.cluster_text import Cluster

_PARTITION = "gpu"
_PARTITIONS = (Partition(name=_PARTITION),)


class SimulatedCluster:
    """Snapshots and records of one simulation.

    Attributes:
        nodes: all nodes, idle.
        rack_of: rack of each node; empty without racks.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        measure: bool,
        network: Network | None = None,
        lengths: SimulatedLengths | None = None,
    ) -> None:
        """Create the nodes, all idle.

        Args:
            cluster: nodes.
            measure: also report speeds, for policies that do not read `learned`.
            network: racks; None: all nodes are one rack.
            lengths: predicted run times; None: jobs have none.
        """
        self._lengths = lengths
        self.nodes = cluster.nodes(_PARTITION)
        self._index = {n.name: i for i, n in enumerate(self.nodes)}
        self._used: dict[tuple[str, int], Node] = {}
        self._jobs: dict[int, tuple[object, Job]] = {}
        self._records: dict[int, tuple[object, JobRecord]] = {}
        self._measure = measure
        self._gradient_bytes = network.gradient_bytes if network else {}
        names = [n.name for n in self.nodes]
        self._switches = network.switches(names) if network else ()
        self.rack_of = {n: s.name for s in self._switches if not s.children for n in s.nodes}

    def snapshot(self, at_s: float, jobs: Sequence[SimulatedJob]) -> Snapshot:
        """Return the cluster with these jobs, which are submitted and not complete."""
        return Snapshot(
            time=at_s,
            nodes=self._nodes(jobs),
            jobs=tuple(self._job(j) for j in jobs),
            partitions=_PARTITIONS,
            switches=self._switches,
        )

    def records(self, jobs: Iterable[SimulatedJob]) -> dict[int, JobRecord]:
        """Return a controller's records of these jobs."""
        return {j.job_id: self._record(j) for j in jobs}

    def forget(self, job_id: int) -> None:
        """Drop the cached values of a job that is complete."""
        self._jobs.pop(job_id, None)
        self._records.pop(job_id, None)

    def _nodes(self, jobs: Iterable[SimulatedJob]) -> tuple[Node, ...]:
        used = [0] * len(self.nodes)
        for job in jobs:
            for name, gpus in job.allocation.shares if job.allocation else ():
                used[self._index[name]] += gpus
        return tuple(
            self._node(node, gpus) if gpus else node
            for node, gpus in zip(self.nodes, used, strict=True)
        )

    def _node(self, node: Node, used: int) -> Node:
        busy_node = self._used.get((node.name, used))
        if busy_node is None:
            assert used <= node.gpus, f"{node.name} has {node.gpus} GPUs, {used} were allocated"
            busy_node = dataclasses.replace(node, used_gpus=used, used_cpus=used)
            self._used[node.name, used] = busy_node
        return busy_node

    def _job(self, job: SimulatedJob) -> Job:
        key = (job.allocation, job.starts, job.companions)
        last_key, slurm_job = self._jobs.get(job.job_id, (None, None))
        if slurm_job is None or last_key != key:
            slurm_job = _slurm_job(job)
            self._jobs[job.job_id] = (key, slurm_job)
        return slurm_job

    def _record(self, job: SimulatedJob) -> JobRecord:
        changing = job.changing
        length = self._lengths.of(job) if self._lengths else None
        fields = (
            *(id(job.learned), id(job.places), id(length)),
            *(changing, job.progress, job.allocation),
        )
        last_fields, record = self._records.get(job.job_id, (None, None))
        if record is None or last_fields != fields:
            record = JobRecord(
                job_id=job.job_id,
                measurements=_measurements(job) if self._measure else (),
                proven=True,
                reporting=job.allocation is not None,
                checkpoint_s=0.0,
                restart_s=job.restart_s,
                progress=min(1.0, job.progress / job.truth.total),
                last_change=job.changed_s if job.allocation is not None else None,
                in_transition=changing,
                target=job.allocation if changing else None,
                leased=job.allocation is None and job.starts > 0,
                resizes=job.restarts + job.changes_in_place,
                resizes_in_place=job.changes_in_place,
                in_place=job.resize_s is not None,
                pause_s=job.resize_s,
                learned=job.learned,
                gradient_bytes=self._gradient_bytes.get(job.submitted.application),
                length=length,
            )
            self._records[job.job_id] = (fields, record)
        return record


def _slurm_job(job: SimulatedJob) -> Job:
    directive, allocation = job.described.directive, job.allocation
    least, gpu_type = directive.start()
    return Job(
        job_id=job.job_id,
        display_id=str(job.job_id),
        name=job.submitted.name,
        user=job.submitted.user,
        uid=1000,
        state=JobState.RUNNING if allocation else JobState.PENDING,
        reason="" if allocation else "Resources",
        partition=_PARTITION,
        submit_time=job.submitted.time_s,
        start_time=job.started_s if allocation else None,
        # Slurm's count: a preempted job has been requeued once more.
        run=job.restarts if allocation else job.starts,
        submission=Submission(directive),
        allocation=allocation,
        companions=job.companions,
        gpus=allocation.gpus if allocation else least,
        gpu_type=allocation.gpu_type if allocation else gpu_type or "",
        cpus_per_gpu=0.0,
    )


def _measurements(job: SimulatedJob) -> tuple[Measurement, ...]:
    """Return the speed in each shape that the job ran in, at its fastest micro-batch.

    With racks, each has their number and the cost of crossing them.
    """
    pipeline = job.truth.profile.micro_batches
    if job.places:
        return _placed_measurements(job, pipeline)
    best: dict[tuple[str, int, int], Measurement] = {}
    for o in job.observations:
        shape = (o.gpu_type, o.gpus, o.nodes)
        unit = job.truth.profile.types[o.gpu_type].unit
        samples = o.gpus // unit * o.micro_batch * pipeline / o.step_s
        if shape not in best or samples > best[shape].samples_per_s:
            best[shape] = Measurement(
                gpu_type=o.gpu_type, gpus=o.gpus, nodes=o.nodes, samples_per_s=samples, steps=100
            )
    return tuple(best.values())


def _placed_measurements(job: SimulatedJob, pipeline: int) -> tuple[Measurement, ...]:
    best: dict[tuple[str, int, int, int], Measurement] = {}
    for (kind, nodes, gpus, micro_batch, racks), (step_s, micro_s) in job.places.items():
        unit = job.truth.profile.types[kind].unit
        samples = gpus // unit * micro_batch * pipeline / step_s
        shape = (kind, gpus, nodes, racks)
        if shape not in best or samples > best[shape].samples_per_s:
            best[shape] = Measurement(
                gpu_type=kind,
                gpus=gpus,
                nodes=nodes,
                racks=racks,
                samples_per_s=samples,
                steps=100,
                compute_s=micro_s,
                sync_s=max(0.0, step_s - micro_s),
                reports=LEAST_REPORTS,
            )
    return tuple(best.values())
