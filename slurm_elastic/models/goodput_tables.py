"""The part of a job's goodput that does not depend on its gradient noise, kept between rounds.

The noise changes with every report, the throughput of the candidate batches only
with a new measurement. A `GoodputTable` holds the latter, so that a round only computes

    goodput = max over candidates of weight / (var + sqr scale),   var + sqr = 1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.application import Application, JobClass, Observation
from slurm_elastic.core.execution.plan_gains import PlanGains
from slurm_elastic.models import bootstrap, step_residuals, throughput
from slurm_elastic.models.batch_candidates import BatchCandidates, ConfigurationSet, candidates
from slurm_elastic.models.step_residuals import CorrectedThroughput
from slurm_elastic.models.throughput import ThroughputParameters

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RemainingWork:
    """Part of a step that is left when front layers are frozen, 1: all (effective_progress.py).

    Attributes:
        compute: of the seconds per sample.
        network: of the seconds of an all-reduce.
    """

    compute: float = 1.0
    network: float = 1.0


#: Nothing is frozen.
WHOLE = RemainingWork()


class GoodputBasis:
    """Basis of a job's models for any noise; immutable, made by `basis`.

    Attributes:
        application: checked.
        observations: by type in the application's order; only types with any.
        per_node: GPUs per node, as far as it is known.
        compat: as the artifact does it.
        residuals: whether predictions correct the fits (step_residuals.py).
        source: the type whose curve others borrow; None: nothing was observed.
    """

    __slots__ = ("application", "compat", "observations", "per_node", "residuals", "source")

    def __init__(
        self,
        application: Application,
        observations: tuple[Observation, ...],
        *,
        per_node: Mapping[str, int],
        compat: bool,
        residuals: bool = False,
    ) -> None:
        check(application)
        self.application = application
        self.compat = compat
        self.residuals = residuals
        self.per_node = dict(per_node)
        self.observations: dict[str, tuple[Observation, ...]] = {}
        for profile in application.types:
            of_type = tuple(o for o in observations if o.gpu_type == profile.gpu_type)
            for o in of_type:
                throughput.check(o, profile.unit)
            if of_type:
                self.observations[profile.gpu_type] = of_type
        self.source = bootstrap.source(application, observations, compat=compat)

    def unit(self, gpu_type: str) -> int:
        """Return the GPUs per replica on a type."""
        profile = self.application.on(gpu_type)
        return profile.unit if profile else 1

    def fit(self, gpu_type: str) -> ThroughputParameters:
        """Return the throughput model of a type with observations."""
        pipeline = self.pipeline(gpu_type)
        return throughput.fit(
            self.observations[gpu_type],
            unit=self.unit(gpu_type),
            overlap=not pipeline,
            compat=self.compat,
        )

    def predictor(self, gpu_type: str) -> ThroughputParameters | CorrectedThroughput:
        """Return the predictor of step times on a type with observations."""
        if not self.residuals:
            return self.fit(gpu_type)
        return step_residuals.corrected(
            self.observations[gpu_type],
            unit=self.unit(gpu_type),
            overlap=not self.pipeline(gpu_type),
        )

    def pipeline(self, gpu_type: str) -> bool:
        """Return whether a replica is a pipeline there: then nothing hides its synchronisation."""
        return self.unit(gpu_type) > 1 or self.application.micro_batches > 1

    def ratio(self, gpu_type: str) -> float:
        """Return the speed of one replica over that on the source."""
        assert self.source is not None
        names = [n for n in (gpu_type, self.source) if n in self.observations]
        fits = {n: self.fit(n) for n in names}
        return bootstrap.ratio(self.application, gpu_type, self.source, fits)


def basis(
    application: Application,
    observations: tuple[Observation, ...],
    *,
    per_node: tuple[tuple[str, int], ...],
    compat: bool,
    residuals: bool = False,
) -> GoodputBasis:
    """Return the basis for these measurements; equal arguments, same object."""
    # Hashing long histories costs more than all else that new noise asks for, and from report
    # to report the same tuples come again. The entry holds them, so their ids stay theirs.
    key = (id(application), id(observations), per_node, compat, residuals)
    entry = _RECENT.get(key)
    if entry is None:
        if len(_RECENT) >= _MOST_RECENT:
            _RECENT.clear()
        made = _basis(application, observations, per_node, compat, residuals)
        entry = (application, observations, made)
        _RECENT[key] = entry
    return entry[2]


_RECENT: dict[
    tuple[int, int, tuple[tuple[str, int], ...], bool, bool],
    tuple[Application, tuple[Observation, ...], GoodputBasis],
] = {}
_MOST_RECENT = 32768


@lru_cache(maxsize=8192)
def _basis(
    application: Application,
    observations: tuple[Observation, ...],
    per_node: tuple[tuple[str, int], ...],
    compat: bool,
    residuals: bool,
) -> GoodputBasis:
    return GoodputBasis(
        application, observations, per_node=dict(per_node), compat=compat, residuals=residuals
    )


@dataclass(frozen=True, slots=True)
class GoodputTable:
    """Candidates of each configuration; arrays of shape (configurations, candidates).

    Attributes:
        weight: samples/s at the candidate's batch; 0: it cannot run so.
        scale: batch over initial batch.
        micro_batch, accumulation: how the batch is split.
    """

    weight: Floats
    scale: Floats
    micro_batch: Ints
    accumulation: Ints


@lru_cache(maxsize=8192)
def table(
    of: GoodputBasis,
    configurations: ConfigurationSet,
    *,
    fixed: bool,
    own_limits: bool = False,
    max_batch: int | None = None,
    most: int | None = None,
    part: RemainingWork = WHOLE,
    gains: PlanGains | None = None,
) -> GoodputTable:
    """Return the table of a job and its configurations.

    Args:
        of: the job.
        configurations: of any types.
        fixed: the batch is the user's, not to be chosen.
        own_limits: on types that borrow a curve, try what the type itself can hold; else, as
            published, what the type can whose curve it is, since the ratio of one-replica
            rates already has the larger memory in it.
        max_batch: largest global batch instead of the application's.
        most: largest micro-batch instead of each type's.
        part: what frozen layers leave of a step; it counts where a step is predicted from
            observations, and not for rigid jobs.
        gains: of execution plans over the job's own choice, whose times the observations are.
    """
    made = _own_table(
        of,
        configurations,
        fixed=fixed,
        own_limits=own_limits,
        max_batch=max_batch,
        most=most,
        part=part,
    )
    if gains is None:
        return made
    rows = zip(configurations.types, configurations.nodes, configurations.gpus, strict=True)
    factors = np.array([gains.factor(name, nodes=n, gpus=g) for name, n, g in rows])
    return dataclasses.replace(made, weight=made.weight * factors[:, None])


def _own_table(
    of: GoodputBasis,
    configurations: ConfigurationSet,
    *,
    fixed: bool,
    own_limits: bool,
    max_batch: int | None,
    most: int | None,
    part: RemainingWork,
) -> GoodputTable:
    """Return the table of a job that runs in the plans of its own choice; see `table`."""
    if of.source is None:
        # Before the first run no noise is known either, yet an elastic batch may take any value.
        fixed = of.application.job_class is not JobClass.ADAPTIVE
    own = candidates(
        of.application,
        configurations,
        fixed=fixed,
        compat=of.compat,
        max_batch=max_batch,
        most=most,
    )
    if of.application.job_class is JobClass.RIGID:
        return _rigid(of, configurations, own)
    if of.source is None:
        return _unobserved(of, configurations, own)
    used = _used(of, configurations, own)
    tried = own
    if used != configurations and not (fixed or own_limits):
        lent = candidates(
            of.application, used, fixed=fixed, compat=of.compat, max_batch=max_batch, most=most
        )
        # Where the lender cannot run any batch of that size, the type's own limits count.
        tried = own.where(np.asarray(~lent.valid.any(axis=1)), lent)
    return GoodputTable(
        _rates(of, configurations, used, own=own, tried=tried, part=part),
        tried.samples / of.application.initial_batch,
        tried.micro_batch,
        tried.accumulation,
    )


def _used(
    of: GoodputBasis, configurations: ConfigurationSet, own: BatchCandidates
) -> ConfigurationSet:
    """Map each configuration to the type whose curve counts, with as many replicas."""
    source = of.source
    assert source is not None
    if all(name in of.observations for name in configurations.types):
        return configurations
    unit, per_node = of.unit(source), _per_node(of, source, configurations)
    used = []
    for name, nodes, gpus, replicas in zip(
        configurations.types,
        configurations.nodes,
        configurations.gpus,
        own.replicas[:, 0].tolist(),
        strict=True,
    ):
        if name in of.observations:
            used.append((name, nodes, gpus))
        else:
            used.append((source, -(-replicas * unit // per_node), replicas * unit))
    types, nodes_used, gpus_used = zip(*used, strict=True)
    return ConfigurationSet(types, nodes_used, gpus_used)


def _per_node(of: GoodputBasis, gpu_type: str, configurations: ConfigurationSet) -> int:
    stated = of.per_node.get(gpu_type)
    if stated is not None:
        return stated
    rows = zip(configurations.types, configurations.nodes, configurations.gpus, strict=True)
    requested = [-(-gpus // nodes) for name, nodes, gpus in rows if name == gpu_type]
    observed = [-(-o.gpus // o.nodes) for o in of.observations.get(gpu_type, ())]
    return max(requested + observed)


def _rates(
    of: GoodputBasis,
    configurations: ConfigurationSet,
    used: ConfigurationSet,
    *,
    own: BatchCandidates,
    tried: BatchCandidates,
    part: RemainingWork = WHOLE,
) -> Floats:
    """Return samples/s of each candidate; 0 where it cannot run."""
    rates = np.zeros(tried.samples.shape)
    valid = tried.valid & own.valid.any(axis=1, keepdims=True)
    nodes = np.array(used.nodes)[:, None]
    names = np.array(configurations.types, dtype=object)
    for name in sorted(set(configurations.types)):
        if of.application.on(name) is None:
            continue
        at = names == name
        lender = name if name in of.observations else of.source
        assert lender is not None
        m, s = tried.micro_batch[at], tried.accumulation[at]
        if of.compat and of.pipeline(lender):
            fitted = of.fit(lender).lighter(compute=part.compute, network=part.network)
            seconds = (s + 1) * fitted.accumulation_time(m)  # the artifact has no all-reduce here
        else:
            fit = of.predictor(lender).lighter(compute=part.compute, network=part.network)
            seconds = fit.iteration_time(nodes[at], own.replicas[at], m, s)
        ratio = 1.0 if lender == name else of.ratio(name)
        rates[at] = np.where(valid[at], ratio * tried.samples[at] / seconds, 0.0)
    return rates


def _unobserved(
    of: GoodputBasis, configurations: ConfigurationSet, own: BatchCandidates
) -> GoodputTable:
    """Return the table before any observation: one-replica profiles, scaled linearly."""
    possible = own.valid.any(axis=1)
    replicas = own.replicas[:, 0]
    if of.compat:
        rates = np.where(possible & (replicas == 1), 1.0, 0.0)
    else:
        singles = bootstrap.singles(of.application)
        single = np.array([singles.get(name, 0.0) for name in configurations.types])
        rates = np.where(possible, single * replicas, 0.0)
    # The smallest batch that fits: no measurement supports a larger one yet.
    at = np.arange(len(configurations)), own.valid.argmax(axis=1)
    column = (len(configurations), 1)
    return GoodputTable(
        rates.reshape(column),
        np.ones(column),
        own.micro_batch[at].reshape(column),
        own.accumulation[at].reshape(column),
    )


def _rigid(
    of: GoodputBasis, configurations: ConfigurationSet, own: BatchCandidates
) -> GoodputTable:
    """Return the table of a rigid job: rates of the types, the slowest counting its GPUs."""
    gpus = of.application.gpus
    profiles = of.application.types
    shape = ConfigurationSet(
        tuple(p.gpu_type for p in profiles),
        tuple(-(-gpus // of.per_node.get(p.gpu_type, gpus)) for p in profiles),
        (gpus,) * len(profiles),
    )
    slowest = min((r for r in _requested(of, shape).tolist() if r > 0), default=1.0)
    matches = np.array(configurations.gpus, dtype=np.int64) == gpus
    rates = np.where(matches, _requested(of, configurations), 0.0) * (gpus / slowest)
    column = (len(configurations), 1)
    return GoodputTable(rates.reshape(column), np.ones(column), own.micro_batch, own.accumulation)


def _requested(of: GoodputBasis, configurations: ConfigurationSet) -> Floats:
    """Return samples/s of the user's batch: stated, else predicted, else the slowest stated."""
    profiles = of.application.types
    stated = {p.gpu_type: p.rate for p in profiles if p.rate is not None}
    own = candidates(of.application, configurations, fixed=True, compat=of.compat)
    if of.source is not None:
        used = _used(of, configurations, own)
        rates = _rates(of, configurations, used, own=own, tried=own)[:, 0]
    elif stated and all(p.single is None for p in profiles):
        rates = np.where(own.valid[:, 0], min(stated.values()), 0.0)
    else:
        singles = bootstrap.singles(of.application)
        single = np.array([singles.get(name, 0.0) for name in configurations.types])
        rates = np.where(own.valid[:, 0], single * own.replicas[:, 0], 0.0)
    whole_replicas = [
        gpus % of.unit(name) == 0
        for name, gpus in zip(configurations.types, configurations.gpus, strict=True)
    ]
    stated_rates = np.array([stated.get(name, math.nan) for name in configurations.types])
    return np.asarray(
        np.where(np.isnan(stated_rates), rates, np.where(whole_replicas, stated_rates, 0.0))
    )


def check(application: Application) -> None:
    """Reject an invalid application.

    Raises:
        ValueError: names the field, its value and what it must be.
    """
    where = f"application {application.name}"
    for name in ("initial_batch", "max_batch", "batch", "gpus", "micro_batches"):
        _at_least_one(where, name, getattr(application, name))
    names = set()
    for profile in application.types:
        place = f"{where} on {profile.gpu_type}"
        if profile.gpu_type in names:
            raise ValueError(f"{place}: the type is given twice")
        names.add(profile.gpu_type)
        for name in ("least", "most", "unit"):
            _at_least_one(place, name, getattr(profile, name))
        if profile.most < profile.least:
            raise ValueError(f"{place}: most={profile.most} is below least={profile.least}")
        for name in ("single", "rate"):
            value = getattr(profile, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{place}: {name}={value} must be positive, finite samples/s")


def _at_least_one(where: str, name: str, value: int) -> None:
    if not (isinstance(value, int | np.integer) and value >= 1):
        raise ValueError(f"{where}: {name}={value} must be an integer >= 1")
