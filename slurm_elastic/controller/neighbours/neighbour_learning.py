"""Learning from reports how jobs on one node slow each other down (`[neighbours]`).

Reports come from other threads; everything else happens in rounds.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.ledger import Ledger
from slurm_elastic.core.cluster import Job, JobState, Snapshot
from slurm_elastic.core.gpu_parts import partners
from slurm_elastic.core.report import LEAST_STEPS, Report
from slurm_elastic.models.colocation.gpu_memory import GpuMemory
from slurm_elastic.models.colocation.neighbour_speeds import NeighbourSpeed
from slurm_elastic.models.colocation.node_sharing import (
    SharingLearner,
    StepTime,
    application_of,
    tenants,
)
from slurm_elastic.models.colocation.shared_speeds import MeasuredUse, SharedSpeeds
from slurm_elastic.placement.neighbours.gpu_pair_table import GpuPairTable
from slurm_elastic.placement.neighbours.neighbour_table import NeighbourTable

_NAME, _MEMORY_NAME = "neighbour_speeds", "gpu_memory"
#: Seconds between two writes to the ledger.
_WRITE_S = 300.0
#: Most seconds between two reports for which the time of the steps between them is known.
_MOST_S = 300.0
#: Most profiles that wait for the next round.
_WAITING = 1_000
#: Largest rate that is believed: 1 TB/s.
_MOST_BYTES_S = 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A job on the nodes of another one.

    Attributes:
        job_id: id of the neighbour.
        nodes: the nodes that both run on.
        speed: speed of the job beside it, on the node where that is slowest.
        other: speed of the neighbour beside the job, on that node.
        same_gpu: both have half of one GPU; the speeds are those of such pairs.
    """

    job_id: int
    nodes: tuple[str, ...]
    speed: NeighbourSpeed
    other: NeighbourSpeed
    same_gpu: bool = False


class NeighbourLearning:
    """Knowledge of one controller about the speeds of neighbours.

    Args:
        config: of the site; set anew at a reconfiguration.
        ledger: keeps what is learned.
    """

    def __init__(self, config: Config, ledger: Ledger) -> None:
        self.config = config
        self._ledger = ledger
        self._learner: SharingLearner | None = None
        self._memory: GpuMemory | None = None
        #: Time of the newest report of each job with a step time, and the application it states.
        self._last: dict[int, tuple[int, float]] = {}
        self._stated: dict[int, str] = {}
        self._written = (0.0, (0, 0))
        #: What owners have stated, by application; from other threads, for the next round.
        self._taught: deque[tuple[str, MeasuredUse]] = deque(maxlen=_WAITING)

    @property
    def learner(self) -> SharingLearner:
        """The learner, read from the ledger at first."""
        if self._learner is None:
            self._learner = SharingLearner(SharedSpeeds.of_json(self._ledger.get(_NAME)))
        return self._learner

    @property
    def memory(self) -> GpuMemory:
        """Memory that applications use of a GPU, read from the ledger at first."""
        if self._memory is None:
            self._memory = GpuMemory.of_json(self._ledger.get(_MEMORY_NAME))
        return self._memory

    def report(self, report: Report, job: Job, now: float) -> None:
        """Keep the step time and memory of a report, if it is one of the job's present shape."""
        if self.config.neighbours.mode == "off" or report.run != job.run:
            return
        if report.application:
            self._stated[job.job_id] = application_of(job, report.application)
        held = job.allocation
        if (
            not held
            or held.gpus != report.gpus
            or not report.step_time_s
            or not report.global_batch
            or report.steps_measured < LEAST_STEPS
        ):
            return
        run, since = self._last.get(job.job_id, (-1, 0.0))
        self._last[job.job_id] = (report.run, now)
        if held.gpus == 1 and report.peak_memory_bytes and report.gpu_bytes and self._memory:
            self._memory.record(
                self._stated.get(job.job_id) or application_of(job),
                held.gpu_type,
                peak=report.peak_memory_bytes,
                capacity=report.gpu_bytes,
            )
        learner = self._learner
        if learner is None or run != report.run or now - since > _MOST_S:
            return
        learner.note(
            StepTime(
                key=job.key,
                run=report.run,
                begin=since,
                end=now,
                step_s=report.step_time_s,
                setting=_setting(report, len(held.nodes)),
                use=_use(report, len(held.nodes)),
            )
        )

    def teach(self, job: Job, stated: str, use: MeasuredUse) -> None:
        """Keep what a profile of a job's training shows that it uses, for the next round.

        What is measured of running jobs without neighbours outweighs it.

        Args:
            job: any of its user and name.
            stated: name of the application; "": by the job's name.
            use: as measured.
        """
        self._taught.append((application_of(job, stated), use))

    def follow(self, snapshot: Snapshot) -> None:
        """Learn from the reports before a snapshot, and write what is learned now and then.

        Raises:
            LedgerError: it could not be written; the next round tries again.
        """
        if self.config.neighbours.mode == "off":
            return
        learner = self.learner
        while self._taught:
            learner.speeds.record_use(*self._taught.popleft(), alone=False)
        learner.follow(snapshot, self._stated)
        alive = snapshot.job.keys()
        self._last = {k: v for k, v in list(self._last.items()) if k in alive}
        self._stated = {k: v for k, v in list(self._stated.items()) if k in alive}
        at, written = self._written
        changes = (learner.speeds.changes, self.memory.changes)
        if written != changes and snapshot.time - at >= _WRITE_S:
            self._ledger.put(_NAME, learner.speeds.to_json())
            self._ledger.put(_MEMORY_NAME, self.memory.to_json())
            self._written = (snapshot.time, changes)

    def table(self, snapshot: Snapshot) -> NeighbourTable | None:
        """Return the speeds that placement takes into account; None: it takes none."""
        learner = self._learner
        if self.config.neighbours.mode != "act" or not learner or not learner.speeds.measured:
            return None
        return self._table(snapshot, learner)

    def gpu_pairs(self, snapshot: Snapshot) -> GpuPairTable | None:
        """Return the speeds of jobs on one GPU; None: they are not measured."""
        if self.config.neighbours.mode == "off" or self._learner is None:
            return None
        speeds = self._learner.speeds
        return GpuPairTable(snapshot, speeds, self._stated, self.config.neighbours, self.memory)

    def neighbours(self, snapshot: Snapshot) -> dict[int, tuple[Neighbour, ...]]:
        """Return the neighbours of each running elastic job, for answers."""
        if self.config.neighbours.mode == "off" or self._learner is None:
            return {}
        table, on_node = self._table(snapshot, self._learner), tenants(snapshot)
        pairs, on_gpu = self.gpu_pairs(snapshot), partners(snapshot.jobs)
        return {
            job.job_id: tuple(_on_gpu(row, job, on_gpu, pairs) for row in rows)
            for job in snapshot.jobs
            if job.elastic
            and job.state is JobState.RUNNING
            and (rows := _neighbours(job, snapshot, on_node, table))
        }

    def _table(self, snapshot: Snapshot, learner: SharingLearner) -> NeighbourTable:
        return NeighbourTable(snapshot, learner.speeds, self._stated, self.config.neighbours)


def _neighbours(
    job: Job, snapshot: Snapshot, on_node: Mapping[str, Any], table: NeighbourTable
) -> tuple[Neighbour, ...]:
    """Return the neighbours of a job, the one that slows it most first."""
    pairs: dict[int, list[tuple[str, NeighbourSpeed, NeighbourSpeed]]] = {}
    for name, gpus in job.allocation.shares if job.allocation else ():
        for other, other_gpus in on_node.get(name, ()) if name in snapshot.node else ():
            if other.job_id != job.job_id:
                own, beside = (job.job_id, gpus), (other.job_id, other_gpus)
                pairs.setdefault(other.job_id, []).append(
                    (name, table.speed(name, own, beside), table.speed(name, beside, own))
                )
    rows = []
    for other_id, shared_nodes in pairs.items():
        _, speed, other_speed = min(shared_nodes, key=lambda row: row[1].speed)
        nodes = tuple(name for name, _, _ in shared_nodes)
        rows.append(Neighbour(job_id=other_id, nodes=nodes, speed=speed, other=other_speed))
    return tuple(sorted(rows, key=lambda row: (row.speed.speed, row.job_id)))


def _on_gpu(
    row: Neighbour, job: Job, on_gpu: Mapping[int, tuple[Job, ...]], pairs: GpuPairTable | None
) -> Neighbour:
    """Return a neighbour with the speeds on one GPU, if it is on the job's own one."""
    beside = {other.job_id for other in on_gpu.get(job.job_id, ())}
    if pairs is None or row.job_id not in beside:
        return row
    node, ids = row.nodes[0], (job.job_id, row.job_id)
    return dataclasses.replace(
        row, speed=pairs.known(node, *ids), other=pairs.known(node, *ids[::-1]), same_gpu=True
    )


def _use(report: Report, nodes: int) -> MeasuredUse:
    """Return the use of a job in the time of a report; sent bytes count on several nodes only."""
    sent_bytes_s = None
    if nodes > 1 and report.exchange_bytes is not None and report.step_time_s:
        sent_bytes_s = min(report.exchange_bytes / report.step_time_s, _MOST_BYTES_S)
    return MeasuredUse(
        cpus=report.busy_cpus,
        sent_bytes_s=sent_bytes_s,
        read_bytes_s=report.read_bytes_s,
        memory_bytes_s=report.memory_bytes_s,
        gpu=report.gpu_busy,
        gpu_memory=report.gpu_memory_busy,
    )


def _setting(report: Report, nodes: int) -> str:
    """Return the values on which the step time of a job depends, besides its neighbours."""
    parts = (
        report.gpu_type,
        report.gpus,
        nodes,
        report.global_batch,
        report.micro_batch,
        report.accumulation,
        report.micro_batches,
        report.plan or report.layout,
        report.exchange,
        report.frozen or 0,
    )
    return "|".join("" if p is None else str(p) for p in parts)
