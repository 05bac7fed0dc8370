"""Synthetic applications for benchmarks and tests: small tables with known shapes.

>>> profile = synthetic_application("net", seconds=600.0)
>>> profile.epochs, sorted(profile.types)
(3, ['a100', 't4'])
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

from slurm_elastic.simulator.workloads.application_profiles import (
    ApplicationProfile,
    MeasuredCurve,
    Shape,
    TypeTable,
    smallest_rotation,
)

#: Speed of each type, and GPUs of its nodes.
TYPES: Mapping[str, tuple[float, int]] = {"t4": (1.0, 4), "a100": (2.0, 8)}
_BATCHES = (16, 32, 64, 128, 256)
_MICRO = (4, 8, 16, 32)


def synthetic_application(
    name: str,
    *,
    seconds: float = 600.0,
    epochs: int = 3,
    types: Mapping[str, tuple[float, int]] = TYPES,
    nodes: int = 3,
    restart_s: float = 20.0,
    units: Mapping[str, int] | None = None,
    micro_batches: int = 1,
) -> ApplicationProfile:
    """Return an application of about `seconds` at its initial batch on one GPU of speed 1.

    Args:
        name: of the application.
        seconds: of one job.
        epochs: of equal length; the gradient gets noisier with each.
        types: (speed, GPUs per node) by GPU type.
        nodes: shapes of up to so many nodes have rows.
        restart_s: of one restart.
        units: GPUs per replica, by type.
        micro_batches: in flight per step; more than 1: a pipeline.
    """
    total = seconds / _step_s(16, 1.0, (1,))[0]
    progress = tuple(total * (e + 1) / epochs for e in range(epochs))
    noise = tuple(10.0 * 4.0**e for e in range(epochs))
    return ApplicationProfile(
        name=name,
        batches=_BATCHES,
        progress=(progress,) * len(_BATCHES),
        sqr=((1.0,) * epochs,) * len(_BATCHES),
        var=(noise,) * len(_BATCHES),
        types={
            gpu_type: TypeTable(
                gpu_type=gpu_type,
                curves={shape: _curve(speed, shape) for shape in _shapes(per_node, nodes)},
                scalability=(),
                least=1 if micro_batches > 1 else _MICRO[0],
                most=1 if micro_batches > 1 else _MICRO[-1],
                unit=(units or {}).get(gpu_type, 1),
                source=f"{name}/placements-{gpu_type}.csv",
            )
            for gpu_type, (speed, per_node) in types.items()
        },
        restart_s=restart_s,
        micro_batches=micro_batches,
    )


def _shapes(per_node: int, nodes: int) -> set[Shape]:
    return {
        smallest_rotation(shape)
        for count in range(1, nodes + 1)
        for shape in itertools.combinations_with_replacement(range(1, per_node + 1), count)
    } | {
        smallest_rotation(shape)
        for count in range(2, nodes + 1)
        for shape in itertools.product(range(1, per_node + 1), repeat=count)
        if per_node <= 4
    }


def _curve(speed: float, shape: Shape) -> MeasuredCurve:
    times = {m: _step_s(m, speed, shape) for m in (1, 2, *_MICRO)}
    return MeasuredCurve(
        tuple(times), tuple(s for s, _ in times.values()), tuple(n for _, n in times.values())
    )


def _step_s(micro_batch: int, speed: float, shape: Shape) -> tuple[float, float]:
    """Return (step, synchronisation) in seconds."""
    sync = 0.01 * math.log2(sum(shape)) + 0.03 * (len(shape) - 1) if sum(shape) > 1 else 0.0
    return (0.1 + 0.02 * micro_batch) / speed + sync, sync
