"""Communication cost of places for the jobs of a round: the part of its time that each computes.

By job, the best that is known: what it measured where it ran (`Stalls`); elsewhere the closed form
by the links' speeds, its gradient bytes and its computing (`CommunicationCost`, links.py), scaled
by its stalls; else its speed model's curve. A stall is the time that a step stood still for the
others: besides communication that is not hidden behind computing, it contains waiting for slower
ranks.

>>> from slurm_elastic.config.schema import SpeedupSettings
>>> from slurm_elastic.models.links import Links
>>> record = JobRecord(job_id=7, gradient_bytes=1e9, measurements=(
...     Measurement(gpu_type="a100", gpus=8, nodes=1, samples_per_s=64.0, steps=9,
...                 compute_s=1.0, sync_s=0.0, reports=3),))
>>> cost = CommunicationCost.of(record, Links(spine=0.5e9), {})
>>> model = SpeedModel.fit(SpeedupSettings(), record.measurements, cost)
>>> live = LiveCommunication.of({7: record}, {7: model})
>>> round(live.part("7", 8, (2, 2, 2)), 2)
0.33
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.models.communication import CommunicationError, Span, Stalls
from slurm_elastic.models.links import CommunicationCost, stalls
from slurm_elastic.models.speedup import SpeedModel

#: A job computes at least this part of its time.
_LEAST = 1e-6


def key_of(job_id: int, gpu_type: str = "") -> str:
    """Return the model name of a job, on one GPU type or on the type with most measurements.

    >>> key_of(7), key_of(7, "a100"), split_key("7@a100")
    ('7', '7@a100', (7, 'a100'))
    """
    return f"{job_id}@{gpu_type}" if gpu_type else str(job_id)


def split_key(model: str) -> tuple[int, str]:
    """Return job id and GPU type of a key.

    Raises:
        CommunicationError: it is none.
    """
    number, _, gpu_type = model.partition("@")
    if not number.isdecimal():
        raise CommunicationError(f"{model[:60]} names no job; write its id, or id@type")
    return int(number), gpu_type


@dataclass(frozen=True)
class LiveCommunication:
    """A `Communication` of live jobs; `model` is a key as of `key_of`.

    Attributes:
        records: may lack jobs that nothing is known of.
        models: of each job; those of a round know the links (`placement.eligibility`).
    """

    records: Mapping[int, JobRecord]
    models: Mapping[int, SpeedModel]
    _known: dict[str, Stalls] = field(default_factory=dict, compare=False)

    @classmethod
    def of(
        cls, records: Mapping[int, JobRecord], models: Mapping[int, SpeedModel]
    ) -> LiveCommunication:
        """Return the communication of the jobs of a question."""
        return cls(records, models)

    def part(self, model: str, gpus: int, span: Span) -> float:
        """See `Communication`; what was measured counts whatever the link domains."""
        stalls_by_place = self._known.get(model)
        if stalls_by_place is None:
            stalls_by_place = self._known[model] = self._stalls(model)
        racks, nodes, _ = span
        measured = stalls_by_place.measured.get((model, gpus, racks, nodes, nodes))
        return stalls_by_place.part(model, gpus, span) if measured is None else measured

    def _stalls(self, model: str) -> Stalls:
        job_id, kind = split_key(model)
        speed_model = self.models.get(job_id)
        if speed_model is None:
            raise CommunicationError(f"job {job_id} is not one of this round's")
        stall_measurements = stalls(self.records.get(job_id) or JobRecord(job_id=job_id))
        kind = (
            kind
            or _best_known(stall_measurements)
            or (speed_model.toll.work[0][0] if speed_model.toll else "")
        )
        # Reports do not tell link domains: the GPUs on a node may be in one, or not.
        measured = {
            (model, m.gpus, m.racks, m.nodes, m.nodes): _computing(m)
            for m in stall_measurements
            if m.gpu_type == kind
        }
        return Stalls(measured=measured, otherwise=_Curve(kind, speed_model))


@dataclass(frozen=True)
class _Curve:
    """Places where a job never ran, on one GPU type."""

    gpu_type: str
    model: SpeedModel

    def part(self, model: str, gpus: int, span: Span) -> float:
        """See `Communication`; `model` does not matter."""
        del model
        if gpus == 1:
            return 1.0
        racks, nodes, domains = span
        kind, toll = self.gpu_type, self.model.toll
        if toll is not None and _covers(toll, span):
            return _clamped(toll.part(kind, gpus, nodes, racks, linked=domains <= nodes))
        # Relative to as many GPUs that would not communicate at all.
        alone = self.model.speed(kind, 1) * gpus
        return _clamped(self.model.speed(kind, gpus, nodes, racks) / alone if alone > 0 else 1.0)


def _covers(toll: CommunicationCost, span: Span) -> bool:
    """Return whether the speed of the farthest tier is known."""
    racks, nodes, _ = span
    links = toll.links
    if racks > 1:
        return links.spine is not None
    return links.rack is not None if nodes > 1 else links.inside() is not None


def _best_known(measurements: Iterable[Measurement]) -> str:
    """Return the type with most steps; "" when there is none."""
    steps: dict[str, int] = {}
    for m in measurements:
        steps[m.gpu_type] = steps.get(m.gpu_type, 0) + m.steps
    return min(steps, key=lambda t: (-steps[t], t), default="")


def _computing(m: Measurement) -> float:
    compute_s = m.compute_s or 0.0
    return _clamped(compute_s / (compute_s + (m.sync_s or 0.0)))


def _clamped(part: float) -> float:
    return min(1.0, max(_LEAST, part)) if math.isfinite(part) else 1.0
