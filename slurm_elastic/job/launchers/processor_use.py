"""CPUs that the ranks on this node keep busy, and their reads from storage, from procfs.

Standard library only. Processes that have ended between two looks are not counted.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

#: Shorter times between two looks are too coarse: the kernel counts in hundredths of a second.
_LEAST_S = 8.0


class _RankCounter(ABC):
    """Growth of a counter of the ranks' processes, from one call to the next.

    Args:
        processes: returns the ids of the ranks' processes on this node.
        gpus: returns how many GPUs they have.
        clock: monotonic seconds.
        proc: where the kernel shows processes.
    """

    def __init__(
        self,
        processes: Callable[[], Iterable[int]],
        gpus: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = Path("/proc"),
    ) -> None:
        self._processes, self._gpus = processes, gpus
        self._clock, self._proc = clock, proc
        self._last: tuple[float, dict[int, float]] | None = None

    def _growth(self) -> float | None:
        """Return the growth in a second for each GPU since the last look; None: nothing new."""
        now = self._clock()
        if self._last is not None and now - self._last[0] < _LEAST_S:
            return None
        counts = {pid: n for pid in self._processes() if (n := self._readable(pid)) is not None}
        last, self._last = self._last, (now, counts)
        gpus = self._gpus()
        if last is None or not gpus or last[1].keys().isdisjoint(counts):
            return None  # a first look, or the program has started anew
        grown = sum(max(0.0, n - last[1].get(pid, 0.0)) for pid, n in counts.items())
        return grown / (now - last[0]) / gpus

    def _readable(self, pid: int) -> float | None:
        """Return the counter of a process; None: it has ended, or is another user's."""
        try:
            return self._count(self._proc / str(pid))
        except (OSError, IndexError, KeyError, ValueError):
            return None

    @abstractmethod
    def _count(self, process: Path) -> float:
        """Return the counter of the process with this folder in procfs."""


class ProcessorUse(_RankCounter):
    """CPUs that the ranks keep busy; see `_RankCounter`."""

    def busy_cpus(self) -> float | None:
        """Return the busy CPUs for each GPU since the last look; None: there is nothing new."""
        return self._growth()

    def _count(self, process: Path) -> float:
        """See `_RankCounter`: CPU seconds."""
        text = (process / "stat").read_text("utf-8", "replace")
        fields = text.rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class StorageReads(_RankCounter):
    """Bytes that the ranks read from storage, not from the page cache; see `_RankCounter`."""

    def read_bytes_s(self) -> float | None:
        """Return the bytes a second for each GPU since the last look; None: nothing new."""
        return self._growth()

    def _count(self, process: Path) -> float:
        """See `_RankCounter`: bytes."""
        lines = (process / "io").read_text("utf-8", "replace").splitlines()
        return float(int(dict(line.split(": ", 1) for line in lines)["read_bytes"]))
