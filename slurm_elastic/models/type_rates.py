"""Speed of one replica on each GPU type: measured, or estimated from the types that were.

>>> seen = [Observation("t4", 1, 1, 8, 0.2, 0.2)]
>>> estimated(seen, ["t4", "a100"], {"a100": 3.0}, earlier={})
{'t4': 40.0, 'a100': 120.0}
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from slurm_elastic.core.application import Observation


def measured(points: Iterable[Observation]) -> dict[str, float]:
    """Return samples/s of one replica on each measured type, at the most comparable batches.

    Our definition: micro-batch over micro-step, which needs no run on one GPU. Rates
    rise with the micro-batch, so all types are read as near as possible (in ratio) to
    the one size that is nearest to a size of every type; of several, the largest.
    """
    by_type: dict[str, dict[int, list[float]]] = {}
    for p in points:
        sizes = by_type.setdefault(p.gpu_type, {})
        sizes.setdefault(p.micro_batch, []).append(p.micro_batch / p.micro_step_s)

    def distance(size: int, sizes: Iterable[int]) -> float:
        return min(abs(math.log(size / s)) for s in sizes)

    every = {m for sizes in by_type.values() for m in sizes}
    if not every:
        return {}
    chosen = min(every, key=lambda m: (sum(distance(m, s) for s in by_type.values()), -m))
    rates = {}
    for name, sizes in by_type.items():
        nearest = min(sizes, key=lambda m: (abs(math.log(chosen / m)), -m))
        rates[name] = statistics.median(sizes[nearest])
    return rates


def estimated(
    points: Iterable[Observation],
    types: Sequence[str],
    stated: Mapping[str, float],
    *,
    earlier: Mapping[str, float],
) -> dict[str, float]:
    """Return samples/s of one replica on each of `types`, of unmeasured ones by stated ratios.

    Args:
        points: of the application.
        types: the types to compute.
        stated: relative speeds of types, `[speedup] types`; 1 for those not named.
        earlier: samples/s of types, for those not in `points`.

    Returns:
        Relative speeds, if nothing was measured.
    """
    configured = {t: stated.get(t, 1.0) for t in types}
    rates = {**earlier, **measured(points)}
    configured |= {t: stated.get(t, 1.0) for t in rates}
    all_rates = scaled(rates, configured) if rates else configured
    return {t: all_rates[t] for t in types}


def scaled(values: Mapping[str, float], relative: Mapping[str, float]) -> dict[str, float]:
    """Return `seen`, and all other types by relative value at the mean ratio (of logarithms)."""
    scale = math.exp(statistics.fmean(math.log(v / relative[t]) for t, v in values.items()))
    return {t: values.get(t, scale * value) for t, value in relative.items()}
