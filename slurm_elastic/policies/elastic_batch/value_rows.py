"""Value of each number of GPUs to a job, and the batch that goes with it.

The scaling factor of "Effective Elastic Scaling of Deep Learning Workloads" (MASCOTS 2020):

    T(b, k)    = samples/s with b samples on each of k GPUs
    factor     = T(b, k) / T(largest b, 1)                neutral to the size of the job's model
    factor*(k) = max over b with b_min <= b k <= b_max;   b*(k) the b of it; no b: cannot run on k

T comes from the job's fitted times (models/goodput_tables.py), which count the part of the
all-reduce that does not overlap with computing; the paper adds times up. Beyond the paper:
`statistical` multiplies T by the statistical efficiency of the batch; `accumulate` allows batches
in several micro-steps; a job without fitted times counts with its speed (models/speedup.py) at its
own batch. Replicas of several GPUs count as one device.
"""

from __future__ import annotations

import dataclasses
import zlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from slurm_elastic.config.policy_settings import ElasticBatchSettings
from slurm_elastic.core.application import Application, JobClass, Learned, Noise
from slurm_elastic.models import efficiency, goodput_tables
from slurm_elastic.models.batch_candidates import ConfigurationSet
from slurm_elastic.placement.best_fit import even_splits
from slurm_elastic.policies.elastic_batch.division import Floats, Ints
from slurm_elastic.policies.sia.goodput_rows import Candidate

#: Nodes beyond which only sizes that fill nodes are considered, unless few sizes are listed.
_FINE_NODES = 8
_FEW_SIZES = 64
#: Most nodes of a share, as a multiple of the fewest.
_SPRAWL = 2
#: Batches tried per size.
TRIED = 32
#: Most GPUs of a job.
_MOST_GPUS = 1 << 16


@dataclass(frozen=True, slots=True, eq=False)
class ValueRow:
    """Values of one job on one GPU type.

    Attributes:
        value: (top + 1,) scaling factor of 0, 1, ... GPUs; -inf: it cannot run so.
        batch: (top + 1,) samples per step that go with them; 0: the job's own.
        unit_rate: samples/s of one replica at its largest micro-batch; the factors are relative to
            it.
    """

    value: Floats
    batch: Ints
    unit_rate: float

    @property
    def least(self) -> int:
        """The fewest GPUs that it can run on; 0: on none."""
        possible = np.isfinite(self.value)
        return int(possible.argmax()) if possible.any() else 0

    @property
    def top(self) -> int:
        """The most GPUs of the row."""
        return len(self.value) - 1

    def allows(self, gpus: int) -> bool:
        """Return whether it can run on this number of GPUs."""
        return 0 < gpus <= self.top and bool(np.isfinite(self.value[gpus]))

    def within(self, gpus: int) -> int:
        """Return the largest possible size within a number of GPUs; 0: there is none."""
        finite = np.flatnonzero(np.isfinite(self.value[: max(0, gpus) + 1]))
        return int(finite[-1]) if len(finite) else 0


@dataclass(frozen=True, slots=True)
class _Where:
    """Known data of a job, and the type in question."""

    learned: Learned
    gpu_type: str
    per_node: Mapping[str, int]


class ValueRows:
    """Rows of jobs, kept until something new is learned of a job."""

    def __init__(self, config: ElasticBatchSettings) -> None:
        self._config = config
        self._cache: dict[tuple[str, str], tuple[tuple[object, ...], ValueRow | None]] = {}

    def row(
        self, job: Candidate, gpu_type: str, *, per_node: Mapping[str, int], most: int, seed: int
    ) -> ValueRow | None:
        """Return a job's row on a type; None where it can never run.

        Args:
            job: the job.
            gpu_type: the type.
            per_node: GPUs of the largest node of each type.
            most: GPUs of the type that there are.
            seed: for batches that are drawn.
        """
        model: object = job.model if job.learned is None else job.learned
        held = job.held.gpus if job.held and job.held.gpu_type == gpu_type else 0
        arguments = (job.directive, per_node.get(gpu_type, 0), most, held, seed)
        key = (job.job.key, gpu_type)
        cached = self._cache.get(key)
        if cached is not None and cached[0][0] is model and cached[0][1] == arguments:
            return cached[1]
        sizes = self._sizes(job, gpu_type, per_node=per_node.get(gpu_type, 0), most=most, held=held)
        row = None
        if len(sizes):
            nodes = -(-sizes // per_node[gpu_type])
            if job.learned is None:
                row = _of_speed(job, gpu_type, sizes, nodes)
            else:
                row = self._of_learned(job, _Where(job.learned, gpu_type, per_node), sizes, seed)
        self._cache[key] = ((model, arguments), row)
        return row

    def forget(self, alive: set[str]) -> None:
        """Drop the rows of jobs that are gone."""
        self._cache = {k: v for k, v in self._cache.items() if k[0] in alive}

    def worth(
        self, job: Candidate, gpu_type: str, gpus: int, batch: int, per_node: Mapping[str, int]
    ) -> float:
        """Return the value of a number of GPUs at a given batch; -inf where impossible."""
        learned = job.learned
        if learned is None or learned.application.job_class is not JobClass.ADAPTIVE:
            return -np.inf
        low, high = _limits(job, learned.application)
        if not low <= batch <= high:
            return -np.inf
        application = _fixed(learned.application, batch, self._config.accumulate)
        sizes = np.array([gpus], dtype=np.int64)
        where = _Where(learned, gpu_type, per_node)
        value, _ = self._rates(where, application, sizes, (batch, batch))
        unit_rate = self._unit_rate(where)
        return float(value[0] / unit_rate) if value[0] > 0 and unit_rate > 0 else -np.inf

    def _sizes(self, job: Candidate, gpu_type: str, *, per_node: int, most: int, held: int) -> Ints:
        """Return the sizes to consider, ascending."""
        legal = job.directive.sizes(gpu_type)
        if not per_node or not legal:
            return np.zeros(0, dtype=np.int64)
        unit = job.directive.unit_for(gpu_type)
        top = min(legal[-1], most, _MOST_GPUS)
        if not job.rigid:
            grown = int(self._config.growth * job.measured()) * unit
            if not job.directive.regular:
                measured = int(job.measured()) * unit
                grown = job.directive.within(gpu_type, grown, above=measured)
            top = min(top, max(legal[0], grown, held))
        return _shareable(legal[: bisect_right(legal, top)], per_node, unit, held)

    def _of_learned(self, job: Candidate, where: _Where, sizes: Ints, seed: int) -> ValueRow | None:
        application = where.learned.application
        limits = _limits(job, application)
        adaptive = application.job_class is JobClass.ADAPTIVE
        if adaptive and limits[0] > limits[1]:
            return None
        batch_mode = self._config.batch if adaptive else ""
        if batch_mode == "elastic":
            variant = _elastic(application, self._config.accumulate)
        elif application.job_class is JobClass.RIGID:
            variant, limits = application, (1, application.batch)
        else:
            batch = application.batch
            if batch_mode:
                batch = limits[1] if batch_mode == "fixed-max" else drawn(job.job.key, limits, seed)
            accumulate = self._config.accumulate or not adaptive
            variant, limits = _fixed(application, batch, accumulate), (batch, batch)
        rates, batches = self._rates(where, variant, sizes, limits)
        rigid = application.job_class is JobClass.RIGID
        unit_rate = 1.0 if rigid else self._unit_rate(where)
        if unit_rate <= 0 or not (rates > 0).any():
            return None
        keeps_batch = not adaptive or application.micro_batches > 1
        return _row(
            sizes, rates / unit_rate, np.zeros_like(batches) if keeps_batch else batches, unit_rate
        )

    def _rates(
        self, where: _Where, application: Application, sizes: Ints, limits: tuple[int, int]
    ) -> tuple[Floats, Ints]:
        """Return (sizes,) the best rate of each size, 0 where it cannot run, and its batch."""
        learned, gpu_type, per_node = where.learned, where.gpu_type, where.per_node
        fixed = application.job_class is not JobClass.ADAPTIVE
        basis = goodput_tables.basis(
            application,
            learned.observations,
            per_node=tuple(sorted(per_node.items())),
            compat=False,
        )
        replicas = np.maximum(sizes // basis.unit(gpu_type), 1)[:, None]
        if fixed or basis.source is None:
            table = goodput_tables.table(
                basis,
                _configurations(gpu_type, tuple(sizes.tolist()), per_node[gpu_type]),
                fixed=fixed,
            )
            rates, scale = table.weight, table.scale
            samples = replicas * table.micro_batch * (table.accumulation + 1)
            samples = samples * application.micro_batches
            if fixed:
                samples = np.full_like(samples, application.batch)
            else:
                rates = np.where((samples >= limits[0]) & (samples <= limits[1]), rates, 0.0)
        else:
            rates, samples = _tried(basis, where, sizes, limits)
            scale = samples / application.initial_batch
        rates = rates * self._efficiency(learned.noise, scale)
        at = np.arange(len(sizes)), rates.argmax(axis=1)
        return rates[at], samples[at]

    def _unit_rate(self, where: _Where) -> float:
        """Return the rate of one replica at its largest micro-batch."""
        learned = where.learned
        profile = learned.application.on(where.gpu_type)
        if profile is None:
            return 0.0
        batch = profile.most * learned.application.micro_batches
        application = _fixed(learned.application, batch, accumulate=True)
        sizes = np.array([profile.unit], dtype=np.int64)
        rates, _ = self._rates(where, application, sizes, (batch, batch))
        return float(rates[0])

    def _efficiency(self, noise: Noise | None, scale: Floats) -> Floats:
        """Return the statistical efficiency of batches, multiples of the initial one; else 1."""
        if not self._config.statistical:
            return np.ones_like(scale)
        sqr, var = efficiency.weights(noise)
        return np.asarray(1.0 / (var + sqr * scale))


def _tried(
    basis: goodput_tables.GoodputBasis, where: _Where, sizes: Ints, limits: tuple[int, int]
) -> tuple[Floats, Ints]:
    """Return [sizes, tried] samples/s and batches, from the smallest to the largest possible.

    Unlike the published candidates (models/batch_candidates.py) these never leave the limits, and
    the largest that fits into memory is always among them.
    """
    application, gpu_type = basis.application, where.gpu_type
    profile, source = application.on(gpu_type), basis.source
    if profile is None or source is None:
        return np.zeros((len(sizes), 1)), np.zeros((len(sizes), 1), dtype=np.int64)
    replicas = np.maximum(sizes // basis.unit(gpu_type), 1)[:, None]
    samples_per_unit = replicas * application.micro_batches
    low = np.maximum(profile.least, -(-limits[0] // samples_per_unit))
    high = limits[1] // samples_per_unit
    if not application.accumulation:
        high = np.minimum(high, profile.most)
    top = np.maximum(high, low).astype(np.float64)
    local = np.rint(low * (top / low) ** np.linspace(0.0, 1.0, TRIED)).astype(np.int64)
    steps = -(-local // profile.most)
    micro = local // steps
    samples = samples_per_unit * micro * steps
    valid = (low <= high) & (samples >= limits[0]) & (micro >= profile.least)
    measured_type = gpu_type if gpu_type in basis.observations else source
    per_node = where.per_node.get(measured_type) or where.per_node[gpu_type]
    nodes = -(-replicas * basis.unit(measured_type) // per_node)
    if measured_type == gpu_type:
        nodes = -(-sizes[:, None] // per_node)
    seconds = basis.fit(measured_type).iteration_time(nodes, replicas, micro, steps - 1)
    ratio = 1.0 if measured_type == gpu_type else basis.ratio(gpu_type)
    return np.where(valid, ratio * samples / seconds, 0.0), samples


def drawn(key: str, limits: tuple[int, int], seed: int) -> int:
    """Draw a batch of the range, the same each time for a job and a seed."""
    rng = np.random.default_rng([zlib.crc32(key.encode()), seed & 0xFFFFFFFF])
    return int(rng.integers(limits[0], limits[1], endpoint=True))


def _of_speed(job: Candidate, gpu_type: str, sizes: Ints, nodes: Ints) -> ValueRow:
    """Return the row of a job of which only the speed is known: it keeps its batch."""
    unit = job.directive.unit_for(gpu_type)
    unit_rate = job.model.speed(gpu_type, unit, int(max(1, nodes[0] * unit // max(1, sizes[0]))))
    speeds = job.model.speeds(gpu_type, sizes, nodes)
    return _row(sizes, speeds / unit_rate, np.zeros_like(sizes), unit_rate)


def _row(sizes: Ints, values: Floats, batches: Ints, unit_rate: float) -> ValueRow:
    value = np.full(int(sizes[-1]) + 1, -np.inf)
    batch = np.zeros(len(value), dtype=np.int64)
    value[sizes] = np.where(values > 0, values, -np.inf)
    batch[sizes] = batches
    return ValueRow(value, batch, unit_rate)


def _limits(job: Candidate, application: Application) -> tuple[int, int]:
    """Return the smallest and largest batch that application and directive allow."""
    low, high = application.initial_batch, application.max_batch
    if job.directive.batch is not None:
        low, high = max(low, job.directive.batch[0]), min(high, job.directive.batch[1])
    return low, high


@lru_cache(maxsize=4096)
def _elastic(application: Application, accumulate: bool) -> Application:
    return dataclasses.replace(application, accumulation=accumulate and application.accumulation)


@lru_cache(maxsize=8192)
def _fixed(application: Application, batch: int, accumulate: bool) -> Application:
    return dataclasses.replace(
        application,
        job_class=JobClass.STRONG_SCALING,
        batch=batch,
        accumulation=accumulate and application.accumulation,
    )


@lru_cache(maxsize=4096)
def _shareable(legal: Sequence[int], per_node: int, unit: int, held: int) -> Ints:
    """Return the sizes that divide evenly over few nodes, and the one that is held."""
    sizes = []
    coarse = isinstance(legal, range) or len(legal) > _FEW_SIZES
    for size in legal:
        fewest = -(-size // per_node)
        if coarse and fewest > _FINE_NODES and size % per_node and size != held:
            continue
        splits = even_splits(size, per_node, unit)
        if size == held or size == legal[0] or (splits and splits[0][0] <= _SPRAWL * fewest):
            sizes.append(size)
    return np.array(sizes, dtype=np.int64)


@lru_cache(maxsize=4096)
def _configurations(gpu_type: str, sizes: tuple[int, ...], per_node: int) -> ConfigurationSet:
    nodes = tuple(-(-size // per_node) for size in sizes)
    return ConfigurationSet((gpu_type,) * len(sizes), nodes, sizes)
