"""Observations of jobs and applications, to which goodput models are fitted.

An *application* is the user's jobs of one name that state the same application
(`init(application=...)`). It keeps the newest times of all of them, in the
ledger: the next job of the application begins with the relative speed of each GPU
type, and with `[sia] share` with all these times. Under a policy that shares measurements each
job has the pool of its application's newest jobs, moved by its own deviation
(models/application_jobs.py). Different users share nothing.

Reports are hostile: one changes only the observations of jobs of the same user and name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slurm_elastic.config.schema import Config
from slurm_elastic.controller.state.ledger import Ledger, LedgerError
from slurm_elastic.controller.state.reported.observations import (
    Observations,
    ObservedTime,
    counted_micro_batches,
    number,
)
from slurm_elastic.core.application import (
    Application,
    JobClass,
    Learned,
    Noise,
    Observation,
    TypeProfile,
)
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import Measurement
from slurm_elastic.core.report import Report
from slurm_elastic.models.application_pool import ApplicationPool, merged, own_deviation
from slurm_elastic.models.type_rates import estimated, scaled

#: Changes of one job's times that are passed on at once, and then one in so many seconds.
_FITS, _FIT_S = 5.0, 60.0
#: Applications that jobs of one name may state.
_STATED = 20


@dataclass(slots=True, eq=False)
class _CachedLearned:
    """Last learned data of a job, and how often it may still change.

    Attributes:
        state: versions that it was made of.
        settings: set by users; changes count at once.
        fits: changes left that cost a fit.
        at: when they were counted (epoch s).
    """

    state: object
    settings: object
    learned: Learned | None
    fits: float = _FITS
    at: float = 0.0

    def takes(self, learned: Learned | None, now: float) -> bool:
        """Return whether new data, which differs, may replace the last.

        Hostile reports could cost one difficult fit each.
        """
        if learned and self.learned:
            cheap = (learned.application, learned.observations) == (
                self.learned.application,
                self.learned.observations,
            )
            self.fits = min(_FITS, self.fits + max(0.0, now - self.at) / _FIT_S)
            self.at = now
            if not cheap and self.fits < 1:
                return False
            self.fits -= not cheap
        return True


class ObservationStore:
    """Observations of all jobs and applications. Its caller holds the lock.

    Args:
        ledger: where applications are kept.
        config: for `[speedup] types` and `[sia] share`; may be replaced.

    Attributes:
        adaptive_batches: whether jobs with `batch=MIN-MAX` run with other batches than their
            users' under the policy in force (`policy_protocol.Capabilities.batch_chosen_by`).
        shares_measurements, residual_models: capabilities of that policy.
    """

    def __init__(self, ledger: Ledger, config: Config | None = None) -> None:
        self._ledger = ledger
        self.config = config or Config()
        self.adaptive_batches = False
        self.shares_measurements = False
        self.residual_models = False
        self._applications: dict[tuple[str, str], dict[str, Observations]] = {}
        self._dirty: set[tuple[str, str, str]] = set()
        self._kept: dict[str, _CachedLearned] = {}
        if ledger.stored_version == 1:
            self._carry_over()

    def _carry_over(self) -> None:
        """Read the speeds of jobs that a ledger of version 1 has of applications."""
        applications: dict[tuple[str, str], Observations] = {}
        for user, name, record in self._ledger.named_jobs():
            rates = applications.setdefault((user, name), Observations()).rates
            measurements = record.get("measurements")
            rows = list(measurements.values()) if isinstance(measurements, dict) else []
            rows = [r for r in rows if isinstance(r, dict) and number(r.get("gpus"), 1, 2**16)]
            for row in sorted(rows, key=lambda r: -int(r["gpus"])):  # the smallest counts
                speed, kind = row.get("samples_per_s"), row.get("gpu_type")
                if isinstance(kind, str) and number(speed, 1e-9, 1e12):
                    rates[kind] = speed / row["gpus"]
        for (user, name), observations in applications.items():
            if observations.rates:
                self._ledger.put_application(user, name, "", observations.to_body())

    def add_report(
        self, observations: Observations, report: Report, job: Job, held: Allocation | None
    ) -> bool:
        """Record the observations of a report.

        Args:
            observations: of the job.
            report: its times are used if `held` is given.
            job: the job that has reported.
            held: the allocation that its times were measured in.

        Returns:
            Whether a configuration is known that was not.
        """
        directive = job.directive
        unit = directive.unit_for(held.gpu_type) if held and directive else 1
        old_count, version = len(observations.points), observations.version
        point = observations.add_report(report, held, unit)
        if observations.version != version:
            self._share(observations, point, job)
        return len(observations.points) > old_count

    def _share(self, observations: Observations, point: ObservedTime | None, job: Job) -> None:
        """Add an observation to the application."""
        if not observations.batch:
            return
        applications = self._of(job)
        shared = applications.get(observations.stated)
        if shared is None and observations.stated and "" in applications:
            applications[observations.stated] = shared = applications.pop("")
            shared.stated = observations.stated
        if shared is None or (point and len(point.recent) == 1 and shared.contradicts(point)):
            shared = Observations(stated=observations.stated)
            for old_point in observations.points.values():
                shared.keep(dataclasses.replace(old_point, recent=[]))
        elif point:
            shared.keep(dataclasses.replace(point, recent=[]))
        shared.batch, shared.initial_batch = observations.batch, observations.initial_batch
        shared.most, shared.noise = observations.most, observations.noise or shared.noise
        shared.first_noise = observations.first_noise or shared.first_noise
        shared.micro_batches = observations.micro_batches
        if observations.exchange is not None:
            shared.exchange = observations.exchange
        shared.jobs.keep(job.key, observations.measured_points(), observations.first_noise)
        self._changed(job, applications, shared)

    def adopt(self, job: Job, observations: Observations) -> None:
        """Add the observations that an owner imports to the application of a job."""
        applications = self._of(job)
        shared = applications.get(observations.stated) or observations
        shared.absorb(observations)
        shared.jobs.keep("", observations.measured_points())
        self._changed(job, applications, shared)

    def _changed(
        self, job: Job, applications: Mapping[str, Observations], shared: Observations
    ) -> None:
        shared.version += 1
        # The newest first: a job without reports is taken for it.
        others = [(k, v) for k, v in applications.items() if k != shared.stated][: _STATED - 1]
        self._applications[job.user, job.name] = {shared.stated: shared, **dict(others)}
        self._dirty.add((job.user, job.name, shared.stated))

    def add_measurement(
        self, observations: Observations, job: Job, key: str, measurement: Measurement
    ) -> None:
        """Add a job's measurement of a shape to the application."""
        shared = self._of(job).get(observations.stated)
        if shared is not None and shared.add_measurement(key, measurement):
            self._dirty.add((job.user, job.name, observations.stated))

    def add_plans(self, observations: Observations, job: Job, results: dict[str, Any]) -> None:
        """Keep the speeds of a job's plans for its application's next jobs.

        Args:
            observations: of the job.
            job: the job.
            results: `PlanTrials.results` of the job.
        """
        shared = self._of(job).get(observations.stated)
        if shared is not None:
            shared.plans = results
            self._dirty.add((job.user, job.name, observations.stated))

    def save(self, alive: Iterable[Job]) -> None:
        """Write changed applications to the ledger, and drop those that no job needs.

        Raises:
            LedgerError: it could not be written; the next call tries again.
        """
        for user, name, stated in sorted(self._dirty):
            observations = self._applications.get((user, name), {}).get(stated)
            if observations is not None:
                self._ledger.put_application(user, name, stated, observations.to_body())
            self._dirty.discard((user, name, stated))
        jobs = list(alive)
        names, keys = {(j.user, j.name) for j in jobs}, {j.key for j in jobs}
        self._applications = {k: v for k, v in self._applications.items() if k in names}
        self._kept = {k: v for k, v in self._kept.items() if k in keys}

    def learned(
        self,
        job: Job,
        observations: Observations,
        *,
        directive: Directive | None,
        cluster: Sequence[str],
        now: float,
    ) -> Learned | None:
        """Return the data that models are fitted to; the same object while nothing changes.

        Args:
            job: running or pending.
            observations: its own.
            directive: in force.
            cluster: GPU types that there are.
            now: epoch s; times that change with each report are passed on rarely.

        Returns:
            None while its batch is not known.
        """
        if directive is None:
            return None
        shared = self.shared(job, observations)
        pool = shared.jobs.pool(now) if shared and self.shares_measurements else None
        state = (
            observations.version,
            shared and (id(shared), shared.version, shared.jobs.pool_version),
        )
        settings = (directive, cluster, self.config, self.adaptive_batches)
        last = self._kept.get(job.key)
        if last and last.state == state and last.settings == settings:
            return last.learned
        data = self._learned(job, observations, shared, pool, directive=directive, cluster=cluster)
        if last is None or last.settings != settings:
            last = self._kept[job.key] = _CachedLearned(state, settings, data, at=now)
        elif data == last.learned:
            last.state = state  # others know it by its identity
        elif last.takes(data, now):
            last.state, last.learned = state, data
        return last.learned

    def shared(self, job: Job, observations: Observations) -> Observations | None:
        """Return its application's observations; before a report those of the name's latest job."""
        applications = self._of(job)
        if observations.batch:
            return applications.get(observations.stated)
        return next(iter(applications.values()), None)

    def _of(self, job: Job) -> dict[str, Observations]:
        name = (job.user, job.name)
        if name not in self._applications:
            try:
                bodies = self._ledger.applications(*name)
            except LedgerError:
                return {}  # the round says so
            self._applications[name] = {
                s: _application(b) for s, b in list(bodies.items())[:_STATED]
            }
        return self._applications[name]

    def _learned(
        self,
        job: Job,
        observations: Observations,
        shared: Observations | None,
        pool: ApplicationPool | None,
        *,
        directive: Directive,
        cluster: Sequence[str],
    ) -> Learned | None:
        batch = observations.batch or _expected(shared, directive)
        types = [t for t in directive.types or cluster if directive.sizes(t)]
        if not batch or not types:
            return None
        shares = self.config.sia.share or self.shares_measurements
        exchange = observations.exchange
        if exchange is None:
            exchange = (shared.exchange if shared else None) or ""
        own = _of_schedule(observations.observations(), exchange, directive)
        if pool is not None:
            points = merged(own, pool)
        else:
            inherited = shared.points if shared else {}
            points = tuple(p.observation() for p in {**inherited, **observations.points}.values())
        points = _of_schedule(points, exchange, directive)
        believed = points if shares else own
        initial_batch = (
            observations.initial_batch or (shared.initial_batch if shared else 0) or batch
        )
        span = _span(initial_batch, directive) if self.adaptive_batches else None
        rigid = directive.min_gpus == directive.max_gpus and span is None
        most = observations.most or (shared.most if shared else 0)
        single = estimated(
            points,
            types,
            self.config.speedup.types,
            earlier=shared.rates if shared else {},
        )
        measured_types = {o.gpu_type for o in points} | (shared.rates.keys() if shared else set())
        rates = _rates(points, directive, batch, single) if rigid else {}
        noise = observations.noise
        if noise is None and shared and shares:
            # The latest noise of another job belongs to a later stage of its training.
            first = None
            if self.shares_measurements:
                first = shared.jobs.first_noise or shared.first_noise
            noise = first or shared.noise
        if span:
            job_class, batch, initial = JobClass.ADAPTIVE, span[0], span[0]
        else:
            job_class = JobClass.RIGID if rigid else JobClass.STRONG_SCALING
            initial = min(batch, initial_batch)
        passed = observations.micro_batches or (shared.micro_batches if shared else 0)
        micro_batches = counted_micro_batches(passed, batch, _replicas(directive, types))
        if passed and most:
            most = span[1] if span else batch  # a pipeline divides its share itself
        application = Application(
            name=(observations.stated or (shared.stated if shared else "")) or job.name,
            job_class=job_class,
            initial_batch=initial,
            max_batch=span[1] if span else batch,
            batch=batch,
            gpus=directive.min_gpus,
            # Without a largest micro-batch a rank takes its share of an elastic batch at once.
            accumulation=bool(most) or span is None,
            micro_batches=micro_batches,
            types=tuple(
                TypeProfile(
                    t,
                    least=1,
                    most=most
                    or (
                        -(-_share_limit(points, directive, t, batch) // micro_batches)
                        if span
                        else batch
                    ),
                    single=single[t],
                    rate=rates.get(t),
                    unit=directive.unit_for(t),
                    estimated=t not in measured_types,
                )
                for t in types
            ),
            profiled=bool(points or (shared and shared.rates)),
        )
        return Learned(
            application,
            tuple(
                _divided(o, micro_batches)
                for o in believed
                if o.gpu_type in types and o.gpus % directive.unit_for(o.gpu_type) == 0
            ),
            # The variance is stated at the batch that the script began with.
            Noise(noise[0], noise[1] * (initial_batch / initial if span else 1.0))
            if noise
            else None,
            residuals=self.residual_models,
            deviation=own_deviation(own, pool) if pool is not None else 0.0,
        )


def _of_schedule(
    points: Iterable[Observation], exchange: str, directive: Directive
) -> tuple[Observation, ...]:
    """Return the points of one curve: those of a kind of schedule, and of single replicas."""
    return tuple(
        p for p in points if p.exchange == exchange or p.gpus <= directive.unit_for(p.gpu_type)
    )


def _application(body: object) -> Observations:
    """Return an application's observations from the ledger."""
    shared = Observations.from_body(body)
    if not shared.jobs.jobs:  # of a release that did not tell jobs apart
        shared.jobs.keep("", shared.measured_points(), shared.first_noise)
    return shared


def _expected(shared: Observations | None, directive: Directive) -> int:
    """Return the batch of a job without reports: its application's initial one; 0: unknown."""
    batch = (shared.initial_batch or shared.batch) if shared else 0
    if not batch or directive.batch is None:
        return batch
    return max(directive.batch[0], min(batch, directive.batch[1]))


def _span(initial_batch: int, directive: Directive) -> tuple[int, int] | None:
    """Return the batches to choose from, or None; those below the script's own are never better."""
    if directive.batch is None:
        return None
    low, high = directive.batch
    return (max(low, initial_batch), high) if max(low, initial_batch) < high else None


def _replicas(directive: Directive, types: Sequence[str]) -> list[int]:
    """Return the smallest and the largest legal number of replicas on these types."""
    sizes = [(directive.sizes(t), directive.unit_for(t)) for t in types]
    return [min(s[0] // unit for s, unit in sizes), max(s[-1] // unit for s, unit in sizes)]


def _divided(observation: Observation, micro_batches: int) -> Observation:
    """Return the times of one micro-batch's size, of a pass that has so many of them."""
    if micro_batches == 1:
        return observation
    size = -(-observation.micro_batch // micro_batches)
    return dataclasses.replace(observation, micro_batch=size)


def _share_limit(
    points: Iterable[Observation], directive: Directive, gpu_type: str, batch: int
) -> int:
    """Return the samples that a replica is known to take at once, or must with fewest GPUs."""
    replicas = max(1, directive.sizes(gpu_type)[0] // directive.unit_for(gpu_type))
    return max([-(-batch // replicas), *(p.micro_batch for p in points)])


def _rates(
    points: Iterable[Observation], directive: Directive, batch: int, single: Mapping[str, float]
) -> dict[str, float]:
    """Return samples/s in the one size of a rigid job; of unmeasured types by `single`."""
    gpus, rates = directive.min_gpus, {}
    for p in points:
        if p.gpus == gpus and p.gpu_type in single:
            replicas = max(1, gpus // directive.unit_for(p.gpu_type))
            micro_steps = max(1, round(batch / (p.micro_batch * replicas)))
            rates[p.gpu_type] = batch / (p.step_s + (micro_steps - 1) * p.micro_step_s)
    return scaled(rates, single) if rates else {t: gpus * s for t, s in single.items()}
