"""Generated workloads: arrivals, a mix of applications, sizes, classes.

Our definition; the same arguments and seed give the same jobs. The number of jobs is fixed, so that
workloads of one load are compared: arrivals are order statistics of the process's intensity over
the given time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from slurm_elastic.core.errors import InvalidInputError

HEADER = ("name", "time", "application", "num_replicas", "batch_size", "category")
#: Names of `category` in a workload file.
CLASSES = ("adaptive", "scale-gpus", "rigid")

_HOUR = 3600.0
_BURST_S = 300.0
_BURST_JOBS = 5


class GenerateError(InvalidInputError):
    """Arguments are invalid; the message says which, and what is expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestPattern:
    """Requests of users for one application.

    Attributes:
        batches: initial and largest global batch.
        weight: weight among the applications.
        sizes: (GPUs, weight).
    """

    batches: tuple[int, int]
    weight: float = 1.0
    sizes: tuple[tuple[int, float], ...] = ((1, 0.4), (2, 0.2), (4, 0.2), (8, 0.2))


@dataclass(frozen=True, slots=True)
class GeneratedJob:
    """One job of a workload file; `time` in seconds from its start."""

    name: str
    time: int
    application: str
    gpus: int
    batch: int
    category: str = "adaptive"


def generate(
    applications: Mapping[str, RequestPattern],
    *,
    jobs: int,
    hours: float,
    arrivals: str = "poisson",
    classes: Mapping[str, float] | None = None,
    seed: int = 0,
) -> list[GeneratedJob]:
    """Draw a workload.

    Args:
        applications: request patterns by application.
        jobs: number of jobs.
        hours: duration of the submissions.
        arrivals: `poisson` (constant intensity), `diurnal` (most at 14:00, least at 2:00; time 0
            is 8:00) or `bursts` (on average five equal jobs within five minutes).
        classes: weights of the job classes; None: all adaptive.
        seed: seed of the random numbers.

    Raises:
        GenerateError: an argument is invalid.
    """
    if arrivals not in ARRIVALS:
        raise GenerateError(f'arrivals "{arrivals}" is unknown; known: {", ".join(ARRIVALS)}')
    if jobs < 1 or not 0 < hours < math.inf:
        raise GenerateError("a workload needs at least one job and more than 0 hours")
    rng = np.random.default_rng(seed)
    times, groups = ARRIVALS[arrivals](rng, jobs, hours * _HOUR)
    names = sorted(applications)
    weights = _weights({n: applications[n].weight for n in names}, names)
    classes = classes or {"adaptive": 1.0}
    kinds = _weights(classes, CLASSES)
    requests: dict[int, tuple[str, int]] = {}
    lines: list[GeneratedJob] = []
    for index in np.argsort(times, kind="stable"):
        group = int(groups[index])
        if group not in requests:
            name = str(rng.choice(names, p=weights))
            requests[group] = (name, _size(rng, applications[name]))
        name, gpus = requests[group]
        category = str(rng.choice(CLASSES, p=kinds))
        lines.append(
            GeneratedJob(
                name=f"{name}-{len(lines)}",
                time=int(times[index]),
                application=name,
                gpus=gpus,
                batch=_batch(applications[name], gpus),
                category=category,
            )
        )
    return lines


def write(lines: Iterable[GeneratedJob], stream: TextIO) -> None:
    """Write a workload file."""
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(HEADER)
    for line in lines:
        writer.writerow(
            (line.name, line.time, line.application, line.gpus, line.batch, line.category)
        )


def _size(rng: np.random.Generator, ask: RequestPattern) -> int:
    weights = _weights({str(s): w for s, w in ask.sizes}, [str(s) for s, _ in ask.sizes])
    size, _ = ask.sizes[int(rng.choice(len(ask.sizes), p=weights))]
    # Each GPU needs a sample of the largest batch.
    return min(size, ask.batches[1])


def _batch(ask: RequestPattern, gpus: int) -> int:
    """Return the batch for so many GPUs: doubled from the initial one, no faster than the GPUs."""
    first, last = ask.batches
    doublings = math.floor(math.log2(max(1.0, min(gpus, last / first))))
    return max(first << doublings, gpus)


def _weights(weights_by_name: Mapping[str, float], names: Sequence[str]) -> NDArray[np.float64]:
    unknown = sorted(set(weights_by_name) - set(names))
    if unknown:
        raise GenerateError(f'"{unknown[0]}" is unknown; known: {", ".join(names)}')
    weights = np.array([weights_by_name.get(n, 0.0) for n in names], dtype=float)
    if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() <= 0:
        raise GenerateError("weights must not be negative, and not all of them 0")
    return np.asarray(weights / weights.sum(), dtype=float)


_Arrivals = Callable[
    [np.random.Generator, int, float], tuple[NDArray[np.float64], NDArray[np.int64]]
]


def _poisson(
    rng: np.random.Generator, jobs: int, seconds: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    return rng.uniform(0, seconds, jobs), np.arange(jobs)


def _diurnal(
    rng: np.random.Generator, jobs: int, seconds: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return arrivals with intensity 1 + 0.8 cos(2 pi (t - 14 h) / 24 h), by inversion."""
    grid = np.linspace(0, seconds, max(2, math.ceil(seconds / 60) + 1))
    angle = 2 * np.pi * (grid / _HOUR + 8 - 14) / 24
    rate = 1 + 0.8 * np.cos(angle)
    total = np.concatenate([[0], np.cumsum((rate[1:] + rate[:-1]) / 2 * np.diff(grid))])
    return np.interp(rng.uniform(0, total[-1], jobs), total, grid), np.arange(jobs)


def _bursts(
    rng: np.random.Generator, jobs: int, seconds: float
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return arrivals in bursts of a geometric number of equal jobs, as in a parameter sweep."""
    times: list[float] = []
    groups: list[int] = []
    group = 0
    while len(times) < jobs:
        begin = rng.uniform(0, max(0.0, seconds - _BURST_S))
        for _ in range(min(int(rng.geometric(1 / _BURST_JOBS)), jobs - len(times))):
            times.append(begin + rng.uniform(0, min(_BURST_S, seconds)))
            groups.append(group)
        group += 1
    return np.array(times), np.array(groups)


ARRIVALS: Mapping[str, _Arrivals] = {"poisson": _poisson, "diurnal": _diurnal, "bursts": _bursts}
