"""True slowdown of applications that stand on one node, in simulations.

>>> truth = NeighbourSlowdown({("bert", "ncf"): 0.8})
>>> truth.speed("bert", ["ncf", "ncf"]), truth.speed("ncf", ["bert"])
(0.64, 1.0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from slurm_elastic.core.errors import InvalidInputError
from slurm_elastic.simulator.workloads.workload import WorkloadError, rows

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

    @property
    def applications(self) -> frozenset[str]:
        """Applications of which a pair is listed."""
        return frozenset(name for pair in self.speeds for name in pair)


def read(path: Path) -> NeighbourSlowdown:
    """Read a CSV file with the columns application, other, speed.

    Raises:
        NeighbourSlowdownError: it cannot be read; the message names the line.
    """
    speeds: dict[tuple[str, str], float] = {}
    shape = f"must be {','.join(_COLUMNS)}"
    try:
        for line, row in rows(path, _COLUMNS, what="a CSV file", header_line=shape):
            location = f"{path.name}:{line}"
            pair = row["application"], row["other"]
            speed = _speed(row["speed"], location)
            if not all(pair):
                raise NeighbourSlowdownError(
                    f"{location}: {_COLUMNS[bool(pair[0])]} is empty: expected an application"
                )
            if speeds.setdefault(pair, speed) != speed:
                raise NeighbourSlowdownError(
                    f"{location}: {pair[0][:60]} beside {pair[1][:60]} has another speed in an"
                    " earlier row; keep one row"
                )
    except WorkloadError as error:
        raise NeighbourSlowdownError(str(error)) from None
    if not speeds:
        raise NeighbourSlowdownError(f"{path}: has no row; each line after the first is one")
    return NeighbourSlowdown(speeds)


def _speed(text: str, location: str) -> float:
    try:
        speed = float(text)
    except ValueError:
        speed = 0.0
    if not 0 < speed <= 1:
        raise NeighbourSlowdownError(
            f"{location}: speed {text[:40]!r} is invalid: expected a number above 0, at most 1"
        )
    return speed
