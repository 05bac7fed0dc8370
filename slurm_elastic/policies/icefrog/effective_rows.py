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
        self._progress: dict[int, tuple[object, effective_progress.EffectiveProgress]] = {}

    def rows(self, jobs: Sequence[Candidate], columns: SiaConfigurations) -> Floats:
        """Return [J, C] effective progress of each job and configuration; see `Goodputs.rows`."""
        rows = super().rows(jobs, columns)
        alive = {job.job.job_id for job in jobs}
        self._progress = {k: v for k, v in self._progress.items() if k in alive}
        return rows

    def of_column(self, job: Candidate, columns: SiaConfigurations, column: int) -> float:
        """Return the effective progress of one job in one configuration."""
        if job.learned is None or job.learned.prefixes is None:
            return super().of_column(job, columns, column)
        return float(self._progress_of_column(job, columns, column).best[0])

    def prefix(self, job: Candidate, columns: SiaConfigurations, column: int) -> int:
        """Return the number of front layers that a job is to freeze in a configuration."""
        if job.learned is None or job.learned.prefixes is None:
            return 0
        learned, progress = self._progress.get(job.job.job_id, (None, None))
        if progress is not None and learned is job.learned and column < len(progress.prefix):
            return int(progress.prefix[column])
        return int(self._progress_of_column(job, columns, column).prefix[0])

    def _progress_of_column(
        self, job: Candidate, columns: SiaConfigurations, column: int
    ) -> effective_progress.EffectiveProgress:
        assert job.learned is not None
        kind = columns.types[columns.kind[column]]
        configurations = effective_progress.ConfigurationSet(
            (kind,), (int(columns.nodes[column]),), (int(columns.gpus[column]),)
        )
        return effective_progress.progress(
            self._model(job.learned, columns), job.learned, configurations
        )

    def _new_rows(self, jobs: Sequence[Candidate], columns: SiaConfigurations) -> list[Floats]:
        rows = super()._new_rows(jobs, columns)
        configurations = columns.configuration_set()
        for i, job in enumerate(jobs):
            learned = job.learned
            if learned is None or learned.prefixes is None:
                continue
            model = self._model(learned, columns)
            progress = effective_progress.progress(model, learned, configurations)
            self._progress[job.job.job_id] = (learned, progress)
            rows[i] = np.asarray(progress.best)
        return rows
