"""Assumptions about a GPU type that a job has not run on yet (Sia, SOSP'23, section 3.2).

The paper profiles each job on one GPU of each type and then, until the job ran on
type A, takes the shape of its curve from a type B that it did run on:

    throughput_A(R) = throughput_B(R) throughput_A(1) / throughput_B(1)

at the same number R of replicas. What the artifact does differently is behind
`compat`; docs/models.md lists it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slurm_elastic.core.application import Application, Observation
from slurm_elastic.models.throughput import ThroughputParameters


def source(
    application: Application, observations: Sequence[Observation], *, compat: bool
) -> str | None:
    """Return the type whose curve types without observations borrow; None: none was observed.

    The type with the most observations, of several the first in the
    application's order; with `compat` simply the first in that order.
    """
    counts = dict.fromkeys((t.gpu_type for t in application.types), 0)
    for o in observations:
        if o.gpu_type in counts:
            counts[o.gpu_type] += 1
    observed_types = [name for name, count in counts.items() if count]
    if not observed_types:
        return None
    return observed_types[0] if compat else max(observed_types, key=counts.__getitem__)


def ratio(
    application: Application, gpu_type: str, of: str, fits: Mapping[str, ThroughputParameters]
) -> float:
    """Return the speed of one replica on a type, over that on the fitted type `of`.

    A one-replica rate that no profile states is read from the fit at the largest
    micro-batch, where there is one; types of which nothing is known count as equal.
    """
    rates = []
    for name in (gpu_type, of):
        profile = application.on(name)
        rate = profile.single if profile else None
        if rate is None and profile is not None and name in fits:
            parameters = fits[name]
            rate = float(parameters.throughput(1, 1, profile.most)) * application.micro_batches
        rates.append(rate)
    type_rate, base_rate = rates
    return type_rate / base_rate if type_rate is not None and base_rate is not None else 1.0


def singles(application: Application) -> dict[str, float]:
    """Return the rate of one replica on each type before the first run: samples/s, or relative.

    A type without a profile counts as slow as the slowest profiled one, so that it
    is used when nothing better is free; without any profile all types count 1.
    """
    measured = [t.single for t in application.types if t.single is not None]
    slowest = min(measured, default=1.0)
    return {t.gpu_type: slowest if t.single is None else t.single for t in application.types}
