"""Synthetic clusters for benchmarks and tests: consistent snapshots, and the effect of plans.

>>> cluster = Cluster([node("g1"), node("g2")])
>>> cluster.add(1, elastic="2-8", on={"g1": 2})
>>> cluster.add(2, gpus=4)
>>> [n.free_gpus for n in cluster.snapshot().nodes]
[2, 4]
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from slurm_elastic.core.cluster import (
    Allocation,
    Job,
    JobState,
    Limit,
    Node,
    Partition,
    Snapshot,
    Switch,
)
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.gpu_parts import GpuName, held_gpus, jobs_by_gpu
from slurm_elastic.core.plan import Action, JobRecord, Measurement, Plan
from slurm_elastic.core.submission import Submission
from slurm_elastic.placement.free_resources import ResourceNeed

NOW = 1_750_000_000.0


def node(name: str, gpus: int = 4, gpu_type: str = "a100", **more: object) -> Node:
    """Return a node with 8 CPUs and 64 GB per GPU, in partition `gpu`."""
    fields: dict[str, object] = {
        "cpus": 8 * gpus,
        "memory_mb": 64_000 * gpus,
        "partitions": frozenset({"gpu"}),
    }
    return Node(name=name, gpu_type=gpu_type, gpus=gpus, **(fields | more))  # type: ignore[arg-type]


@dataclass
class Cluster:
    """Nodes and jobs to which more can be added; `snapshot` counts the resources in use."""

    nodes: Sequence[Node]
    jobs: list[Job] = field(default_factory=list)
    records: dict[int, JobRecord] = field(default_factory=dict)
    switches: tuple[Switch, ...] = ()
    limits: tuple[Limit, ...] = ()
    partitions: tuple[Partition, ...] = (Partition(name="gpu"),)
    time: float = NOW

    def add(
        self,
        job_id: int,
        *,
        elastic: str = "",
        on: Mapping[str, int] | None = None,
        gpus: int = 0,
        shape: Mapping[str, int | str] | None = None,
        record: Mapping[str, object] | None = None,
        half_of: int | None = None,
        **more: object,
    ) -> None:
        """Add a job: elastic with a directive, running with shares `on` nodes.

        A running elastic job is proven and its last change long past, unless `record` differs. With
        `half_of` it has half of the GPU of that index.
        """
        types = {n.name: n.gpu_type for n in self.nodes}
        half = half_of is not None
        held = Allocation.of(types[next(iter(on))], on, half=half) if on else None
        fields: dict[str, object] = {
            "state": JobState.RUNNING if held else JobState.PENDING,
            "gpus": held.gpus if held else gpus,
            "gpu_type": held.gpu_type if held else "",
            "partition": "gpu",
            "cpus_per_gpu": 2.0,
            "memory_per_gpu_mb": 8_000.0,
            "submit_time": self.time - 10_000 + job_id,
            "start_time": self.time - 5_000 if held else None,
            "reason": "" if held else "Resources",
            "parts": ((held.nodes[0], half_of),) if held and half else (),
        }
        self.jobs.append(
            Job(
                job_id=job_id,
                display_id=str(job_id),
                name=f"job{job_id}",
                user="bob" if job_id % 2 else "alice",
                uid=1000 + job_id % 2,
                submission=Submission(Directive.parse(elastic), shape or {}) if elastic else None,
                allocation=held,
                **(fields | more),  # type: ignore[arg-type]
            )
        )
        if elastic:
            known: dict[str, object] = {"proven": True, "reporting": True}
            known |= {"last_change": self.time - 5_000} if held else {}
            self.records[job_id] = JobRecord(job_id=job_id, **(known | dict(record or {})))  # type: ignore[arg-type]

    def snapshot(self) -> Snapshot:
        """Return the cluster now, with the nodes' use counted from the jobs."""
        gpus_in_use = held_gpus(self.jobs)
        used: dict[str, list[int]] = {n.name: [gpus_in_use[n.name], 0, 0] for n in self.nodes}
        for job in self.jobs:
            need = ResourceNeed.of(job)
            for name, gpus in job.allocation.shares if job.allocation else ():
                used[name][1] += need.cpus(gpus)
                used[name][2] += need.memory(gpus)
        return Snapshot(
            time=self.time,
            nodes=tuple(
                dataclasses.replace(
                    n,
                    used_gpus=used[n.name][0],
                    used_cpus=used[n.name][1],
                    used_memory_mb=used[n.name][2],
                )
                for n in self.nodes
            ),
            jobs=tuple(self.jobs),
            switches=self.switches,
            partitions=self.partitions,
            limits=self.limits,
        )

    def carry_out(self, plan: Plan) -> None:
        """Carry out a plan at once; jobs with a claim whose GPUs are free then start."""
        for decision in plan.decisions:
            if decision.action is not Action.KEEP:
                self._hold(decision.job_id, decision.target)
        snapshot = self.snapshot()
        free = {n.name: n.free_gpus for n in snapshot.nodes}
        for claim in plan.claims:
            job = snapshot.job[claim.job_id]
            if all(free[n] >= g for n, g in claim.shares) and job.state is JobState.PENDING:
                kind = snapshot.node[claim.shares[0][0]].gpu_type
                self._hold(claim.job_id, Allocation(kind, claim.shares))
                for name, gpus in claim.shares:
                    free[name] -= gpus

    def _hold(self, job_id: int, target: Allocation | None) -> None:
        at = next(i for i, j in enumerate(self.jobs) if j.job_id == job_id)
        suspended = target is None and self.jobs[at].allocation is not None
        others = [j for j in self.jobs if j.job_id != job_id]
        parts = (self._free_half(target.nodes[0], others),) if target and target.half else ()
        self.jobs[at] = dataclasses.replace(
            self.jobs[at],
            run=self.jobs[at].run + suspended,
            state=JobState.RUNNING if target else JobState.PENDING,
            allocation=target,
            parts=parts,
            gpus=target.gpus if target else self.jobs[at].gpus,
            start_time=(self.jobs[at].start_time or self.time) if target else None,
        )

    @staticmethod
    def _free_half(name: str, others: Sequence[Job]) -> GpuName:
        """Return a GPU of a node of which one other job holds half; else one that has none."""
        holders = jobs_by_gpu(others)
        alone = (gpu for gpu, jobs in holders.items() if gpu[0] == name and len(jobs) == 1)
        fresh = ((name, i) for i in range(99) if (name, i) not in holders)
        return next(alone, None) or next(fresh)


def racks(names: Sequence[str], size: int) -> tuple[Switch, ...]:
    """Return a two-level tree: `size` nodes below each switch, one spine."""
    groups = [tuple(names[i : i + size]) for i in range(0, len(names), size)]
    leaves = tuple(Switch(f"rack{i}", 0, group) for i, group in enumerate(groups))
    return (*leaves, Switch("spine", 1, tuple(names), tuple(s.name for s in leaves)))


def busy(nodes: int, jobs: int, *, per_node: int = 8, seed: int = 0) -> Cluster:
    """Return a full cluster of two types: three of five jobs elastic, the others rigid.

    Jobs run as far as they find room on whole nodes, in random order.
    """
    rng = random.Random(seed)
    half = nodes // 2
    members = [node(f"n{i:04d}", per_node, "a100" if i < half else "v100") for i in range(nodes)]
    cluster = Cluster(members, switches=racks([n.name for n in members], 16))
    free = {n.name: per_node for n in members}
    mean = 0.95 * nodes * per_node / max(1, 0.7 * jobs)
    sizes = [s for s in (1, 2, 4, 8, 16, 32, 64) if s <= 3 * mean]
    for job_id in range(1, jobs + 1):
        kind = rng.random()
        size = rng.choice(sizes)
        least = max(1, size // rng.choice([1, 2, 4]))
        directive = f"{least}-{min(64, size * rng.choice([1, 2, 4, 8]))}"
        directive += rng.choice(["", "", ",types=a100:v100", ",types=v100"])
        wants = "v100" if directive.endswith("=v100") else rng.choice(["a100", "v100"])
        on = _spread(members, free, wants, size, rng) if kind < 0.9 else {}
        elastic = directive if kind < 0.6 else ""
        record: dict[str, object] = {}
        if elastic and on and rng.random() < 0.8:
            rate = 100 * rng.random() * size ** rng.uniform(0.7, 0.98)
            measurement = Measurement(
                gpu_type=wants, gpus=size, nodes=len(on), samples_per_s=rate, steps=100
            )
            record = {
                "measurements": (measurement,),
                "checkpoint_s": rng.uniform(1, 20),
                "restart_s": rng.uniform(5, 60),
            }
        cluster.add(
            job_id,
            elastic=elastic,
            on=on or None,
            gpus=least if elastic else size,
            record=record,
            priority=rng.randrange(1000),
            reason=("" if on else "Resources" if rng.random() < 0.05 else "Priority"),
        )
    return cluster


def _spread(
    members: Sequence[Node], free: dict[str, int], gpu_type: str, size: int, rng: random.Random
) -> dict[str, int]:
    """Take GPUs on the first nodes from a random one on; return {} if they do not suffice."""
    start = rng.randrange(len(members))
    taken: dict[str, int] = {}
    share = min(size, members[0].gpus)
    for n in (*members[start:], *members[:start]):
        if n.gpu_type == gpu_type and free[n.name] >= share:
            taken[n.name] = share
            if sum(taken.values()) >= size:
                for name, gpus in taken.items():
                    free[name] -= gpus
                return taken
    return {}
