"""Snapshots and records of the simulated cluster, as a round reads them.

Values that have not changed stay the same objects between rounds, so that caches keyed by identity
or equality hit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from slurm_elastic.core.cluster import Job, JobState, Node, Partition, Snapshot
from slurm_elastic.core.gpu_parts import GpuName
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.core.submission import Submission
from slurm_elastic.models.link_estimates import LEAST_REPORTS
from slurm_elastic.simulator.shared_observations import application_of
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
        sharing: frozenset[str] = frozenset(),
    ) -> None:
        """Create the nodes, all idle.

        Args:
            cluster: nodes.
            measure: also report speeds, for policies that do not read `learned`.
            network: racks; None: all nodes are one rack.
            lengths: predicted run times; None: jobs have none.
            sharing: applications whose jobs share GPUs; where there are any, each GPU has two
                shards.
        """
        self._sharing = sharing
        self._parts: dict[int, GpuName] = {}
        self._lengths = lengths
        self.nodes = cluster.nodes(_PARTITION)
        if sharing:
            self.nodes = tuple(dataclasses.replace(n, shards=2) for n in self.nodes)
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
        self.divide(jobs)
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
            if job.job_id not in self._parts:
                for name, gpus in job.allocation.shares if job.allocation else ():
                    used[self._index[name]] += gpus
        for name, _ in set(self._parts.values()):
            used[self._index[name]] += 1
        return tuple(
            self._node(node, gpus) if gpus else node
            for node, gpus in zip(self.nodes, used, strict=True)
        )

    def divide(self, jobs: Sequence[SimulatedJob]) -> None:
        """Find the GPU of each job that has half of one, as Slurm would."""
        halves = {j.job_id: j.allocation for j in jobs if j.allocation and j.allocation.half}
        self._parts = {
            job_id: gpu
            for job_id, gpu in self._parts.items()
            if job_id in halves and halves[job_id].nodes == gpu[:1]
        }
        for job_id, half in halves.items():
            if job_id not in self._parts:
                (node,) = half.nodes
                counts = Counter(gpu for gpu in self._parts.values() if gpu[0] == node)
                free = ((node, i) for i in range(len(counts) + 1))
                self._parts[job_id] = next(
                    (gpu for gpu, count in counts.items() if count == 1),
                    next(gpu for gpu in free if gpu not in counts),
                )

    def partner(self, job: SimulatedJob, jobs: Iterable[SimulatedJob]) -> SimulatedJob | None:
        """Return the job with the other half of a job's GPU, as `divide` has found it."""
        gpu = self._parts.get(job.job_id)
        others = (o for o in jobs if o is not job and self._parts.get(o.job_id) == gpu)
        return next(others, None) if gpu else None

    def _node(self, node: Node, used: int) -> Node:
        busy_node = self._used.get((node.name, used))
        if busy_node is None:
            assert used <= node.gpus, f"{node.name} has {node.gpus} GPUs, {used} were allocated"
            busy_node = dataclasses.replace(node, used_gpus=used, used_cpus=used)
            self._used[node.name, used] = busy_node
        return busy_node

    def _job(self, job: SimulatedJob) -> Job:
        part = self._parts.get(job.job_id)
        key = (job.allocation, job.starts, job.companions, part)
        last_key, slurm_job = self._jobs.get(job.job_id, (None, None))
        if slurm_job is None or last_key != key:
            slurm_job = _slurm_job(job)
            if application_of(job) in self._sharing:
                slurm_job = _sharing(slurm_job, part)
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


def _sharing(job: Job, part: GpuName | None) -> Job:
    """Return a job with `share=yes`, and the GPU of which it has half."""
    assert job.submission is not None
    directive = dataclasses.replace(job.submission.directive, share="yes")
    submission = Submission(directive, {"min_nodes": 1})
    return dataclasses.replace(job, submission=submission, parts=(part,) if part else ())


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
