"""Schedules of the exchange of gradients, and their numbers in agreements of the ranks.

All have the same result. *Flat* sends all gradients after the backward pass. *Buckets* send
gradients during it, as soon as those of one bucket are complete (CoCoNet, ASPLOS'22, calls that
overlap; DistributedDataParallel does the same).

>>> [schedule.name for schedule in SCHEDULES]
['flat', 'buckets-256KiB', 'buckets-1MiB', 'buckets-4MiB', 'buckets-25MiB']
>>> [SCHEDULES[number].name for number in candidates("auto", 5 << 20)]
['flat', 'buckets-256KiB', 'buckets-1MiB', 'buckets-4MiB']
"""

from __future__ import annotations

from dataclasses import dataclass

#: Value of `overlap` with which optimizer state is divided among the ranks, too
#: (`slurm_elastic.training.parallel.sliced_parallel`).
SLICED = "sliced"
#: Values of `init`'s argument `overlap`.
OVERLAPS = ("none", "buckets", "auto", SLICED)
_KIB = 1024


@dataclass(frozen=True, slots=True)
class ExchangeSchedule:
    """One way to send the gradients of a step.

    Attributes:
        name: in reports and logs.
        bucket_bytes: of gradients that are sent at once; 0: all, after the backward pass.
    """

    name: str
    bucket_bytes: int


#: Sizes as in the measurements that docs/training-exchange.md shows; 25 MiB is that of
#: DistributedDataParallel.
SCHEDULES = (
    ExchangeSchedule("flat", 0),
    ExchangeSchedule("buckets-256KiB", 256 * _KIB),
    ExchangeSchedule("buckets-1MiB", 1024 * _KIB),
    ExchangeSchedule("buckets-4MiB", 4 * 1024 * _KIB),
    ExchangeSchedule("buckets-25MiB", 25 * 1024 * _KIB),
)
#: Number of the flat schedule, with which each group of ranks begins.
FLAT = 0
#: Index of the size for `overlap="buckets"`: the fastest one if the exchange takes as long as the
#: backward pass (docs/training-exchange.md).
_FIXED = 2


def candidates(overlap: str, gradient_bytes: int) -> tuple[int, ...]:
    """Return the numbers of the schedules that a training may use, `FLAT` first.

    Args:
        overlap: one of `OVERLAPS`.
        gradient_bytes: of a step; buckets of that size or more would be a single one.
    """
    if overlap == "none":
        return (FLAT,)
    numbers = range(1, len(SCHEDULES)) if overlap == "auto" else (_FIXED,)
    return (FLAT, *(n for n in numbers if SCHEDULES[n].bucket_bytes < gradient_bytes))


def overlap_on(device_type: str, overlap: str) -> str:
    """Return the value of `OVERLAPS` that counts on devices of torch's type.

    Buckets, and products in chunks, have not been tried on GPUs: there they have to be asked for.
    """
    return "none" if overlap == "auto" and device_type == "cuda" else overlap


def check_overlap(overlap: str) -> None:
    """Check `init`'s argument.

    Raises:
        ValueError: it is none of `OVERLAPS`.
    """
    if overlap not in OVERLAPS:
        raise ValueError(f"overlap: {overlap!r} is invalid: expected one of {', '.join(OVERLAPS)}")
