"""Rows of effective progress for `icefrog`: Sia's rows of goodput, with the best prefix in each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from slurm_elastic.models import effective
from slurm_elastic.policies.sia_configurations import Configurations
from slurm_elastic.policies.sia_goodput import Candidate, Floats, Goodputs
from slurm_elastic.policies.sia_rules import Rules


class EffectiveGoodputs(Goodputs):
    """As `Goodputs`, which jobs that freeze nothing keep."""

    def __init__(self, rules: Rules) -> None:
        super().__init__(rules)
        self._found: dict[int, tuple[object, effective.Progress]] = {}

    def rows(self, jobs: Sequence[Candidate], columns: Configurations) -> Floats:
        """[J, C] effective progress of each job in each configuration; see `Goodputs.rows`."""
        found = super().rows(jobs, columns)
        alive = {job.job.job_id for job in jobs}
        self._found = {k: v for k, v in self._found.items() if k in alive}
        return found

    def one(self, job: Candidate, columns: Configurations, column: int) -> float:
        """Effective progress of one job in one configuration."""
        if job.learned is None or job.learned.prefixes is None:
            return super().one(job, columns, column)
        return float(self._one(job, columns, column).best[0])

    def prefix(self, job: Candidate, columns: Configurations, column: int) -> int:
        """Front layers that a job is to freeze in a configuration."""
        if job.learned is None or job.learned.prefixes is None:
            return 0
        known, found = self._found.get(job.job.job_id, (None, None))
        if found is not None and known is job.learned and column < len(found.prefix):
            return int(found.prefix[column])
        return int(self._one(job, columns, column).prefix[0])

    def _one(self, job: Candidate, columns: Configurations, column: int) -> effective.Progress:
        assert job.learned is not None
        kind = columns.types[columns.kind[column]]
        asked = effective.Configurations(
            (kind,), (int(columns.nodes[column]),), (int(columns.gpus[column]),)
        )
        return effective.progress(self._model(job.learned, columns), job.learned, asked)

    def _fresh(self, jobs: Sequence[Candidate], columns: Configurations) -> list[Floats]:
        rows = super()._fresh(jobs, columns)
        asked = columns.asked()
        for i, job in enumerate(jobs):
            learned = job.learned
            if learned is None or learned.prefixes is None:
                continue
            model = self._model(learned, columns)
            found = effective.progress(model, learned, asked)
            self._found[job.job.job_id] = (learned, found)
            rows[i] = np.asarray(found.best)
        return rows
