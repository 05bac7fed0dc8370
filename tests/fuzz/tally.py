"""Counts of the inputs of one surface, and its crashes with the number that replays each."""

from __future__ import annotations

import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

#: Number of different crashes that are kept.
MOST_CRASHES = 20


@dataclass
class Tally:
    """Results of one run.

    Attributes:
        inputs: number of inputs tried.
        crashes: one text each: the input's number and the error.
        notes: counts by outcome, e.g. "directive refused".
    """

    inputs: int = 0
    crashes: list[str] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def drive(
    one: Callable[[random.Random], str], *, seconds: float, seed: int, most: int | None = None
) -> Tally:
    """Try inputs until the time is over; `one` draws an input, tries it and names the outcome.

    Args:
        one: function that raises an error for a fault.
        seconds: wall time.
        seed: input number n is drawn from Random(f"{seed}.{n}"), so that each replays alone.
        most: largest number of inputs; None: no limit.
    """
    tally, end, places = Tally(), time.monotonic() + seconds, set()
    while time.monotonic() < end and (most is None or tally.inputs < most):
        tally.inputs += 1
        number = f"{seed}.{tally.inputs}"
        try:
            tally.notes[one(random.Random(number))] += 1
        except Exception as error:  # noqa: BLE001 - any error is a finding
            frames = traceback.extract_tb(error.__traceback__)
            where = " < ".join(
                f"{f.filename.rsplit('/', 1)[-1]}:{f.lineno}" for f in frames[:-5:-1]
            )
            if where not in places and len(places) < MOST_CRASHES:
                places.add(where)
                tally.crashes.append(f"{number} {type(error).__name__}: {error!s:.300} ({where})")
    return tally
