"""Memory that applications use of a GPU, and whether it suffices for two of them. Pure.

Jobs report the memory of their GPU, and their peak use of it. Only reports of the two applications
of a pair count for it, so that no user decides about the jobs of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

#: Part of the memory that stays free (docs/colocation.md).
SPARE = 0.1
#: Applications that are kept, those that reported last.
_MOST = 5000


@dataclass(frozen=True, slots=True)
class UsedMemory:
    """Memory of one GPU as an application has reported it.

    Attributes:
        peak: most bytes in use, of all its jobs with one GPU of this type.
        capacity: bytes of the GPU.
    """

    peak: int
    capacity: int


class GpuMemory:
    """Memory that applications use of one GPU, by GPU type."""

    def __init__(self) -> None:
        self._used: dict[tuple[str, str], UsedMemory] = {}
        self.changes = 0

    def record(self, application: str, gpu_type: str, *, peak: int, capacity: int) -> None:
        """Record what a job with one GPU has reported.

        Args:
            application: application of the job.
            gpu_type: type of its GPU.
            peak: most bytes that the present attempt has used.
            capacity: bytes of the GPU.
        """
        key = application, gpu_type
        known = self._used.pop(key, None)
        self._used[key] = UsedMemory(max(peak, known.peak if known else 0), capacity)
        self.changes += self._used[key] != known
        while len(self._used) > _MOST:
            del self._used[next(iter(self._used))]

    def fits(self, gpu_type: str, first: str, second: str) -> bool:
        """Return whether two applications fit on one GPU, with a part to spare.

        True if neither has reported, False if only one has.
        """
        used = [self._used.get((application, gpu_type)) for application in (first, second)]
        known = [u for u in used if u is not None]
        if len(known) < len(used):
            return not known
        capacity = min(u.capacity for u in known)
        return sum(u.peak for u in known) <= (1 - SPARE) * capacity

    def to_json(self) -> list[list[Any]]:
        """Return rows for the ledger."""
        return [[*key, used.peak, used.capacity] for key, used in list(self._used.items())]

    @classmethod
    def of_json(cls, value: Any) -> GpuMemory:
        """Return the value that `to_json` wrote; unreadable rows are left out."""
        memory = cls()
        for row in value if isinstance(value, list) else ():
            match row:
                case [str(application), str(gpu_type), int(peak), int(capacity)]:
                    memory._used[application, gpu_type] = UsedMemory(peak, capacity)
        return memory
