"""Models of Rubick's traces: sizes, and the numbers that its scheduler uses for them.

Numbers of the scheduler: https://github.com/AlibabaPAI/reconfigurable-dl-scheduler, commit 80e8524,
sched/models. For vit and t5 they differ from those that were fitted to the published profiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slurm_elastic.core.execution.execution_plan import Sharding
from slurm_elastic.models.execution.plan_memory import GIB, TransformerSize
from slurm_elastic.models.execution.plan_times import ModelWork, PlanCoefficients, PlanLinks
from slurm_elastic.policies.execution.plan_options import Placement

_MILLION = 1 << 20
#: Link speed between nodes in its scheduler: no small model ever gets GPUs of two nodes.
_BETWEEN = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduledModel:
    """A model in the terms of Rubick's scheduler.

    Attributes:
        work: of a step.
        reference: samples/s that slopes are relative to.
        forward_ms: forward pass of the global batch on one GPU.
        coefficients, links: of its step times.
        most_samples: kinds of sharding in the order in which they are tried, each with the most
            samples of a GPU that fit into its memory; one that is missing does not fit (0 in the
            published table).
        shapes: placements of large models, in the order in which they are tried, by GPUs; empty
            for others.
        offloads: placements on which a large model runs with shard=offload.
    """

    work: ModelWork
    reference: float
    forward_ms: float
    coefficients: PlanCoefficients
    links: PlanLinks
    most_samples: tuple[tuple[Sharding, int], ...]
    shapes: tuple[tuple[int, tuple[Placement, ...]], ...] = ()
    offloads: tuple[Placement, ...] = ()


def _model(
    count: int,
    batch: int,
    reference_s: float,
    forward_ms: float,
    *numbers: tuple[float, ...],
    **large: Any,
) -> ScheduledModel:
    """Return a model; numbers: coefficients, and links of host and node."""
    coefficients, links = numbers
    most = {Sharding.OFFLOAD: batch, Sharding.OPTIMIZER: batch, Sharding.NONE: batch}
    if large:
        most = {Sharding.OFFLOAD: 8, Sharding.OPTIMIZER: 2}
    return ScheduledModel(
        work=ModelWork(parameters=count / _MILLION, batch=batch),
        reference=batch / reference_s,
        forward_ms=forward_ms,
        coefficients=PlanCoefficients(*coefficients),
        links=PlanLinks(host=links[0], inside=links[1], between=_BETWEEN),
        most_samples=tuple(most.items()),
        **large,
    )


_LLAMA = (2.0, 10.0, 0.03, 1e-8, 1.0492757598487223, 1.1192066928294584, 1000.0)
#: Parameters of both Llama models: the larger one counts as the smaller one.
_LLAMA_SIZE = 6738423808

SCHEDULED_MODELS = {
    "vit": _model(
        85952456, 64, 0.049219, 40,
        (1.0, 13.54749257672695, 0.09786337059659733, 1e-8, 5.201298157965654,
         15.692686524178942, 21.647413513688274),
        (6.1646901221266655, 29.7451292741858),
    ),
    "roberta": _model(
        355412057, 64, 0.234, 480,
        (1.7226216091452244, 1.205493103963666, 1e-8, 2.200462132207284, 15.73715000699807,
         16.635258404842535, 32.9530767089104),
        (7.9107385391936935, 50.303643979067175),
    ),
    "bert": _model(
        336297858, 32, 0.15768, 225,
        (1.7762507345127174, 1.1410390978600897, 1e-8, 4.400603962116795, 15.257464643432971,
         37.288983000053264, 26.221881110226107),
        (64.0, 119.4879085392442),
    ),
    "gpt2": _model(
        1557686400, 16, 0.62556, 1100,
        (2.2955055547729417, 71.21658539688131, 0.05217141753878825, 4.877226916846699,
         1.786485024931732, 0.027912731457899787, 51.48938818523304),
        (59.720964902105614, 144.837637323036),
    ),
    "t5": _model(
        1240809472, 16, 0.3207, 410,
        (1.2754324551852874, 1.0, 1e-8, 3.4538198406863163, 11.616030890964971,
         224.86968171631415, 61.68023191529816),
        (64.0, 161.02246829023724),
    ),
    "llama7": _model(
        _LLAMA_SIZE, 8, 9.4, 1000, _LLAMA, (0.96, 150.0),
        shapes=(
            (16, ((8,) * 2, (4,) * 4, (2,) * 8)),
            (64, ((8,) * 8,)),
            (32, ((8,) * 4, (4,) * 8)),
            (8, ((8,),)),
            (4, ((4,),)),
            (2, ((2,),)),
            (1, ((1,),)),
        ),
        offloads=((8,), (4,), (2,), (1,)),
    ),
    "llama30": _model(
        _LLAMA_SIZE, 4, 2.759, 1000, _LLAMA, (0.96, 150.0),
        shapes=((48, ((8,) * 6,)), (40, ((8,) * 5,)), (32, ((8,) * 4,)), (24, ((4,) * 6,))),
    ),
}  # fmt: skip
#: Speedup of the forward pass of one model on 2, 4 and 8 GPUs; that of others is the number of
#: GPUs.
BERT_FORWARD_GAIN = {2: 1.8, 4: 3.2, 8: 5.8}

#: Memory of the GPUs on which the step times were measured (A800).
GPU_BYTES = 80 * GIB
#: Architectures; parameters and batches are those of the traces.
TRANSFORMERS = {
    "vit": TransformerSize(parameters=85952456, layers=12, hidden=768, heads=12, tokens=197),
    "roberta": TransformerSize(
        parameters=355412057, layers=24, hidden=1024, heads=16, tokens=512, vocabulary=50265
    ),
    "bert": TransformerSize(
        parameters=336297858, layers=24, hidden=1024, heads=16, tokens=512, vocabulary=30522
    ),
    "gpt2": TransformerSize(
        parameters=1557686400, layers=48, hidden=1600, heads=25, tokens=1024, vocabulary=50257
    ),
    "t5": TransformerSize(
        parameters=1240809472, layers=32, hidden=1024, heads=16, tokens=512, vocabulary=32128
    ),
    "llama7": TransformerSize(
        parameters=_LLAMA_SIZE, layers=32, hidden=4096, heads=32, tokens=2048, vocabulary=32000
    ),
    "llama30": TransformerSize(
        parameters=31633.67188 * _MILLION,
        layers=60,
        hidden=6656,
        heads=52,
        tokens=2048,
        vocabulary=32000,
    ),
}
