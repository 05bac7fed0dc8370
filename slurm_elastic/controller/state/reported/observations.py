"""Observations of one job, or of all jobs of an application: times, noise, batch.

A job's times in one configuration (GPU type, nodes, GPUs, micro-batch, kind of the exchange's
schedule) are kept as first measured, and replaced only when the median of the last reports
differs by more than `TOLERANCE`: models are cached by their values, so noise would
otherwise cause a fit in every round.

Of a pipeline a point is one pass of a step's micro-batches through the stages: its
`micro_batch` is all samples that a replica takes in the pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slurm_elastic.controller.state.reported.exchange_times import schedule_kind
from slurm_elastic.controller.state.reported.measurement import staged
from slurm_elastic.core.application import Observation
from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.plan import Measurement
from slurm_elastic.core.report import Report
from slurm_elastic.models.application_jobs import ApplicationJobs

#: Relative difference of times, and of noise over signal, at which a new value is believed.
TOLERANCE = 0.05
NOISE_TOLERANCE = 0.2
#: Reports whose median counts.
_RECENT = 5
#: Configurations kept of a job, and of an application.
_POINTS = 128
#: Part of a training whose noise new jobs of its application start with (our choice).
_FIRST_STAGE = 0.05
#: Largest gradient noise scale that counts: beyond it the batch hardly matters.
_MOST_NOISE = 1e9
_LEAST_S, _MOST_S = 1e-9, 1e6
#: Times that differ by this factor from those of earlier jobs are of something else.
_OTHER = 3.0
#: Reports without the time of a micro-step after which a configuration is taken for one whose
#: micro-steps are never measured: `ElasticLoop`, older libraries.
_UNMEASURED = 2
#: Most micro-batches of a pass that a model counts.
_MICRO_BATCHES = 1024


@dataclass(slots=True)
class ObservedTime:
    """Times in one configuration: as kept, and as last reported.

    Attributes:
        step_s, micro_step_s: as in `Observation`.
        recent: (step_s, micro_step_s) of the last reports.
        estimated: the time of a micro-step was not measured; the first one that is replaces all.
        exchange: the last schedule of the exchange, as reported; "" for a single replica.
        exchange_s: as in `Observation`.
    """

    gpu_type: str
    nodes: int
    gpus: int
    micro_batch: int
    step_s: float
    micro_step_s: float
    recent: list[tuple[float, float]] = field(default_factory=list)
    estimated: bool = False
    exchange: str = ""
    exchange_s: float | None = None

    @property
    def key(self) -> str:
        """Key of its configuration."""
        return _key(self.gpu_type, self.nodes, self.gpus, self.micro_batch, self.exchange)

    def set_exchange(self, schedule: str, exchange_s: float | None) -> bool:
        """Set the schedule of the next times; return whether the time of the exchange has changed.

        Times of the same kind of schedule in another form, such as buckets of another size, are
        not averaged with the last ones.
        """
        if schedule != self.exchange:
            self.exchange, self.recent = schedule, []
        if exchange_s is None or (
            self.exchange_s is not None and _near(exchange_s, self.exchange_s)
        ):
            return False
        self.exchange_s = exchange_s
        return True

    def add(self, step_s: float, micro_step_s: float) -> bool:
        """Add a measurement; return whether the kept times have changed."""
        self.recent = [*self.recent[1 - _RECENT :], (step_s, micro_step_s)]
        step, micro = (statistics.median(v) for v in zip(*self.recent, strict=True))
        micro = min(step, micro)
        if _near(step, self.step_s) and _near(micro, self.micro_step_s):
            return False
        self.step_s, self.micro_step_s = step, micro
        return True

    def observation(self) -> Observation:
        """Return it in the form that models take; of a pipeline the whole pass."""
        return Observation(
            *(self.gpu_type, self.nodes, self.gpus),
            *(self.micro_batch, self.step_s, self.micro_step_s),
            *(schedule_kind(self.exchange), self.exchange_s),
        )


@dataclass(slots=True)
class Observations:
    """Observations of a job, or of all jobs of an application.

    Attributes:
        points: by configuration, in the order of their first measurement.
        noise: (squared norm, variance) of the gradient; None: not measured.
        first_noise: of a job, the latest of the first `_FIRST_STAGE` of its training; if it does
            not report its progress, the first.
        batch, initial_batch: samples; 0: not reported yet.
        most: most samples that a replica may take at once; 0: not stated.
        micro_batches: fewest micro-batches of a replica in one pass of its pipeline; 0: it has
            reported none.
        exchange: kind of the newest schedule that several replicas chose for their gradients;
            None: none has reported.
        stated: the application that the script states.
        rates: samples/s of one GPU by type, from ledgers that held no more.
        shapes: of an application only: speed and stalls of its jobs, the newest of each shape.
        jobs: of an application only: points of its newest jobs.
        plans: of an application only: `PlanTrials.results` of its newest job; {}: none.
        version: rises with every change.
    """

    points: dict[str, ObservedTime] = field(default_factory=dict)
    noise: tuple[float, float] | None = None
    first_noise: tuple[float, float] | None = None
    batch: int = 0
    initial_batch: int = 0
    most: int = 0
    micro_batches: int = 0
    exchange: str | None = None
    stated: str = ""
    rates: dict[str, float] = field(default_factory=dict)
    shapes: dict[str, Measurement] = field(default_factory=dict)
    jobs: ApplicationJobs = field(default_factory=ApplicationJobs)
    plans: dict[str, Any] = field(default_factory=dict)
    version: int = 0
    _unmeasured: tuple[str, int] = ("", 0)

    def to_body(self) -> dict[str, Any]:
        """Return JSON for the ledger."""
        body = dataclasses.asdict(dataclasses.replace(self, jobs=ApplicationJobs()))
        body["jobs"] = self.jobs.to_body()
        body["points"] = list(body["points"].values())
        del body["version"], body["_unmeasured"]
        return body

    @classmethod
    def from_body(cls, body: Any) -> Observations:
        """Return it from the ledger's JSON; invalid parts are left out."""
        observations = cls()
        if not isinstance(body, dict):
            return observations
        for row in _list(body.get("points")):
            point = _point(row)
            if point is not None:
                observations.points[point.key] = point
        for name in ("batch", "initial_batch", "most", "micro_batches"):
            value = body.get(name)
            if type(value) is int and 0 <= value <= 2**31:
                setattr(observations, name, value)
        observations.noise = _noise(body.get("noise"))
        observations.first_noise = _noise(body.get("first_noise"))
        if isinstance(body.get("stated"), str):
            observations.stated = body["stated"]
        if isinstance(body.get("exchange"), str):
            observations.exchange = body["exchange"]
        rates = body.get("rates")
        if isinstance(rates, dict):
            observations.rates = {t: float(r) for t, r in rates.items() if number(r, 1e-9, 1e12)}
        shapes = body.get("shapes")
        if isinstance(shapes, dict):
            with contextlib.suppress(TypeError):
                observations.shapes = {k: Measurement(**row) for k, row in shapes.items()}
        observations.jobs = ApplicationJobs.from_body(body.get("jobs"))
        if isinstance(body.get("plans"), dict):
            observations.plans = body["plans"]
        return observations

    def observations(self) -> tuple[Observation, ...]:
        """Return its points in the form that models take."""
        return tuple(point.observation() for point in self.points.values())

    def measured_points(self) -> tuple[Observation, ...]:
        """Return them without those whose micro-steps were only estimated, if others are there."""
        exact = tuple(p.observation() for p in self.points.values() if not p.estimated)
        return exact or self.observations()

    def add_measurement(self, key: str, measurement: Measurement) -> bool:
        """Keep a measurement of a shape; return whether it differs from the kept one."""
        earlier = self.shapes.get(key)
        if earlier is not None and all(
            _near(new or 0.0, old or 0.0)
            for new, old in (
                (measurement.samples_per_s, earlier.samples_per_s),
                (measurement.compute_s, earlier.compute_s),
                (measurement.sync_s, earlier.sync_s),
                (min(measurement.reports, _RECENT), min(earlier.reports, _RECENT)),
            )
        ):
            return False
        if earlier is None and len(self.shapes) >= _POINTS:
            del self.shapes[next(iter(self.shapes))]
        self.shapes[key] = measurement
        return True

    def keep(self, point: ObservedTime) -> None:
        """Keep this point; drop the oldest if there are too many."""
        if point.key not in self.points and len(self.points) >= _POINTS:
            del self.points[next(iter(self.points))]
        self.points[point.key] = point

    def absorb(self, other: Observations) -> None:
        """Add the points and shapes of another."""
        for point in other.points.values():
            self.keep(point)
        for key, measurement in other.shapes.items():
            self.add_measurement(key, measurement)

    def contradicts(self, point: ObservedTime) -> bool:
        """Return whether a job's first times in a configuration differ far from earlier jobs'."""
        earlier = self.points.get(point.key)
        return earlier is not None and not (
            1 / _OTHER < point.micro_step_s / earlier.micro_step_s < _OTHER
        )

    def add_report(self, report: Report, held: Allocation | None, unit: int) -> ObservedTime | None:
        """Record noise and batch of a report, and its times if `held` is their shape.

        Returns:
            A point whose kept times have changed.
        """
        old_values = self._settings()
        self.batch = report.global_batch or self.batch
        self.initial_batch = report.initial_batch or self.initial_batch or self.batch
        self.most = (report.max_micro_batch or 0) * unit or self.most
        self.stated = report.application or self.stated
        passes = report.micro_batches or 0
        self.micro_batches = min(passes or self.micro_batches, self.micro_batches or passes)
        self._hear_noise(report)
        point = self._hear_times(report, held, unit) if held else None
        if point or old_values != self._settings():
            self.version += 1
        return point

    def _settings(self) -> tuple[object, ...]:
        return (
            *(self.batch, self.initial_batch, self.most, self.micro_batches),
            *(self.stated, self.noise, self.exchange),
        )

    def _hear_noise(self, report: Report) -> None:
        sqr, var = report.grad_sqr, report.grad_var
        if sqr is None or var is None or not sqr + var > 0:
            return
        sqr = max(sqr, var / _MOST_NOISE)
        if self.noise is None or abs(math.log(max(var / sqr, 1e-9) / _ratio(self.noise))) > (
            NOISE_TOLERANCE
        ):
            self.noise = (sqr, var)
            begins = report.progress is not None and report.progress < _FIRST_STAGE
            if begins or self.first_noise is None:
                self.first_noise = self.noise

    def _hear_times(self, report: Report, held: Allocation, unit: int) -> ObservedTime | None:
        step_s, batch = report.step_time_s, report.global_batch
        replicas, remainder = divmod(held.gpus, unit)
        if not step_s or not batch or remainder or not _LEAST_S < step_s < _MOST_S:
            return None
        pipeline = staged(report) or report.micro_batches is not None
        steps = 1 if pipeline else 1 + (report.accumulation or 0)
        size = -(-batch // (replicas * steps))
        micro_s = report.micro_step_s
        schedule, exchange_s = ("", None)
        if replicas > 1:
            schedule = report.exchange
            exchange_s = report.exchange_s if number(report.exchange_s, _LEAST_S, _MOST_S) else None
            # `flat` of the first steps of an attempt says nothing of the schedule to come.
            if self.exchange is None or not schedule or report.exposed is not None:
                self.exchange = schedule_kind(schedule)
        configuration = held.gpu_type, len(held.nodes), held.gpus, size
        key = _key(*configuration, schedule)
        known_point, estimated = self.points.get(key), micro_s is None
        if known_point and report.frozen:
            return None  # what is believed is what it takes with nothing frozen
        if micro_s is None and known_point:
            micro_s = step_s / steps * min(1.0, known_point.micro_step_s / known_point.step_s)
        elif micro_s is None:
            if report.micro_batch is not None and not pipeline and self._may_follow(key):
                return None  # it measures; this time no step was looked into
            micro_s = step_s / steps  # as if synchronisation cost nothing
        micro_s = min(max(micro_s, _LEAST_S), step_s / steps)
        alone_s = step_s - (steps - 1) * micro_s  # without accumulation
        if known_point:
            if known_point.estimated and not estimated:
                known_point.recent, known_point.estimated = [], False
            changed = known_point.set_exchange(schedule, exchange_s)
            return known_point if known_point.add(alone_s, micro_s) or changed else None
        point = ObservedTime(*configuration, alone_s, micro_s, estimated=estimated)
        point.set_exchange(schedule, exchange_s)
        point.add(alone_s, micro_s)
        self.keep(point)
        return point

    def _may_follow(self, key: str) -> bool:
        """Return whether the time of a micro-step may still come, after another report without."""
        last, count = self._unmeasured
        self._unmeasured = key, count + 1 if last == key else 1
        return self._unmeasured[1] < _UNMEASURED


def _key(gpu_type: str, nodes: int, gpus: int, micro_batch: int, schedule: str) -> str:
    """Return the key of a configuration; that of ledgers without schedules, if there is none."""
    key, kind = f"{gpu_type}:{nodes}:{gpus}:{micro_batch}", schedule_kind(schedule)
    return f"{key}:{kind}" if kind else key


def counted_micro_batches(fewest: int, batch: int, replicas: Sequence[int]) -> int:
    """Return into how many micro-batches a model is to divide the passes of a pipeline.

    As many as the job has, but so few that whole samples still describe each replica's share
    within `TOLERANCE`: of a batch of 12 on 1 and 2 replicas 6 at most.

    Args:
        fewest: of a replica in one pass, as reported; 0: none.
        batch: samples of a step.
        replicas: the smallest and the largest legal number.
    """
    fewest_replicas, most_replicas = replicas
    numbers = [most_replicas]
    while fewest_replicas < most_replicas:
        numbers.append(fewest_replicas)
        fewest_replicas *= 2
    for count in range(min(fewest, batch // most_replicas, _MICRO_BATCHES), 1, -1):
        pieces = [count * number for number in numbers]
        if all(-(-batch // p) * p <= (1 + TOLERANCE) * batch for p in pieces):
            return count
    return 1


def _near(value: float, reference: float) -> bool:
    return abs(value - reference) <= TOLERANCE * reference


def _ratio(noise: tuple[float, float]) -> float:
    return max(noise[1] / noise[0], 1e-9) if noise[0] else _MOST_NOISE


def _noise(value: Any) -> tuple[float, float] | None:
    noise = _list(value)
    if len(noise) == 2 and all(number(v, 0.0, 1e30) for v in noise) and sum(noise) > 0:
        return float(noise[0]), float(noise[1])
    return None


def _point(row: Any) -> ObservedTime | None:
    if not isinstance(row, dict):
        return None
    kind = row.get("gpu_type")
    counts = [row.get(n) for n in ("nodes", "gpus", "micro_batch")]
    times = _pair([row.get("step_s"), row.get("micro_step_s")])
    if not isinstance(kind, str) or times is None or times[1] > times[0]:
        return None
    if not all(type(c) is int and 0 < c < 2**31 for c in counts):
        return None
    nodes, gpus, micro_batch = (int(str(c)) for c in counts)
    recent = [pair for r in _list(row.get("recent")) if (pair := _pair(r))]
    point = ObservedTime(kind, nodes, gpus, micro_batch, *times, recent=recent[-_RECENT:])
    point.estimated = row.get("estimated") is True
    schedule, exchange_s = row.get("exchange"), row.get("exchange_s")  # not in older ledgers
    point.exchange = schedule if isinstance(schedule, str) else ""
    if exchange_s is not None and number(exchange_s, _LEAST_S, _MOST_S):
        point.exchange_s = float(exchange_s)
    return point


def _pair(value: Any) -> tuple[float, float] | None:
    """Return two times of a value that was read back."""
    pair = _list(value)
    if len(pair) != 2 or not all(number(t, _LEAST_S, _MOST_S) for t in pair):
        return None
    return float(pair[0]), float(pair[1])


def number(value: Any, low: float, high: float) -> bool:
    """Return whether a value read back is a number between these."""
    return type(value) in (int, float) and low <= value <= high


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []
