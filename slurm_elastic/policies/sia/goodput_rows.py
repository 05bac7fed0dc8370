"""Goodput rows of a round's jobs, kept from round to round until something is learned.

A job with `JobRecord.learned` counts with its goodput model (models/goodput.py), any
other with its speed (models/speedup.py): samples/s are goodput at a fixed batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.application import JobClass, Learned, Observation
from slurm_elastic.core.cluster import Allocation, Job
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.plan import JobRecord, Measurement
from slurm_elastic.models.goodput import GoodputModel, goodput_matrix
from slurm_elastic.models.speedup import SpeedModel
from slurm_elastic.policies.sia.artifact_rules import ArtifactRules
from slurm_elastic.policies.sia.sia_configurations import SiaConfigurations

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Candidate:
    """One job to decide on."""

    job: Job
    record: JobRecord
    directive: Directive
    model: SpeedModel

    @property
    def held(self) -> Allocation | None:
        """Its present allocation."""
        return self.job.allocation

    @property
    def learned(self) -> Learned | None:
        """Measurements and application of its goodput model."""
        return self.record.learned

    @property
    def rigid(self) -> bool:
        """Whether its number of GPUs is fixed by the user."""
        learned = self.learned
        return learned is not None and learned.application.job_class is JobClass.RIGID

    def measured(self) -> int:
        """Most replicas that it was measured with; 0 before that."""
        unit = self.directive.unit_for
        measurements: Sequence[Observation | Measurement] = self.record.measurements
        if self.learned is not None:
            measurements = self.learned.observations
        return max((m.gpus // unit(m.gpu_type) for m in measurements), default=0)


class Goodputs:
    """Rows of goodput; those of jobs without new measurements are kept."""

    def __init__(self, rules: ArtifactRules) -> None:
        self._rules = rules
        self._cache: dict[int, tuple[object, SiaConfigurations, Floats]] = {}

    def rows(self, jobs: Sequence[Candidate], columns: SiaConfigurations) -> Floats:
        """Return [J, C] goodput of each job and configuration, in its own unit; 0: impossible."""
        if not jobs or not len(columns):
            return np.zeros((len(jobs), len(columns)))
        cache: dict[int, tuple[object, SiaConfigurations, Floats]] = {}
        changed = []
        for job in jobs:
            model: object = job.model if job.learned is None else job.learned
            cached = self._cache.get(job.job.job_id)
            if cached is not None and cached[0] is model and cached[1] is columns:
                cache[job.job.job_id] = cached
            else:
                changed.append(job)
        for job, row in zip(changed, self._new_rows(changed, columns), strict=True):
            model = job.model if job.learned is None else job.learned
            cache[job.job.job_id] = (model, columns, row)
        self._cache = cache
        return np.stack([cache[job.job.job_id][2] for job in jobs])

    def of_column(self, job: Candidate, columns: SiaConfigurations, column: int) -> float:
        """Return the goodput of one job in one configuration."""
        kind = columns.types[columns.kind[column]]
        nodes, gpus = int(columns.nodes[column]), int(columns.gpus[column])
        if job.learned is None:
            return job.model.speed(kind, gpus, nodes)
        return float(self._model(job.learned, columns).goodputs(kind, nodes, gpus))

    def _new_rows(self, jobs: Sequence[Candidate], columns: SiaConfigurations) -> list[Floats]:
        models = [self._model(j.learned, columns) for j in jobs if j.learned is not None]
        fitted_rows = (
            iter(goodput_matrix(models, columns.configuration_set())) if models else iter(())
        )
        names = columns.names() if len(models) < len(jobs) else []
        return [
            job.model.speeds(names, columns.gpus, columns.nodes)
            if job.learned is None
            else next(fitted_rows)
            for job in jobs
        ]

    def _model(self, learned: Learned, columns: SiaConfigurations) -> GoodputModel:
        if self._rules.batch_cap:
            application = learned.application
            learned = replace(
                learned, application=replace(application, max_batch=application.batch)
            )
        per_node = dict(zip(columns.types, columns.per_node, strict=True))
        rules = self._rules
        compat = rules.first_observed if learned.observations else rules.first_type
        return GoodputModel.of(learned, per_node=per_node, compat=compat)
