"""Shapes that a job must not get, and directives without them. Pure.

A *shape* is a GPU type and a number of GPUs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from slurm_elastic.core.cluster import Allocation
from slurm_elastic.core.directive import Directive
from slurm_elastic.core.reason import Reason

Shape = tuple[str, int]

#: Exit codes from here on are those of signals: segmentation faults, lack of memory.
_SIGNAL_CODE = 128


@dataclass(frozen=True, slots=True)
class BarredShape:
    """A shape in which a job failed.

    Attributes:
        gpu_type, gpus: the shape.
        reason: how it failed.
        time: when (epoch s).
    """

    gpu_type: str
    gpus: int
    reason: Reason
    time: float

    @property
    def shape(self) -> Shape:
        """The shape."""
        return self.gpu_type, self.gpus

    def to_json(self) -> list[Any]:
        """Return a row for the ledger."""
        return [self.gpu_type, self.gpus, self.reason.to_json(), self.time]

    @classmethod
    def from_json(cls, row: Any) -> BarredShape:
        """Return it from a row of the ledger.

        Raises:
            TypeError: it is no such row.
            ValueError: likewise.
        """
        gpu_type, gpus, reason, time = row
        return cls(str(gpu_type), int(gpus), read_reason(reason), float(time))


def shape_of(held: Allocation | None) -> Shape | None:
    """Return the shape of an allocation; None without GPUs."""
    return (held.gpu_type, held.gpus) if held and held.gpus else None


def fails_on_every_type(barred: BarredShape, worked: Collection[Shape]) -> bool:
    """Return whether a number of GPUs is barred on every type, as the failure is not of the type.

    On fewer GPUs than before each has more to do, and may lack memory that another type has.

    Args:
        barred: shape in which the job failed.
        worked: shapes in which the job has worked.
    """
    code = barred.reason.parameters.get("exit_code")
    by_itself = barred.reason.code == "program-ended" or (
        barred.reason.code == "program-failed" and isinstance(code, int) and code < _SIGNAL_CODE
    )
    is_growth = any(t == barred.gpu_type and gpus < barred.gpus for t, gpus in worked)
    return by_itself and is_growth and all(gpus != barred.gpus for _, gpus in worked)


@lru_cache(maxsize=1024)
def excluding(directive: Directive, excluded: frozenset[Shape]) -> Directive:
    """Return a directive without these shapes."""
    return directive.excluding(excluded)


@lru_cache(maxsize=1024)
def allowing_only(
    directive: Directive,
    allowed: tuple[Shape, ...],
    types: frozenset[str],
    excluded: frozenset[Shape],
) -> Directive:
    """Return a directive with some shapes only.

    Args:
        directive: to restrict.
        allowed: the shapes that stay.
        types: GPU types of the cluster and of these shapes.
        excluded: shapes that are left out in any case.
    """
    others = {
        (name, gpus)
        for name in types
        for gpus in directive.sizes(name)
        if (name, gpus) not in allowed
    }
    sizes = {gpus for _, gpus in others} - {gpus for _, gpus in allowed}
    others.update(("", gpus) for gpus in sizes)  # also where no type is requested
    return directive.excluding(excluded.union(others))


def read_reason(value: Any) -> Reason:
    """Return a reason from the ledger's JSON; where it is unreadable, a reason that says so."""
    return Reason.from_json(value) or Reason("text", text="not readable")
