"""Which jobs stand on one node, and what is learned from the step times of such jobs.

A step time counts if the same jobs held the same GPUs of the job's nodes while it was measured, and
the GPUs and CPUs in use there are those of known jobs. Without another job it is a measurement of
the job alone; beside others on one of its nodes, of these pairs (`SharedSpeeds.record_shared`).
Rigid jobs are neighbours, too.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from slurm_elastic.core.cluster import Job, JobState, Node, Snapshot
from slurm_elastic.core.gpu_parts import held_gpus, partners
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse, PartOfNode, SharedSpeeds

#: States in which a job uses its node.
_USING = (JobState.RUNNING, JobState.COMPLETING)
#: Seconds of step times that make one measurement.
MEASURED_S = 30.0
#: Part of a node's CPUs that jobs may use that are not known.
_UNKNOWN_CPUS = 0.25
_NO_USE = MeasuredUse()
#: Most step times that wait for the next snapshot.
_WAITING = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Median time of a job's steps between two times (epoch s).

    Attributes:
        key, run: of the job's attempt.
        setting: everything else that sets the step time: GPUs, batch, layout.
        use: what the job used meanwhile.
    """

    key: str
    run: int
    begin: float
    end: float
    step_s: float
    setting: str
    use: MeasuredUse = _NO_USE


@dataclass(frozen=True, slots=True)
class _Colocation:
    """Jobs on the nodes of one job: (node, own GPUs), and (node, job id, key, GPUs) of others.

    `on_gpu`: (job id, key) of those on the same GPU.
    """

    run: int
    own: tuple[tuple[str, int], ...]
    others: frozenset[tuple[str, int, str, int]]
    on_gpu: frozenset[tuple[int, str]] = frozenset()


def node_type(node: Node) -> str:
    """Return the name by which nodes with the same hardware share measurements."""
    return f"{node.gpu_type or 'gpu'}*{node.gpus}/{node.cpus}"


def shared_gpu_type(node: Node) -> str:
    """Return the name by which measurements of jobs on one GPU are kept, apart from those above."""
    return f"{node.gpu_type or 'gpu'}, one GPU"


def application_of(job: Job, stated: str = "") -> str:
    """Return the name of a job's training: of its user, as stated or by the job's name."""
    return f"{job.user}/{stated or job.name}"


def tenants(snapshot: Snapshot) -> dict[str, list[tuple[Job, int]]]:
    """Return the jobs on each node in use, and how many of its GPUs they hold."""
    on_node: dict[str, list[tuple[Job, int]]] = {}
    for job in snapshot.jobs:
        if job.state in _USING and job.allocation is not None:
            for name, gpus in job.allocation.shares:
                on_node.setdefault(name, []).append((job, gpus))
    return on_node


class SharingLearner:
    """Assigns step times to pairs of jobs; not for several threads, but for `note`.

    Args:
        speeds: what is learned.
    """

    def __init__(self, speeds: SharedSpeeds) -> None:
        self.speeds = speeds
        self._noted: deque[StepTime] = deque(maxlen=_WAITING)
        self._colocations: dict[str, tuple[_Colocation, float]] = {}
        self._collected: dict[str, list[StepTime]] = {}

    def note(self, step_time: StepTime) -> None:
        """Keep a step time until the next snapshot shows that nothing has changed meanwhile."""
        self._noted.append(step_time)

    def follow(self, snapshot: Snapshot, applications: Mapping[int, str]) -> None:
        """Learn from the step times noted before a snapshot.

        Args:
            snapshot: the cluster.
            applications: of the jobs that state one, by id.
        """
        on_node, on_gpu = tenants(snapshot), partners(snapshot.jobs)
        known = {job.job_id: job for jobs in on_node.values() for job, _ in jobs}
        in_use = held_gpus(known.values())
        unknown = {
            name
            for name in on_node
            if _has_unknown_jobs(snapshot.node.get(name), on_node, in_use[name])
        }
        colocations: dict[str, tuple[_Colocation, float]] = {}
        unchanged: dict[str, tuple[Job, _Colocation, float]] = {}
        for job in snapshot.jobs:
            held = job.allocation
            if job.submission is None or job.state is not JobState.RUNNING or not held:
                continue
            if not unknown.isdisjoint(held.nodes):
                continue
            beside = frozenset((o.job_id, o.key) for o in on_gpu.get(job.job_id, ()))
            colocation = _Colocation(job.run, held.shares, _others(job, on_node), beside)
            old, since = self._colocations.get(job.key, (None, snapshot.time))
            colocations[job.key] = (colocation, since if old == colocation else snapshot.time)
            if old == colocation:
                unchanged[job.key] = (job, colocation, since)
        self._colocations = colocations
        self._collected = {k: v for k, v in self._collected.items() if k in unchanged}
        waiting = [self._noted.popleft() for _ in range(len(self._noted))]
        for step_time in waiting:
            if step_time.end > snapshot.time:
                self._noted.append(step_time)
                continue
            present = unchanged.get(step_time.key)
            if present is None:
                continue
            job, colocation, since = present
            if step_time.begin >= since and step_time.run == job.run:
                self._collect(job, colocation, step_time, snapshot, applications)

    def _collect(
        self,
        job: Job,
        colocation: _Colocation,
        step_time: StepTime,
        snapshot: Snapshot,
        applications: Mapping[int, str],
    ) -> None:
        collected = self._collected.setdefault(job.key, [])
        if collected and collected[-1].setting != step_time.setting:
            collected.clear()
        collected.append(step_time)
        if sum(s.end - s.begin for s in collected) < MEASURED_S:
            return
        del self._collected[job.key]
        step_s = statistics.median(s.step_s for s in collected)
        application = applications.get(job.job_id) or application_of(job)
        first = snapshot.node[colocation.own[0][0]]
        if first.shards and sum(gpus for _, gpus in colocation.own) == 1:
            partners_of = [
                applications.get(other_id) or application_of(snapshot.job[other_id])
                for other_id, _ in colocation.on_gpu
            ]
            self._learn_on_gpu(first, application, partners_of, step_time.setting, step_s)
        if colocation.on_gpu:
            return  # what slows it on its node cannot be told from that
        neighbours = {job_id for _, job_id, _, _ in colocation.others}
        use = _median([s.use for s in collected])
        self.speeds.record_use(application, use, alone=not neighbours)
        if not neighbours:
            self.speeds.record_alone(application, step_time.setting, step_s)
        elif len(neighbours) == 1 or len({name for name, _, _, _ in colocation.others}) == 1:
            # A neighbour on several nodes counts where it has most GPUs.
            name = max(colocation.others, key=lambda o: (o[3], o[0]))[0]
            node = snapshot.node[name]
            others = sorted(o for o in colocation.others if o[0] == name)
            self.speeds.record_shared(
                PartOfNode(
                    application=application,
                    gpus=dict(colocation.own)[name],
                    node_cpus=node.cpus,
                    crosses=len(colocation.own) > 1,
                ),
                [
                    PartOfNode(
                        application=applications.get(other_id)
                        or application_of(snapshot.job[other_id]),
                        gpus=gpus,
                        node_cpus=node.cpus,
                        crosses=snapshot.job[other_id].gpus > gpus,
                    )
                    for _, other_id, _, gpus in others
                ],
                node_type=node_type(node),
                setting=step_time.setting,
                step_s=step_s,
            )

    def _learn_on_gpu(
        self, node: Node, application: str, others: list[str], setting: str, step_s: float
    ) -> None:
        """Learn from the step time of a job of one GPU, by itself there or beside another one.

        Other jobs on the node are the same with and without a partner, more or less.
        """
        setting = f"one GPU|{setting}"
        if not others:
            self.speeds.record_alone(application, setting, step_s)
        elif len(others) == 1:
            self.speeds.record_shared(
                PartOfNode(application=application, gpus=1, on_gpu=True),
                [PartOfNode(application=others[0], gpus=1, on_gpu=True)],
                node_type=shared_gpu_type(node),
                setting=setting,
                step_s=step_s,
            )


def _median(uses: list[MeasuredUse]) -> MeasuredUse:
    """Return the median of each field, of the measurements that have it."""
    medians = {}
    for field in dataclasses.fields(MeasuredUse):
        values = [v for use in uses if (v := getattr(use, field.name)) is not None]
        medians[field.name] = statistics.median(values) if values else None
    return MeasuredUse(**medians)


def _others(
    job: Job, on_node: Mapping[str, list[tuple[Job, int]]]
) -> frozenset[tuple[str, int, str, int]]:
    return frozenset(
        (name, other.job_id, other.key, gpus)
        for name in (job.allocation.nodes if job.allocation else ())
        for other, gpus in on_node.get(name, ())
        if other.job_id != job.job_id
    )


def _has_unknown_jobs(
    node: Node | None, on_node: Mapping[str, list[tuple[Job, int]]], in_use: int
) -> bool:
    """Return whether GPUs or many CPUs of a node are in use by jobs that are not known here."""
    if node is None:
        return True
    present = on_node[node.name]
    cpus = sum(max(1.0, job.cpus_per_gpu) * gpus for job, gpus in present)
    return node.used_gpus > in_use or node.used_cpus - cpus > _UNKNOWN_CPUS * node.cpus
