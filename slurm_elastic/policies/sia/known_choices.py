"""Choices from which the search goes on when the solver's time is over: the present and fair's."""

from __future__ import annotations

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.policies.fair import FairShare
from slurm_elastic.policies.policy_protocol import Question
from slurm_elastic.policies.sia.round_arrays import Ints, RoundArrays


def known_choices(question: Question, arrays: RoundArrays, config: Config) -> list[Ints]:
    """Return [J] columns: what each job holds, and what policy `fair` would give it."""
    proposals, _ = FairShare(config).decide(question, {})
    columns = arrays.configurations
    sizes: dict[str, list[tuple[int, int]]] = {}
    for column in range(len(columns)):
        gpus, gpu_type = columns.size_and_type(column)
        sizes.setdefault(gpu_type, []).append((gpus, column))
    fair = np.full(len(arrays.candidates), -1, dtype=np.int64)
    row_of = {job.job.job_id: row for row, job in enumerate(arrays.candidates)}
    for proposal in proposals:
        row, first = row_of[proposal.job_id], proposal.alternatives[0]
        allowed = [
            option
            for option in sizes.get(first.gpu_type, ())
            if option[0] <= first.gpus and arrays.valid[row, option[1]]
        ]
        if allowed:
            fair[row] = max(allowed)[1]
    return [arrays.held.copy(), fair]
