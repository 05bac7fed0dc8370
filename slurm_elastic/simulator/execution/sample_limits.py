"""Most samples of a GPU: Rubick's published tables beside the memory model.

The published table of a model has four entries: without sharding, with the same number for
recomputation and without; `shard=optimizer`; `shard=offload`. It has 0 for both kinds of sharding
with recomputation, of every model: its scheduler makes no such plans, though its measurements with
`shard=offload` recompute in large models. Those entries say nothing about memory, and are left out.

By the model (`slurm_elastic.models.execution.plan_memory`) all samples are in one micro-batch, and
64 replicas divide the state.
"""

from __future__ import annotations

from dataclasses import dataclass

from slurm_elastic.core.execution.execution_plan import ExecutionPlan, Sharding
from slurm_elastic.core.layout import LayoutText
from slurm_elastic.models.execution.plan_memory import most_samples
from slurm_elastic.simulator.execution.rubick_models import (
    GPU_BYTES,
    SCHEDULED_MODELS,
    TRANSFORMERS,
)

_GPUS = 64
_ENTRIES = (
    (Sharding.NONE, False),
    (Sharding.NONE, True),
    (Sharding.OPTIMIZER, False),
    (Sharding.OFFLOAD, False),
)
#: Models with recomputation in what was measured with shard=offload; the last has the table of the
#: one before it.
_RECOMPUTED = ("gpt2", "t5", "llama7", "llama30")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLimit:
    """One entry of a published table.

    Attributes:
        model: its name.
        entry: kind of sharding, and `+recompute`.
        published: most samples of a GPU, at most the global batch; 0: the model does not fit.
        ours: the same by the memory model.
    """

    model: str
    entry: str
    published: int
    ours: int


def sample_limits() -> list[SampleLimit]:
    """Return all entries."""
    limits = []
    for model, scheduled in SCHEDULED_MODELS.items():
        batch = scheduled.work.batch
        published = dict(scheduled.most_samples)
        for sharding, recompute in _ENTRIES:
            measured = recompute or (sharding is Sharding.OFFLOAD and model in _RECOMPUTED)
            plan = ExecutionPlan(LayoutText((_GPUS,)), sharding=sharding, recompute=measured)
            limits.append(
                SampleLimit(
                    model=model,
                    entry=sharding.value + ("+recompute" if recompute else ""),
                    published=min(batch, published.get(sharding, 0)),
                    ours=most_samples(plan, TRANSFORMERS[model], batch=batch, gpu_bytes=GPU_BYTES),
                )
            )
    return limits
