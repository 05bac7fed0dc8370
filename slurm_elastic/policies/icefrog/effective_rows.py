"""Rows of effective progress for `icefrog`: Sia's rows of goodput, with the best prefix in each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_elastic.models import effective_progress
from slurm_elastic.policies.sia.artifact_rules import ArtifactRules
from slurm_elastic.policies.sia.goodput_rows import Candidate, Floats, Goodputs
from slurm_elastic.policies.sia.sia_configurations import SiaConfigurations


class EffectiveGoodputs(Goodputs):
    """Rows of effective progress; those of `Goodputs` for jobs that freeze nothing."""

    def __init__(self, rules: ArtifactRules) -> None:
        super().__init__(rules)
        self._found: dict[int, tuple[object, effective_progress.EffectiveProgress]] = {}

    def rows(self, jobs: Sequence[Candidate], columns: SiaConfigurations) -> Floats:
        """Return [J, C] effective progress of each job and configuration; see `Goodputs.rows`."""
        found = super().rows(jobs, columns)
        alive = {job.job.job_id for job in jobs}
        self._found = {k: v for k, v in self._found.items() if k in alive}
        return found

    def one(self, job: Candidate, columns: SiaConfigurations, column: int) -> float:
        """Return the effective progress of one job in one configuration."""
        if job.learned is None or job.learned.prefixes is None:
            return super().one(job, columns, column)
        return float(self._one(job, columns, column).best[0])

    def prefix(self, job: Candidate, columns: SiaConfigurations, column: int) -> int:
        """Return the number of front layers that a job is to freeze in a configuration."""
        if job.learned is None or job.learned.prefixes is None:
            return 0
        known, found = self._found.get(job.job.job_id, (None, None))
        if found is not None and known is job.learned and column < len(found.prefix):
            return int(found.prefix[column])
        return int(self._one(job, columns, column).prefix[0])

    def _one(
        self, job: Candidate, columns: SiaConfigurations, column: int
    ) -> effective_progress.EffectiveProgress:
        assert job.learned is not None
        kind = columns.types[columns.kind[column]]
        asked = effective_progress.ConfigurationSet(
            (kind,), (int(columns.nodes[column]),), (int(columns.gpus[column]),)
        )
        return effective_progress.progress(self._model(job.learned, columns), job.learned, asked)

    def _fresh(self, jobs: Sequence[Candidate], columns: SiaConfigurations) -> list[Floats]:
        rows = super()._fresh(jobs, columns)
        asked = columns.asked()
        for i, job in enumerate(jobs):
            learned = job.learned
            if learned is None or learned.prefixes is None:
                continue
            model = self._model(learned, columns)
            found = effective_progress.progress(model, learned, asked)
            self._found[job.job.job_id] = (learned, found)
            rows[i] = np.asarray(found.best)
        return rows
