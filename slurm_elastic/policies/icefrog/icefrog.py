"""Policy `icefrog`: layer elasticity in scheduling; Sia's program over effective progress.

IceFrog (TPDS 36(6), 2025) is the first scheduler that models frozen layers. Its formulas are
not public; this is our definition, on top of Sia's program (sia.py):

1. a job with `freeze=auto` counts in each configuration with its *effective progress*
   (models/effective_progress.py), the best of the prefixes that its training library certifies and
   its `max-penalty` allows;
2. `min sum_jc X_jc EP_jc^p + lambda_n (jobs - sum X)`, as Sia. Each row is in GPUs of its slowest
   type, so of what freezing changes the *shape* of a job's curve counts.

Frozen layers save computing before they save communication, and steps have fixed costs: more GPUs
gain a highly frozen job less, so they go where they gain more. controller/batch_tuning.py orders
the prefix for what a job holds, from the same function (`effective_progress.prefix`).

Without jobs that freeze, it decides as `sia`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from slurm_elastic.config.schema import Config
from slurm_elastic.core.plan import Proposal
from slurm_elastic.core.reason import Reason
from slurm_elastic.policies.icefrog.effective_rows import EffectiveGoodputs
from slurm_elastic.policies.policy_protocol import Capabilities, Question
from slurm_elastic.policies.sia.ranked_proposals import ProgramInputs
from slurm_elastic.policies.sia.round_arrays import RoundArrays
from slurm_elastic.policies.sia.sia import Sia

#: Most jobs that a reason names as taking GPUs.
_MOST_TAKERS = 3


class IceFrog(Sia):
    """The policy; its state is Sia's."""

    capabilities = Capabilities(binding_proposals=True, predicts_frozen_layers=True)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._effective = EffectiveGoodputs(self._rules)
        self._goodputs = self._effective
        self._weighed: ProgramInputs | None = None

    def weigh(self, question: Question) -> ProgramInputs:
        """Return the arrays of a question's program."""
        self._weighed = super().weigh(question)
        return self._weighed

    def decide(
        self, question: Question, state: Mapping[str, Any]
    ) -> tuple[tuple[Proposal, ...], Mapping[str, Any]]:
        """Rank alternatives for every job of the question; see the module."""
        proposals, state = super().decide(question, state)
        assert self._weighed is not None
        return _explained(proposals, self._weighed, self._effective), state


def _explained(
    proposals: tuple[Proposal, ...], weighed: ProgramInputs, effective: EffectiveGoodputs
) -> tuple[Proposal, ...]:
    """Add reasons: frozen layers, and the jobs that get the GPUs that they free."""
    table = weighed.table
    grown: dict[str, dict[int, int]] = {}
    for job, proposal in zip(table.candidates, proposals, strict=True):
        best = proposal.alternatives[0]
        held_gpus = job.held.gpus if job.held and job.held.gpu_type == best.gpu_type else 0
        if best.gpus > held_gpus:
            grown.setdefault(best.gpu_type, {})[job.job.job_id] = best.gpus - held_gpus
    explained = []
    for row, (job, proposal) in enumerate(zip(table.candidates, proposals, strict=True)):
        best, learned = proposal.alternatives[0], job.learned
        if learned is not None and learned.prefixes is not None and best.gpus:
            at = _column(table, row, best.gpu_type, best.gpus)
            frozen = effective.prefix(job, table.configurations, at)
            if frozen:
                reason = Reason(
                    "layers-frozen",
                    frozen=frozen,
                    layers=learned.prefixes.layers,
                    **_freed(weighed, row, at, grown.get(best.gpu_type, {})),
                    reason=best.reason,
                )
                first = dataclasses.replace(best, reason=reason)
                explained.append(
                    dataclasses.replace(proposal, alternatives=(first, *proposal.alternatives[1:]))
                )
                continue
        explained.append(proposal)
    return tuple(explained)


def _freed(
    weighed: ProgramInputs, row: int, at: int, grown: Mapping[int, int]
) -> dict[str, object]:
    """Return the GPUs that a job gives up of its type, and the jobs that take them."""
    table = weighed.table
    columns, held = table.configurations, int(table.held[row])
    if held < 0 or columns.kind[held] != columns.kind[at]:
        return {"jobs": ()}
    more, fewer = int(columns.gpus[held]), int(columns.gpus[at])
    if more <= fewer:
        return {"jobs": ()}
    takers = sorted(grown, key=lambda i: (-grown[i], i))[:_MOST_TAKERS]
    names = {job.job.job_id: job.job.display_id for job in table.candidates}
    return {
        "held": more,
        "gain": weighed.gain[row, held] / weighed.gain[row, at] - 1,
        "given": min(more - fewer, sum(grown.values())) if grown else None,
        "jobs": [names[i] for i in takers],
    }


def _column(table: RoundArrays, row: int, gpu_type: str, gpus: int) -> int:
    """Return the column of a shape, the valid one where several have as many GPUs."""
    columns = table.configurations
    matches = (columns.gpus == gpus) & (columns.kind == columns.types.index(gpu_type))
    at = np.flatnonzero(matches & table.valid[row])
    return int(at[0] if len(at) else np.flatnonzero(matches)[0])
