"""True slowdown of applications that stand on one node, in simulations.

>>> truth = NeighbourSlowdown({("bert", "ncf"): 0.8})
>>> truth.speed("bert", ["ncf", "ncf"]), truth.speed("ncf", ["bert"])
(0.64, 1.0)
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.errors import InvalidInputError

_COLUMNS = ("application", "other", "speed")


class NeighbourSlowdownError(InvalidInputError):
    """A file of slowdowns cannot be read, or is invalid."""


@dataclass(frozen=True)
class NeighbourSlowdown:
    """Speed of an application beside another one, relative to that alone; pairs without: 1.

    Several neighbours multiply.
    """

    speeds: Mapping[tuple[str, str], float]

    def speed(self, application: str, others: Iterable[str]) -> float:
        """Return the speed of an application beside others."""
        product = 1.0
        for other in others:
            product *= self.speeds.get((application, other), 1.0)
        return round(product, 9)


def read(path: Path) -> NeighbourSlowdown:
    """Read a CSV file with the columns application, other, speed.

    Raises:
        NeighbourSlowdownError: it cannot be read; the message names the line.
    """
    speeds: dict[tuple[str, str], float] = {}
    try:
        with path.open(encoding="utf-8", newline="") as lines:
            reader = csv.DictReader(lines)
            missing = set(_COLUMNS) - set(reader.fieldnames or ())
            if missing:
                raise NeighbourSlowdownError(f"{path}: column {min(missing)} is missing")
            for number, row in enumerate(reader, start=2):
                speeds[row["application"], row["other"]] = _speed(row["speed"], path, number)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise NeighbourSlowdownError(f"{path}: {error}") from None
    return NeighbourSlowdown(speeds)


def _speed(text: str | None, path: Path, number: int) -> float:
    try:
        speed = float(text or "")
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1:
        raise NeighbourSlowdownError(
            f"{path}:{number}: speed {text!r} is invalid: expected a number above 0, at most 1"
        )
    return speed
