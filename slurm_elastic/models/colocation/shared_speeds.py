"""Measurements of jobs that run on one node: speed alone, use, and slowdown.

Step times are compared only between equal settings of one application (`setting`): the time alone
over the time beside another job is its speed there. An application is a training of one user.

>>> speeds = SharedSpeeds()
>>> speeds.record_alone("ann/bert", "4 GPUs", 0.9)
>>> job = PartOfNode(application="ann/bert", gpus=4, node_cpus=32)
>>> other = PartOfNode(application="bob/gpt", gpus=4, node_cpus=32)
>>> speeds.record_shared(job, [other], node_type="a100", setting="4 GPUs", step_s=1.0)
0.9
>>> speeds.of("a100", job, other).measured
1
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.models.colocation.neighbour_speeds import NeighbourSpeed, NeighbourSpeeds
from slurm_elastic.models.colocation.slowdown_model import AloneLoad, SharedRun

#: Latest times alone that are kept of a setting.
_TIMES = 9
#: Most settings, applications, and measurements of a node type that are kept.
_SETTINGS, _APPLICATIONS, _RUNS = 2_000, 2_000, 1_000
#: Fields of `MeasuredUse`, and their names in the ledger.
_USES = {
    "cpus": "use",
    "sent_bytes_s": "sent",
    "read_bytes_s": "read",
    "memory_bytes_s": "memory",
    "gpu": "gpu",
    "gpu_memory": "gpu_memory",
}
#: Values of a load in the ledger: now, and before memory, GPUs, and network and storage were kept.
_LOADS = (8, 7, 6, 4)
#: Weight of the newest measurement of what an application uses.
_NEWEST = 0.2
#: Measurements of a pair that count for decisions.
ENOUGH = 2
#: A job is not slowed at this part of its speed alone.
_UNSLOWED = 0.97
#: Speeds outside are no effect of a neighbour.
_LEAST_SPEED, _MOST_SPEED = 0.05, 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfNode:
    """A job's part of one node; `gpus` and `node_cpus` of the node.

    Attributes:
        crosses: its ranks also stand on other nodes, so that it uses the network.
        on_gpu: it is compared with another job on the same GPU: the use of that one counts.
    """

    application: str
    gpus: int
    node_cpus: int = 0
    crosses: bool = False
    on_gpu: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredUse:
    """Use of shared resources by an application; None: not measured.

    Attributes:
        cpus: CPUs that it keeps busy for each of its GPUs.
        sent_bytes_s: bytes a second from each of its nodes to others, where it runs on several.
        read_bytes_s: bytes a second from storage, for each of its GPUs.
        memory_bytes_s: bytes a second between memory and cache, for each of its GPUs.
        gpu: part of the time in which its GPUs compute.
        gpu_memory: part of the time in which the memory of its GPUs is read or written.
    """

    cpus: float | None = None
    sent_bytes_s: float | None = None
    read_bytes_s: float | None = None
    memory_bytes_s: float | None = None
    gpu: float | None = None
    gpu_memory: float | None = None


class SharedSpeeds:
    """Learned data of all node types; not for several threads."""

    def __init__(self) -> None:
        self._speeds = NeighbourSpeeds(boosted=False, neutral=True, keep=_RUNS)
        #: Latest step times alone, by (application, setting); the least recently used first.
        self._alone: dict[tuple[str, str], deque[float]] = {}
        #: Use by field of `MeasuredUse` and application, and whether it was measured alone.
        self._use: dict[str, dict[str, tuple[float, bool]]] = {name: {} for name in _USES}
        self.changes = 0

    def record_use(self, application: str, measured: MeasuredUse, *, alone: bool) -> None:
        """Record the use of an application; measurements alone outweigh the others."""
        for name, use in self._use.items():
            value: float | None = getattr(measured, name)
            if value is None:
                continue
            old = use.pop(application, None)
            if old is not None and old[1] == alone:
                new = old[0] + _NEWEST * (value - old[0]), alone
            else:
                new = old if old is not None and old[1] else (value, alone)
            use[application] = new
            _drop_oldest(use, _APPLICATIONS)
            self.changes += 1

    def record_alone(self, application: str, setting: str, step_s: float) -> None:
        """Record a step time of an application without a neighbour."""
        times = self._alone.pop((application, setting), None) or deque(maxlen=_TIMES)
        times.append(step_s)
        self._alone[application, setting] = times
        _drop_oldest(self._alone, _SETTINGS)
        self.changes += 1

    def record_shared(
        self,
        job: PartOfNode,
        others: Sequence[PartOfNode],
        *,
        node_type: str,
        setting: str,
        step_s: float,
    ) -> float | None:
        """Record a step time beside other jobs on one node.

        Beside several, the speeds of the pairs multiply. If one pair is not known yet, it accounts
        for what the others leave over; if all are known, they share the difference. If several are
        not known, nothing is learned of a slow job, and of one that is not slowed, that none slows
        it.

        Returns:
            The speed relative to that alone; None: nothing was learned, as the application was
            never alone in this setting, or the time has another cause.
        """
        times = self._alone.get((job.application, setting))
        if not times or step_s <= 0 or not others:
            return None
        speed = statistics.median(times) / step_s
        if not _LEAST_SPEED <= speed <= _MOST_SPEED:
            return None
        shares = self._attributed(node_type, job, others, min(speed, 1.0))
        load = self.load(job)
        self._speeds.add(
            node_type,
            [SharedRun(job=load, other=self.load(o), speed=s) for o, s in shares],
        )
        self.changes += bool(shares)
        return speed

    def _attributed(
        self, node_type: str, job: PartOfNode, others: Sequence[PartOfNode], speed: float
    ) -> list[tuple[PartOfNode, float]]:
        """Return the speed of a job beside each of several others by its speed beside all."""
        if len(others) == 1:
            return [(others[0], speed)]
        load = self.load(job)
        measured = [self._speeds.measured(node_type, load, self.load(o)) for o in others]
        means = {
            i: statistics.fmean(speeds)
            for i, speeds in enumerate(measured)
            if len(speeds) >= ENOUGH
        }
        rest = speed / math.prod(means.values())
        if len(means) == len(others):
            correction = rest ** (1 / len(others))
            return [(others[i], min(1.0, mean * correction)) for i, mean in means.items()]
        unknown = [other for i, other in enumerate(others) if i not in means]
        if len(unknown) > 1 and rest < _UNSLOWED:
            return []
        return [(other, min(1.0, rest) ** (1 / len(unknown))) for other in unknown]

    def of(self, node_type: str, job: PartOfNode, other: PartOfNode) -> NeighbourSpeed:
        """Return the predicted speed of a job beside another one; 1 where nothing is known.

        On one GPU the published coefficients predict, before there are enough measurements.
        """
        return self._speeds.of(
            node_type, self.load(job), self.load(other), published=job.on_gpu and other.on_gpu
        )

    def load(self, part: PartOfNode) -> AloneLoad:
        """Return the use of a node, or of one GPU, by an application."""
        cpus, sent, read, memory, gpu, bus = (
            self._use[name].get(part.application) for name in _USES
        )
        if part.on_gpu:
            return AloneLoad(
                application=part.application,
                gpus=part.gpus,
                compute=min(1.0, gpu[0]) if gpu is not None else 0.0,
                memory_bus=min(1.0, bus[0]) if bus is not None else 0.0,
                known=gpu is not None and bus is not None,
            )
        known = cpus is not None and part.node_cpus > 0
        compute = cpus[0] * part.gpus / part.node_cpus if cpus is not None and known else 0.0
        return AloneLoad(
            application=part.application,
            gpus=part.gpus,
            compute=min(1.0, compute),
            memory_bus=0.0,
            known=known,
            sent_bytes_s=sent[0] if sent is not None and part.crosses else 0.0,
            read_bytes_s=read[0] * part.gpus if read is not None else 0.0,
            memory_bytes_s=memory[0] * part.gpus if memory is not None else 0.0,
        )

    @property
    def measured(self) -> bool:
        """Whether anything is known of any pair."""
        return bool(self._speeds.node_types)

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON, as the ledger keeps it."""
        return {
            "alone": [[a, s, [_six(t) for t in times]] for (a, s), times in self._alone.items()],
            **{
                key: [[a, _six(value), alone] for a, (value, alone) in self._use[name].items()]
                for name, key in _USES.items()
            },
            "runs": [
                [node_type, *_row(run.job), *_row(run.other), _six(run.speed)]
                for node_type in self._speeds.node_types
                for run in self._speeds.runs(node_type)
            ],
        }

    @classmethod
    def of_json(cls, value: Any) -> SharedSpeeds:
        """Return the value that `to_json` wrote; unreadable parts are left out."""
        speeds = cls()
        value = value if isinstance(value, dict) else {}
        for row in _rows(value.get("alone"), 3):
            times = [float(t) for t in row[2] if _is_number(t)] if type(row[2]) is list else []
            if times and isinstance(row[0], str) and isinstance(row[1], str):
                speeds._alone[row[0], row[1]] = deque(times, maxlen=_TIMES)
        for name, key in _USES.items():
            for application, amount, alone in _rows(value.get(key), 3):
                if isinstance(application, str) and _is_number(amount):
                    speeds._use[name][application] = (float(amount), bool(alone))
        of_types: dict[str, list[SharedRun]] = {}
        runs = value.get("runs")
        for node_type, *row in (row for length in _LOADS for row in _rows(runs, 2 + 2 * length)):
            half = len(row) // 2
            job, other, speed = _load(row[:half]), _load(row[half:-1]), row[-1]
            if isinstance(node_type, str) and job and other and _is_number(speed):
                of_types.setdefault(node_type, []).append(
                    SharedRun(job=job, other=other, speed=float(speed))
                )
        for node_type, runs in of_types.items():
            speeds._speeds.add(node_type, runs)
        return speeds


def _row(load: AloneLoad) -> list[Any]:
    used = (load.sent_bytes_s, load.read_bytes_s, load.memory_bus, load.memory_bytes_s)
    return [load.application, load.gpus, _six(load.compute), load.known, *map(_six, used)]


def _load(row: list[Any]) -> AloneLoad | None:
    """Return the load of a row; older ones lack the last values."""
    application, gpus, compute, known, *used = row
    used += [0.0] * (_LOADS[0] - len(row))
    sent_bytes_s, read_bytes_s, memory_bus, memory_bytes_s = used
    if not (isinstance(application, str) and type(gpus) is int):
        return None
    if not all(map(_is_number, (compute, *used))):
        return None
    return AloneLoad(
        application=application,
        gpus=gpus,
        compute=float(compute),
        memory_bus=float(memory_bus),
        known=bool(known),
        sent_bytes_s=float(sent_bytes_s),
        read_bytes_s=float(read_bytes_s),
        memory_bytes_s=float(memory_bytes_s),
    )


def _rows(value: Any, length: int) -> list[list[Any]]:
    rows = value if isinstance(value, list) else []
    return [row for row in rows if isinstance(row, list) and len(row) == length]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e15


def _six(value: float) -> float:
    return float(f"{value:.6g}")


def _drop_oldest(values: dict[Any, Any], most: int) -> None:
    while len(values) > most:
        del values[next(iter(values))]
