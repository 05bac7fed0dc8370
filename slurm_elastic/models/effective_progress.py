"""Effective progress: goodput when a job's front layers are frozen. Our definition.

IceFrog (TPDS 36(6), 2025) schedules by a "layer-aware throughput" and an "effective progress"
that a "frozen penalty" lowers; its formulas are not public. Ours degenerate to the goodput model
(models/goodput.py, models/throughput.py) when nothing is frozen. Of L layers with forward and
backward seconds F_l, B_l and w_l bytes of gradients, the first f frozen:

    C(f)   = (sum of F_l over all l, and of B_l over l > f) / (sum of F_l + B_l over all l)
    N(f)   = LATENCY + (1 - LATENCY) (sum of w_l over l > f) / (sum of w_l over all l)
    T_acc  = alpha_c + beta_c C(f) m
    T_net  = N(f) times that of the goodput model
    THR(a, m, s, f) = R m (s + 1) / T_iter
    EP(a, f)        = max over m, s of THR(a, m, s, f) x EFF(batch) x (1 - penalty(f))

A frozen prefix needs neither gradients of its weights nor of its inputs, so all of B_l goes; its
forward pass stays (the library does not cache it). The penalty is the library's, measured in the
job (models/frozen_penalty.py). Prefixes that are allowed: those whose penalty is known, certified,
and within the user's `max-penalty`.

>>> three = (LayerCost(1, 2, 10), LayerCost(1, 2, 30), LayerCost(1, 2, 60))
>>> job = Prefixes(layers=3, certified=2, max_penalty=0.02, penalties=((1, 0.001), (2, 0.03)),
...                costs=three)
>>> allowed(job)
((0, 0.0), (1, 0.001))
>>> left = part(job, 1)
>>> round(left.compute, 3), round(left.network, 3)
(0.778, 0.91)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.application import JobClass, LayerCost, Learned, Observation, Prefixes
from slurm_elastic.models.goodput import ConfigurationSet, Floats, GoodputModel
from slurm_elastic.models.goodput_tables import WHOLE, RemainingWork

Ints = NDArray[np.int64]

__all__ = [
    "LATENCY",
    "ConfigurationSet",
    "EffectiveProgress",
    "allowed",
    "part",
    "prefix",
    "progress",
    "thawed",
]

#: Part of an all-reduce's seconds that does not shrink with what is sent (our assumption).
LATENCY = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class EffectiveProgress:
    """Effective progress in configurations; arrays of shape (configurations,).

    Attributes:
        best: with the best prefix, in the goodput model's unit; 0 where the job cannot run so.
        prefix: front layers frozen for that; of equal ones the fewest.
    """

    best: Floats
    prefix: Ints


def allowed(prefixes: Prefixes | None) -> tuple[tuple[int, float], ...]:
    """Return (layers, penalty) of each prefix that may be chosen, ascending from (0, 0)."""
    if prefixes is None:
        return ((0, 0.0),)
    most = min(prefixes.certified, prefixes.layers - 1)
    fit = ((n, p) for n, p in prefixes.penalties if n <= most and p <= prefixes.max_penalty)
    return ((0, 0.0), *fit)


def part(prefixes: Prefixes, frozen: int, *, latency: float = LATENCY) -> RemainingWork:
    """Return the work that a frozen prefix leaves of a step; all if layer costs are not known."""
    if not frozen or not prefixes.costs:
        return WHOLE
    compute, network = _left(prefixes.costs)
    return RemainingWork(compute[frozen], latency + (1 - latency) * network[frozen])


@lru_cache(maxsize=4096)
def _left(costs: tuple[LayerCost, ...]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return C and the part of the bytes, by the number of frozen layers."""
    every = sum(c.forward_s + c.backward_s for c in costs)
    size = sum(c.parameter_bytes for c in costs)
    saved = accumulate((c.backward_s for c in costs), initial=0.0)
    frozen_bytes = accumulate((c.parameter_bytes for c in costs), initial=0.0)
    return (
        tuple(1.0 - b / every for b in saved),
        tuple(max(0.0, 1.0 - b / size) if size else 1.0 for b in frozen_bytes),
    )


def progress(
    model: GoodputModel, learned: Learned, configurations: ConfigurationSet
) -> EffectiveProgress:
    """Return a job's effective progress in each configuration, with the best prefix in each.

    A rigid job, one without observations and one whose layers' costs are not known cannot be
    predicted by prefix: it counts with its goodput, and freezes all that it may.

    Args:
        model: of `learned`.
        learned: of the job.
        configurations: of any types.
    """
    goodput = model.goodputs_of(configurations)
    choices = allowed(learned.prefixes)
    predictable = learned.prefixes is not None and learned.prefixes.costs and learned.observations
    if not predictable or learned.application.job_class is JobClass.RIGID or len(choices) == 1:
        longest = np.full(len(configurations), choices[-1][0], dtype=np.int64)
        return EffectiveProgress(goodput, longest)
    assert learned.prefixes is not None
    rows = np.stack(
        [
            goodput,
            *(
                model.goodputs_of(configurations, part(learned.prefixes, n)) * (1.0 - penalty)
                for n, penalty in choices[1:]
            ),
        ]
    )
    at = rows.argmax(axis=0)
    layers = np.array([n for n, _ in choices], dtype=np.int64)
    return EffectiveProgress(rows[at, np.arange(len(configurations))], layers[at])


def prefix(model: GoodputModel, learned: Learned, *, gpu_type: str, nodes: int, gpus: int) -> int:
    """Return the number of front layers to freeze in the present allocation, as `progress` does.

    Args:
        model: of `learned`.
        learned: of the job.
        gpu_type: held.
        nodes: held.
        gpus: held, over all nodes.
    """
    if learned.application.on(gpu_type) is None:
        return allowed(learned.prefixes)[-1][0]
    configuration = ConfigurationSet((gpu_type,), (nodes,), (gpus,))
    return int(progress(model, learned, configuration).prefix[0])


def thawed(observation: Observation, left: RemainingWork) -> Observation:
    """Estimate the same measurement without frozen layers.

    A step is taken to be its compute and, beyond that, its network's time; what launching costs
    (alpha_c) counts as compute.

    Args:
        observation: measured with the prefix frozen.
        left: of a step then.
    """
    micro = observation.micro_step_s / left.compute
    network = max(0.0, observation.step_s - observation.micro_step_s) / left.network
    alone_s = observation.exchange_s
    return replace(
        observation,
        step_s=micro + network,
        micro_step_s=micro,
        exchange_s=None if alone_s is None else alone_s / left.network,
    )
